"""What launches of attention kernels become for a GPU that is not here."""

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from offline import NEWEST, compiled, wide
from onchip.core import device as devices
from onchip.core.masks import Causal, Window
from onchip.core.problem import Attention, Operands
from onchip.kernels.attention import tile, triton_decode
from onchip.kernels.attention.texts import distance_axes, is_tanh, key_tile, line_of, only_adds

BF16, FP32 = torch.bfloat16, torch.float32
GPU = {"sm_80": devices.gpu("A100"), "sm_90": devices.gpu("H200"), "gfx942": devices.gpu("MI300X")}


def allowed(most: int) -> int:
    """Bytes of spills; by the newest Triton's ptxas several times as many, most of them the backward kernel's and those of three warpgroups at 64."""
    return max(most, 2600) if NEWEST else most


newest = pytest.mark.newest


def named(cases: dict, *also: str, rest: tuple[str, ...] = ()) -> list:
    """Cases by their names; those in `also` are compiled by the newest Triton too, those in `rest` by `make wide` alone."""
    assert {*also} | {*rest} <= {*cases} and not {*also} & {*rest}
    return [pytest.param(*case, id=name, marks=[newest] * (name in also) + [wide] * (name in rest)) for name, case in cases.items()]


def meta(*shape, dtype=BF16):
    """A tensor without memory: a launch looks at its kind alone."""
    return torch.empty(shape, dtype=dtype, device="meta")


def launched(module, arch: str, p: Attention, *inputs, returns=(True,), entry="launch"):
    """The first configuration of `p` on `arch`, and what each kernel that a launch starts becomes there, {name: Facts}; with LSE, and TMA if `arch` has it."""
    if not isinstance(triton_decode._partial, JITFunction):
        pytest.skip("TRITON_INTERPRET is set: @triton.jit made an interpreted function, which cannot be compiled")
    calls, how = [], module.configs(p, GPU[arch])[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", lambda kernel, *args, grid, warmup, **rest: calls.append((kernel, args, rest)))
        for one in (tile, module):
            patch.setattr(one, "fast", lambda q: arch != "gfx942" and q.dtype != FP32, raising=False)
        patch.setattr(module, "has_tma", lambda device: arch == "sm_90", raising=False)
        getattr(module, entry)(p, how, *inputs, *returns)
    found = {}
    for kernel, args, rest in calls:  # one that is started again counts its starts
        again = sum(name.partition(" ")[0] == kernel.__name__ for name in found)
        facts = found[f"{kernel.__name__} {again + 1}" if again else kernel.__name__] = compiled(kernel, args, rest, arch)
        dead = [at for at in facts.barriers if at < facts.shared - 1024]
        assert not dead or "mbarrier.inval" in facts.ptx, f"{kernel.__name__}: mbarriers that nobody uses, at {dead}, where buffers lie later"
    return how, found


def static(p: Attention, x: Operands, mask=None, score=None, drops=False):
    """A Problem and its operands with a mask, a score, and dropout."""
    if drops:
        p, x = p._replace(extras=tuple(sorted({*p.extras, "dropout"}))), x._replace(drop=0.1, state=meta(2, dtype=torch.int64))
    if mask is not None:
        p, x = p._replace(mask=mask.static()), x._replace(mask=mask.tensors)
    if score is not None:
        p, x = p._replace(score=score.static()), x._replace(score=score.tensors)
    return p, x


def products(tiles, facts, dim: int, band=None, text: str = "") -> int:
    """How many tiles of scores and of the output `hopper_prefill` multiplies in its code, of a `band` (None: of a mask's map) and a score's text."""
    of_scores = dim // 16 + bool(text and key_tile(text) is not None)  # and a bias of keys
    steps = of_scores + tiles.n // 16
    ends = isinstance(band, Causal | Window)
    sides = (2 - ends) * bool(text and line_of(text))  # loops for tiles before where ALiBi's lines bend, and behind it: one product more for a tile's scores
    bold = dim <= 128 and (not text or distance_axes(text) is not None or only_adds(text))
    again = sides * (of_scores + 1) if sides else of_scores * bold  # the scores of a tile that is done over another maximum
    halves = tiles.parts == 1 and tiles.n == 128 and ends and (not text or is_tanh(text))
    once = facts.wgmma - tiles.groups * (again + sides) - (tiles.groups - 1) * of_scores * halves  # of a first tile's left half, of all but the last rows
    assert once % steps == 0, f"{facts.wgmma} products, {once} of tiles of {steps}"
    return once // steps
