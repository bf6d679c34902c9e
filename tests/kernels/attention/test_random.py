"""Whatever attention can do, combined at random: forward, LSE and every gradient against float64; and gradients against finite differences."""

import contextlib
import os
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, example, given, reject, seed, settings
from hypothesis import strategies as st

import onchip
from judge import assert_as_good_as_torch, hardware
from onchip.core import masks, scores
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import Dropout
from onchip.core.trace import hides_keys
from onchip.kernels import attention
from onchip.kernels.attention import blocked, blocked_fused, blocked_tiles
from onchip.kernels.attention.reference import place

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero", "ignore:All-NaN slice", "ignore:invalid value")  # numpy's, of the interpreter


class Case(NamedTuple):
    """A call without its tensors."""

    lengths: tuple[tuple[int, int], ...]  # (queries, keys) of each sequence; of a dense batch all alike
    packed: bool
    unused: tuple[int, int]  # tokens (queries, keys) at the end of each packed sequence that are not used
    heads: tuple[int, int]  # (of keys, queries a key head)
    dims: tuple[int, int]
    dtype: torch.dtype
    mask: tuple[str, ...]  # one, or two with "&" or "|" between
    score: tuple[str, ...]
    bias: str | None  # the letters of b, h, i, j that it differs along
    softcap: float | None
    sinks: bool
    drop: float
    scale: float | None
    storage: str
    gradients: bool  # also of what the scores read, and through LSE
    small: bool  # tiles of a few rows and keys, for `blocked`
    seed: int

    @property
    def batch(self):
        return len(self.lengths)

    @property
    def query_heads(self):
        return self.heads[0] * self.heads[1]

    @property
    def longest(self):
        return tuple(max((n[side] for n in self.lengths), default=0) for side in (0, 1))


# ---- masks and scores by name; `c` is a Case


def whole(low, high, *shape):
    return torch.randint(low, high, shape)


def flags(*shape, share=0.6):
    return torch.rand(shape) < share


def some(high):
    return int(torch.randint(0, high, ()))


def window_mod(c):
    reach = whole(1, 30, c.query_heads)
    return lambda b, h, i, j: (i - j).abs() < reach[h]


MASKS = {
    "Full": lambda c: Full(),
    "Causal": lambda c: Causal(),
    "Causal top left": lambda c: Causal("top_left"),
    "Window": lambda c: Window(some(40)),
    "Window both": lambda c: Window(some(20), some(20)),
    "Window ahead": lambda c: Window(None, some(20), "top_left"),
    "Window behind": lambda c: Window(some(20), None, "top_left"),
    "Window of heads": lambda c: Window(whole(0, 40, c.query_heads), some(5)),
    "Window of both": lambda c: Window(whole(0, 40, c.batch, c.query_heads), whole(0, 9, c.batch, 1), "top_left"),
    "Chunked": lambda c: masks.Chunked(1 + some(40)),
    "Document": lambda c: masks.Document(whole(0, 3, c.batch, c.longest[1]).sort(-1).values),
    "Document of all": lambda c: masks.Document(whole(0, 3, c.longest[1]).int()),
    "Prefix": lambda c: masks.Prefix(some(30)),
    "Prefix of each": lambda c: masks.Prefix(whole(0, 30, c.batch)),
    "Tree": lambda c: masks.Tree.of(torch.tensor([-1, 0, 0, 1, 3, -1, 5])),
    "Tree of each": lambda c: masks.Tree.of(F.pad(whole(-1, 1, c.batch, 3), (1, 0), value=-1)),
    "Tree with a window": lambda c: masks.Tree(masks.Tree.of(F.pad(whole(-1, 1, c.batch, 3), (1, 0), value=-1)).ancestors, some(20)),
    "KeyPadding": lambda c: masks.KeyPadding(whole(0, c.longest[1] + 1, c.batch)),
    "KeyPadding flags": lambda c: masks.KeyPadding(flags(c.batch, c.longest[1])),
    "Blocks": lambda c: masks.Blocks(flags(c.query_heads, *(-(-n // 16) for n in c.longest), share=0.4), 16),
    "Blocks of both": lambda c: masks.Blocks(flags(c.batch, 1, -(-c.longest[0] // 32), -(-c.longest[1] // 8), share=0.2), (32, 8)),
    "Dense": lambda c: masks.Dense(flags(*c.longest)),
    "Dense of batch": lambda c: masks.Dense(flags(c.batch, 1, *c.longest)),
    "Dense of heads": lambda c: masks.Dense(flags(c.query_heads, 1, c.longest[1])),
    "function": lambda c: lambda b, h, i, j: ((i // 5 - j // 5).abs() <= 1) | (j == h),
    "function that reads": window_mod,
    "nothing": lambda c: lambda b, h, i, j: i < 0,
}

# (the shape of what it reads, from which it is made)
SCORES = {
    "ALiBi": (lambda c: (c.query_heads,), lambda t: scores.ALiBi(t)),
    "ALiBi of each": (lambda c: (c.batch, c.query_heads), lambda t: scores.ALiBi(t, "linear")),
    "RelativeBias": (lambda c: (c.query_heads, 11), lambda t: scores.RelativeBias(t)),
    "BucketBias": (lambda c: (8, c.query_heads), lambda t: scores.BucketBias(t, 40)),
    "table": (lambda c: (c.query_heads, 1 + max(c.longest)), lambda t: lambda s, b, h, i, j: s + t[h, (i - j).abs()]),
    "gain": (lambda c: (c.query_heads,), lambda t: lambda s, b, h, i, j: s * t[h] - 0.1),
    "gain of keys": (lambda c: (c.batch, c.longest[1]), lambda t: lambda s, b, h, i, j: s * (1 + 0.2 * t[b, j])),
    "number": (lambda c: (), lambda t: lambda s, b, h, i, j: s * t.tanh()),
    "steps": (None, lambda t: lambda s, b, h, i, j: torch.where(i >= j, s, 0.5 * s - 1)),
    "square": (None, lambda t: lambda s, b, h, i, j: s - 0.02 * s * s + 0.01 * (i - j)),
}


def make(c: Case, device) -> dict[str, torch.Tensor]:
    """What gets gradients, by name; the numbers of low precision, so that they are the same in any."""
    torch.manual_seed(c.seed)
    counts = [sum(n[side] for n in c.lengths) for side in (0, 1)]
    q_shape, k_shape = ((counts[side],) if c.packed else (c.batch, c.longest[side]) for side in (0, 1))
    made = {
        "q": torch.randn(*q_shape, c.query_heads, c.dims[0]),
        "k": torch.randn(*k_shape, c.heads[0], c.dims[0]),
        "v": torch.randn(*k_shape, c.heads[0], c.dims[1]),
    }
    made = {name: t.to(c.dtype) for name, t in made.items()}
    if c.sinks:
        made["sinks"] = torch.randn(c.query_heads)
    if c.bias is not None:
        sizes = (c.batch, c.query_heads, *c.longest)
        made["bias"] = torch.randn([size if letter in c.bias else 1 for letter, size in zip("bhij", sizes, strict=True)])
        if c.seed % 2:
            made["bias"] = made["bias"].to(c.dtype)
    for name in c.score:
        if SCORES[name][0]:
            made[name] = torch.randn(SCORES[name][0](c))
    return {name: t.to(device) for name, t in made.items()}


def stored(c: Case, name: str, t: torch.Tensor) -> torch.Tensor:
    """The same numbers, laid out otherwise; what lies between is NaN."""
    if c.storage == "transposed":
        return t.transpose(-3, -2).contiguous().transpose(-3, -2)
    if c.storage == "sliced":
        return F.pad(t, (0, 3, 1, 0), value=torch.nan)[..., 1:, : t.shape[-1]]
    if c.storage == "dim first":
        return t.transpose(-3, -1).contiguous().transpose(-3, -1)
    if c.storage == "expanded" and name != "q":
        return t[..., :1, :].expand(t.shape)
    return t


def run(c: Case, kernel: str, made: dict, dtype: torch.dtype | None = None, rounded: bool = False) -> dict[str, torch.Tensor]:
    """Output, LSE and gradients by name; with `dtype` of all tensors in it.

    rounded   gradients as from what kernels keep of the forward pass: an output in `c.dtype`, so that rowsum(dO O), which goes where a gradient of
              LSE goes, errs by a rounding of its terms; and LSE in float32, so that all weights of a row are off by a rounding of it (and of 1: near
              0 it is a logarithm of what is near 1).
    """
    device = made["q"].device
    leaves = {name: (t if dtype is None else t.to(dtype)).detach().clone() for name, t in made.items()}
    graded = [name for name in leaves if c.gradients or name in ("q", "k", "v", "sinks")]
    for name in graded:
        leaves[name].requires_grad_()
    q, k, v = (stored(c, name, leaves[name]) for name in ("q", "k", "v"))
    torch.manual_seed(c.seed + 1)
    each = [MASKS[name](c) for name in c.mask[::2]]
    each = [move(masks.as_mask(mask), device) for mask in each]
    mask = each[0] if len(each) == 1 else each[0] & each[1] if c.mask[1] == "&" else each[0] | each[1]
    if hides_keys(static := mask.static()):
        unseen = hidden_keys(c, static, mask.tensors, len(k), device).view(*k.shape[:-2], 1, 1)
        k, v = (t.masked_fill(unseen, torch.nan) for t in (k, v))
    how = {
        "mask": mask,
        "scale": c.scale,
        "bias": leaves.get("bias"),
        "score": [SCORES[name][1](leaves.get(name)) for name in c.score] or None,
        "softcap": c.softcap,
        "sinks": leaves.get("sinks"),
        "dropout": Dropout(c.drop, c.seed, 3) if c.drop else None,
        "kernel": kernel,
    }
    with torch.device("cpu"):
        d_out, d_lse = torch.randn(*q.shape[:-1], v.shape[-1]), torch.randn(*q.shape[:-3], c.query_heads, q.shape[-3])
    d_out, d_lse = d_out.to(c.dtype).to(device, q.dtype), d_lse.to(device, FP64 if q.dtype == FP64 else FP32)
    d_out = d_out[..., :1].expand(d_out.shape) if c.storage == "expanded" else stored(c, "d_out", d_out)
    if c.packed:
        offsets = [torch.tensor([0, *(n[side] for n in c.lengths)]).cumsum(0).int().to(device) for side in (0, 1)]
        used = [torch.tensor([max(0, n[side] - c.unused[side]) for n in c.lengths], dtype=torch.int32, device=device) for side in (0, 1)]
        for side, tensors in ((0, (q, d_out)), (1, (k, v))):
            hidden = torch.ones(len(tensors[0]), dtype=torch.bool, device=device)
            for start, n in zip(offsets[side].tolist(), used[side].tolist(), strict=False):
                hidden[start : start + n] = False
            tensors = [t.masked_fill(hidden[:, None, None], torch.nan) for t in tensors]
            (q, d_out), (k, v) = (tensors, (k, v)) if side == 0 else ((q, d_out), tensors)
        call = lambda **more: onchip.attention_packed(q, k, v, *offsets, longest=c.longest, used=tuple(used) if any(c.unused) else None, **how, **more)  # noqa: E731
    else:
        call = lambda **more: onchip.attention(q, k, v, **how, **more)  # noqa: E731
    out, lse = call(return_lse=True)
    d_lse = d_lse.masked_fill(lse == -torch.inf, 0.0) * c.gradients
    if rounded:
        known = lse.detach().masked_fill(lse == -torch.inf, 0.0)
        off = 1 + torch.finfo(FP32).eps * (1 + known.abs())
        step = torch.finfo(c.dtype).eps * out.detach().abs().clamp(min=torch.finfo(c.dtype).smallest_normal)  # an output of 1e-9 is 0 in float16
        error = (step * d_out).square().sum(-1).sqrt().transpose(-1, -2)
        d_lse = (d_lse + error.masked_fill(lse == -torch.inf, 0.0)) * off
        d_out = d_out * off.transpose(-1, -2)[..., None]
        lse = lse + torch.finfo(FP32).eps * (1 + known.abs())
        out = out * off.transpose(-1, -2)[..., None]  # scores as large as LSE, rounded in base 2
    pairs = [(out, d_out)] + [(lse, d_lse)] * (c.gradients or rounded)
    pairs = [pair for pair in pairs if pair[0].requires_grad]
    found = torch.autograd.grad([r for r, _ in pairs], [leaves[n] for n in graded], [d for _, d in pairs], allow_unused=True)
    with torch.no_grad():
        alone = call()
    grads = {f"d {name}": torch.zeros_like(leaves[name]) if d is None else d for name, d in zip(graded, found, strict=True)}
    return {"out": out.detach(), "alone": alone, "lse": lse.detach()} | grads


def hidden_keys(c: Case, mask, tensors, tokens: int, device) -> torch.Tensor:
    """Which keys no query sees, of all sequences one behind the other: what is padding may hold NaN."""
    hidden = []
    for b, lengths in enumerate(c.lengths):
        len_q, len_k = (max(0, n - spare) for n, spare in zip(lengths, c.unused, strict=True))
        seen = torch.zeros(lengths[1], dtype=torch.bool, device=device)
        if len_q and len_k:
            seen[:len_k] = mask.seen(place(b, c.query_heads, len_q, len_k, device), tensors).expand(1, c.query_heads, len_q, len_k).flatten(0, 2).any(0)
        hidden.append(~seen)
    return torch.cat(hidden) if hidden else torch.zeros(tokens, dtype=torch.bool, device=device)


def move(mask, device):
    """A mask with its tensors on the device."""
    if isinstance(mask, masks.MaskMod):
        return mask if device.type == "cpu" else masks.MaskMod(window_on(mask.function, device))
    fields = {name: getattr(mask, name) for name in type(mask).__match_args__}
    return type(mask)(**{name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in fields.items()})


def window_on(function, device):
    if not function.__closure__:
        return function
    reach = function.__closure__[0].cell_contents.to(device)
    return lambda b, h, i, j: (i - j).abs() < reach[h]


def check(c: Case, kernel: str, device) -> None:
    made = make(c, device)
    truth, low, rounded = run(c, "reference", made, FP64), run(c, "reference", made), run(c, "reference", made, FP64, rounded=True)
    with small_tiles() if c.small else contextlib.nullcontext():
        ours = run(c, kernel, made)
    for name, mine in ours.items():
        assert mine.dtype == low[name].dtype and mine.shape == low[name].shape, name
        beside = (low[name], rounded[name].to(mine.dtype))
        if name == "lse" and c.dtype == BF16 and kernel == "blocked":
            beside += (truth[name] + 2**-14,)  # what torch's CPU kernel errs, whose exponentials are of few digits there
        beside += hardware(truth[name], c.dtype, device)
        if c.softcap and c.dtype != torch.float32 and device.type == "cuda" and mine.numel():  # the hardware's tanh errs by 2^-11: of the cap, in a score
            beside += (truth[name] + c.softcap * 2**-11 * max(1.0, truth[name].nan_to_num(0, 0, 0).abs().max().item()),)
        try:
            slack = 10.0 if name == "d sinks" else 3.0 if name.startswith("d ") else 2.0  # a number a head: all that it is compared with may be lucky
            assert_as_good_as_torch(mine, beside, truth[name], slack=slack)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@contextlib.contextmanager
def small_tiles(rows=16, keys=24):
    """So that a short sequence is of many tiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(blocked.TILE, "cpu", (rows, keys))
        patch.setattr(blocked, "FUSED_ROWS", (32, 48))
        patch.setattr(blocked_fused, "WHOLE_MASK", 5000)  # of the shorter sequences
        patch.setattr(blocked_tiles, "BLOCK", 16)
        yield


# ---- what is drawn


@st.composite
def cases(draw, longest, dims, bias_of_all=True):
    some_of = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    lengths = [n for n in (17, 40, 63, 130, 211, 296) * 3 + (0, 1, 2) if n <= longest]
    packed = draw(st.booleans())
    if packed:
        each = tuple((draw(st.sampled_from(lengths)), draw(st.sampled_from(lengths))) for _ in range(some_of(1, 2, 3)))
    else:
        n = draw(st.sampled_from(lengths))
        each = ((n, some_of(n, *lengths)),) * some_of(2, 1, 3, 0)
    names = tuple(MASKS)
    mask = (draw(st.sampled_from(names)),)
    if draw(st.booleans()):
        mask += (some_of("&", "|"), draw(st.sampled_from(names)))
    if not packed and any(name.startswith("Tree") for name in mask):  # of as many nodes as a dense call has keys, at most
        assume(each and each[0][1] >= 7)
    return Case(
        lengths=each,
        packed=packed,
        unused=some_of((0, 0), (0, 0), (3, 0), (2, 5)) if packed else (0, 0),
        heads=(some_of(1, 2), some_of(1, 2, 3)),
        dims=(draw(st.sampled_from(dims)), draw(st.sampled_from(dims))),
        dtype=some_of(FP32, BF16, FP16),
        mask=mask,
        score=tuple(draw(st.lists(st.sampled_from(tuple(SCORES)), max_size=2, unique=True))),
        bias=some_of(None, None, "ij", "hij", "bhij", "j", "bj", "hi", ""),
        softcap=some_of(None, None, 3.0),
        sinks=draw(st.booleans()),
        drop=some_of(0.0, 0.0, 0.3),
        scale=some_of(None, 0.3),
        storage=some_of("plain", "transposed", "sliced", "dim first", "expanded"),
        gradients=draw(st.booleans()),
        small=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 20)),
    )


NO_KEYS = Case(  # a sink is all that its LSE knows
    lengths=((17, 0),), packed=True, unused=(0, 0), heads=(1, 1), dims=(8, 16), dtype=BF16, mask=("Full",), score=(), bias=None, softcap=None, sinks=True,
    drop=0.0, scale=None, storage="plain", gradients=True, small=False, seed=0,
)  # fmt: skip
QUIET = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}
FEW = 10 if INTERPRETED else 300


@settings(max_examples=100, **QUIET)
@given(c=cases(211, (8, 16, 24, 40, 64)))
def test_blocked(c):
    check(c, "blocked", torch.device("cpu"))


@pytest.mark.gpu
@settings(max_examples=FEW, **QUIET)
@example(c=NO_KEYS)
@given(c=cases(40 if INTERPRETED else 300, (8, 16, 24) if INTERPRETED else (8, 16, 24, 40, 64, 128)))
def test_triton(c, device):
    if c.gradients:  # what scores read has gradients of the same bits only by other kernels
        torch.use_deterministic_algorithms(False)
    check(c, "triton_prefill", device)


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("part", range(16))
def test_hopper(part, device):
    """1,000 Problems, 63 of them each, so that `-n` compiles them beside each other."""

    @seed(part)
    @settings(max_examples=63, **QUIET | {"derandomize": False})
    @given(c=cases(300, (8, 16, 24, 40, 64, 128)), half=st.sampled_from((BF16, torch.float16)), ordered=st.booleans())
    def drawn(c, half, ordered):
        on_hopper(c._replace(dtype=half, gradients=False), ordered, device)

    drawn()


def on_hopper(c, ordered, device):
    """What the menu gives it, with the gradients of what the menu takes for them, summed in any order or not; and the same bits again."""
    torch.use_deterministic_algorithms(ordered, warn_only=True)
    made = make(c, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "FEW", 0)  # small problems too
        try:
            once, again = (run(c, "hopper_prefill", made) for _ in range(2))
        except onchip.Unsupported:
            reject()  # a third of what is drawn: 1,000 reach the kernel
        assert [name for name in once if (ordered or not name.startswith("d ")) and not torch.equal(once[name], again[name])] == []
        check(c, "hopper_prefill", device)


# ---- widths of heads that are not drawn, since the oracle takes long over them

WIDTHS = ((8, 512), (9, 33), (64, 256), (100, 72), (192, 128), (256, 256), (512, 512), (576, 512))
KERNELS = ("blocked", pytest.param("triton_prefill", marks=pytest.mark.gpu))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("dims", WIDTHS, ids=lambda dims: "x".join(map(str, dims)))
@pytest.mark.parametrize("kernel", KERNELS)
def test_widths(kernel, dims, dtype, packed, device):
    """Any width of keys from 8 to 576 and of values from 8 to 512, forward and every gradient, of grouped heads."""
    lengths = ((17, 40), (21, 5)) if packed else ((17, 40),)
    check(NO_KEYS._replace(lengths=lengths, packed=packed, heads=(1, 2), dims=dims, dtype=dtype, mask=("Causal",)), kernel, device)


# ---- finite differences

EXACT = {
    "plain": {},
    "all but dropout": {"mask": Window(3, 1), "softcap": 4.0, "sinks": True, "bias": (2, 1, 5, 7), "table": (2, 12)},
    "dropout": {"mask": Causal(), "dropout": Dropout(0.4, 7), "table": (2, 12), "sinks": True},
    "a mask that reads": {"mask": masks.Document(torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]])), "sinks": True},
    "a bias alone": {"mask": Causal("top_left"), "bias": (1, 2, 1, 7)},
    "rows that see nothing": {"mask": torch.arange(5)[:, None].expand(5, 7) > 2, "softcap": 4.0},
}


@pytest.mark.parametrize(
    ("name", "through"),
    [(name, "LSE too") for name in EXACT] + [(name, "out") for name in ("plain", "a mask that reads", "rows that see nothing")],
)
@pytest.mark.sampled(2)
def test_finite_differences(name, through):
    """`torch.autograd.gradcheck` on `blocked` in float64, in tiles of a few rows and keys."""
    how = dict(EXACT[name])
    learnt = {"sinks": (2,)} if how.pop("sinks", False) else {}
    learnt |= {part: how.pop(part) for part in ("bias", "table") if part in how}
    made = [torch.randn(shape, dtype=FP64, requires_grad=True) for shape in ((2, 5, 2, 3), (2, 7, 1, 3), (2, 7, 1, 4), *learnt.values())]

    def call(q, k, v, *rest):
        given = dict(zip(learnt, rest, strict=True))
        table = given.pop("table", None)
        score = None if table is None else lambda s, b, h, i, j: s * table[h, (i - j).abs()].cos() + table[h, i + j]
        out, lse = onchip.attention(q, k, v, score=score, return_lse=True, kernel="blocked", **how, **given)
        return (out, lse.masked_fill(lse == -torch.inf, 0.0)) if through == "LSE too" else out

    with small_tiles(3, 4):
        assert torch.autograd.gradcheck(call, made)
