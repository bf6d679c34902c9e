"""Fresh random inputs of a row, what they cost at least, and the truth that every contender is held against."""

import functools
import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip.bench import block, paged, rows
from onchip.bench.judge import distance, larger
from onchip.bench.mod import Mod, area
from onchip.bench.mods import make
from onchip.bench.suite import Generate, Ladder, Overhead, Pass, Row, Shared
from onchip.core.masks import Causal
from onchip.core.problem import E4M3, Attention, Cost, Operands, Rope, Rows
from onchip.dispatch import OPS
from onchip.kernels.attention import reference
from onchip.models import gguf, weights
from onchip.ops.attention import attention

SAMPLE = 64  # queries of one sequence that are held against the reference
MODDED = 4  # heads of a mod that are; their scores fill 20 GB at 8k, with all that torch keeps for the gradients
PAIRS = 1 << 27  # pairs whose random numbers are drawn for it: they and what they are made from may fill 300 bytes a pair
DENSE = 1 << 29  # scores of a head group that the reference may hold at once: 2 GiB of float32, several times
PASSES = {"forward": ("prefill",), "backward": ("backward",), "step": ("prefill", "backward")}  # {what is asked: its operators}


@dataclass(frozen=True, eq=False)
class Tensors:
    """Random inputs of an attention Problem, `[batch, len, heads, dim]`, or without batch when `offsets` says they are packed.

    Those of a Problem in e4m3 are bfloat16: who answers it quantises them, and is held against what they were.
    """

    problem: Attention
    q: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    offsets: Tensor | None = None
    lengths: tuple[int, ...] = ()
    on_host = False  # time it where it runs, not by the host's clock

    @property
    def tolerance(self) -> float:
        return {1: 8e-2, 2: 2e-2}.get(self.problem.dtype.itemsize, 1e-3)

    @property
    def cost(self) -> Cost:
        """That of the Problem; for packed sequences that of the lengths they really have."""
        of = OPS[self.problem.op].cost
        each = [of(self.problem._replace(batch=1, len_q=n, len_k=n, keys="dense", tokens=0)) for n in self.lengths]
        return functools.reduce(Cost.__add__, each) if each else of(self.problem)

    def error(self, output: Tensor, ours: Tensor | None) -> float:
        """||output - truth|| / ||truth||: against the float32 reference on one sequence's last queries, and against `ours` in full; the larger."""
        to_truth = distance(self._sample(output), self._truth)
        return to_truth if ours is None else larger(to_truth, distance(output, ours))

    @functools.cached_property
    def _truth(self) -> Tensor:
        k, v = ((x[-self.lengths[-1] :] if self.lengths else x[-1]) for x in (self.k, self.v))
        return reference.one(self.problem, 0, self._sample(self.q).float(), k, v, Operands(self.problem.dim**-0.5))[0]

    def _sample(self, x: Tensor) -> Tensor:
        """The last queries of the last sequence, `[queries, heads, dim]`; masks align bottom right, so these are a Problem of their own."""
        queries = self.lengths[-1] if self.lengths else self.problem.len_q
        return (x if self.lengths else x[-1])[-min(SAMPLE, queries) :]


@dataclass(frozen=True, eq=False)
class Trained:
    """Random inputs of a Pass and the gradient of its output, laid out as in `Tensors`; `mod` is what its name stands for."""

    problem: Pass
    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    offsets: Tensor | None = None
    lengths: tuple[int, ...] = ()
    mod: Mod = Mod()
    on_host = False

    @property
    def tolerance(self) -> float:
        """Gradients are sums of differences, dP - delta, and cancel."""
        return {1: 8e-2, 2: 2e-2}.get(self.problem.dtype.itemsize, 1e-3) * (1 if self.problem.op == "forward" else 2)

    @functools.cached_property
    def cost(self) -> Cost:
        """That of the operators, for the lengths there really are and the pairs that the mod really shows; what the mod reads is read once."""
        p = self.problem.inner
        each = [p._replace(batch=1, len_q=n, len_k=n, keys="dense", tokens=0) for n in self.lengths] or [p]
        total = functools.reduce(Cost.__add__, (OPS[op].cost(part) for op in PASSES[self.problem.op] for part in each))
        if not self.problem.mod:
            return total
        seen = area(self.mod, p, self.q.device) / (p.batch * p.heads * p.len_q * p.len_k)
        return Cost(seen * total.flops, total.bytes + sum(t.nbytes for t in self.mod.tensors))

    @property
    def given(self) -> int:
        """The bytes of what a step begins with: q, k, v and the gradient of the output."""
        return sum(t.nbytes for t in (self.q, self.k, self.v, self.d_out))

    @property
    def ideal(self) -> int:
        """The bytes of a step that are inputs, output, their gradients and LSE."""
        return 2 * self.given + 4 * self.problem.inner.heads * self.q.shape[:-2].numel()

    def error(self, output: Tensor | tuple[Tensor, ...], ours: Tensor | tuple[Tensor, ...] | None) -> float:
        """||x - truth|| / ||truth|| of the output or of each gradient, the largest: against the float32 reference on a part, and against `ours` in full."""
        found, ours = (x if isinstance(x, tuple) else (x,) for x in (output, () if ours is None else ours))
        far = [distance(self._part(x, index), truth) for index, (x, truth) in enumerate(zip(found, self._truth, strict=False))]
        return functools.reduce(larger, [*far, *(distance(x, y) for x, y in zip(found, ours, strict=False))])

    @property
    def _heads(self) -> tuple[int, int]:
        """Query and key heads of the part that is held against the reference: those of one group, or with a mod a few, for it may tell them apart."""
        p = self.problem.inner
        most = max(1, min(MODDED, PAIRS // (p.len_q * p.len_k))) if "dropout" in self.mod.own else MODDED
        groups = min(most, p.kv_heads) if self.problem.mod else 1
        return groups * p.group, groups

    @property
    def _rows(self) -> int:
        """Queries of it: all, or the last few where the scores are too many, under a mask by which the last keys are seen by the last queries alone."""
        p = self.problem.inner
        few = p.len_q * p.len_k * p.group > DENSE and getattr(p.mask, "right", None) is not None
        return min(SAMPLE, p.len_q) if few else p.len_q

    def _part(self, x: Tensor, index: int) -> Tensor:
        """The last packed sequence or the first of a batch, of output `index`: (output), (dq, dk, dv), or all four."""
        of_keys = index >= {"forward": 1, "backward": 1, "step": 2}[self.problem.op]
        return (x[-self.lengths[-1] :] if self.lengths else x[0])[-self._rows :, : self._heads[of_keys]]

    def beside_undropped(self, output: Tensor | tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
        """The part of the output or of each gradient that is held against the reference, and the same of the reference without dropout."""
        found = output if isinstance(output, tuple) else (output,)
        return [(self._part(x, index), truth) for index, (x, truth) in enumerate(zip(found, self._undropped, strict=True))]

    @functools.cached_property
    def _truth(self) -> tuple[Tensor, ...]:
        return self._reference(self.mod.functions)

    @functools.cached_property
    def _undropped(self) -> tuple[Tensor, ...]:
        return self._reference(self.mod.functions | {"dropout": None})

    def _reference(self, modded: dict[str, Any]) -> tuple[Tensor, ...]:
        """The results of the part, in float32; the first heads of the first sequence are numbered as in the whole, and so drop the same weights."""
        op, (heads, kv_heads) = self.problem.op, self._heads
        parts = [(x[-self.lengths[-1] :] if self.lengths else x[0])[None].float() for x in (self.q, self.k, self.v, self.d_out)]
        q, d_out = (parts[n][:, -self._rows :, :heads] for n in (0, 3))
        leaves = [x.detach().requires_grad_(op != "forward") for x in (q, parts[1][:, :, :kv_heads], parts[2][:, :, :kv_heads])]
        how = {"mask": self.problem.inner.mask, "kernel": "reference", "sinks": None if self.mod.sinks is None else self.mod.sinks[:heads]}
        how |= modded
        with torch.set_grad_enabled(op != "forward"):
            out = attention(*leaves, **how)
        grads = () if op == "forward" else torch.autograd.grad(out, leaves, d_out)
        found = {"forward": (out,), "backward": grads, "step": (out.detach(), *grads)}[op]
        return tuple(x[0, -self._rows :] for x in found)


@dataclass(frozen=True, eq=False)
class Prompts:
    """Random token ids, new ones for each call, so that no cache of prefixes can answer."""

    problem: Generate
    device: torch.device
    on_host = True

    @property
    def tolerance(self) -> float:
        return 1.0 if self.problem.dtype.itemsize == 2 else 0.1  # nats; a wrong token is off by several

    @property
    def cost(self) -> Cost:
        return _model_cost(self.problem)

    def draw(self) -> list[list[int]]:
        return torch.randint(1000, 40_000, (self.problem.batch, self.problem.prompt)).tolist()

    def error(self, output: tuple, _ours) -> float | None:
        """The most by which transformers' best next token beats the one chosen, in nats; None without transformers."""
        if importlib.util.find_spec("transformers") is None:
            return None
        prompts, new = (torch.tensor(x, device=self.device) for x in output)
        logits = packaged_model(self.problem.dtype, self.device)(torch.cat([prompts, new], 1), logits_to_keep=new.shape[1] + 1).logits[:, :-1].float()
        return (logits.amax(-1) - logits.gather(2, new[..., None])[..., 0]).max().item()


@dataclass(frozen=True, eq=False)
class Tiny:
    """Tensors so small that only the path to the kernel costs anything."""

    problem: Overhead
    device: torch.device
    args: tuple  # of the public function
    on_host = True
    cost = None
    tolerance = 0.0

    def error(self, _output, _ours) -> float:
        return 0.0


def inputs(row: Row, device: torch.device) -> Tensors | Trained | Prompts | Tiny | paged.Paged | paged.Appended | rows.Given | block.Given:
    """Fresh random inputs for one row."""
    if isinstance(row.problem, rows.RowOp):
        return rows.given(row.problem, device)
    if isinstance(row.problem, block.Block):
        return block.given(row.problem, device)
    if isinstance(row.problem, Generate):
        return Prompts(row.problem, device)
    if isinstance(row.problem, Overhead):
        return Tiny(row.problem, device, _tiny(row.problem.inner, device))
    if isinstance(row.problem, Ladder):
        return _tensors(row.problem.inner, (), device)
    if isinstance(row.problem, Pass):
        return _trained(row, device)
    if isinstance(row.problem, Rope):
        return paged.appended(row, device)
    if isinstance(row.problem, Shared):
        return paged.attended(row, device)
    return paged.attended(row, device) if row.problem.keys == "paged" else _tensors(row.problem, row.lengths, device)


def _tensors(p: Attention, lengths: tuple[int, ...], device: torch.device) -> Tensors:
    draw = functools.partial(torch.randn, dtype=torch.bfloat16 if p.dtype == E4M3 else p.dtype, device=device)
    if p.keys == "packed":
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        return Tensors(p, draw(p.tokens, p.heads, p.dim), *(draw(p.tokens, p.kv_heads, p.dim) for _ in range(2)), offsets=offsets, lengths=lengths)
    k, v = (draw(p.batch, p.len_k, p.kv_heads, dim) for dim in (p.dim, p.value_dim))
    return Tensors(p, draw(p.batch, p.len_q, p.heads, p.dim), k, v)


def _trained(row: Row, device: torch.device) -> Trained:
    p, name = row.problem.inner, row.problem.mod
    made = _tensors(p, row.lengths, device)
    d_out = torch.randn(*made.q.shape[:-1], p.value_dim, dtype=made.q.dtype, device=device)
    return Trained(row.problem, made.q, made.k, made.v, d_out, made.offsets, row.lengths, make(name, p, device) if name else Mod())


def _tiny(p: Attention | Rows, device: torch.device) -> tuple:
    if isinstance(p, Attention):
        if p.keys == "paged":
            made = paged.attended(Row(p, "", ""), device)
            return made.q, made.cache
        made = _tensors(p, (), device)
        return made.q, made.k, made.v
    if p.op == "rms_norm":
        return tuple(torch.randn(*shape, dtype=p.dtype, device=device) for shape in ((p.rows, p.width), (p.width,)))
    return (torch.randn(p.rows, 2 * p.width, dtype=p.dtype, device=device),)


# ---- the packaged model


@functools.lru_cache(maxsize=1)
def packaged_model(dtype: torch.dtype, device: torch.device):
    """The packaged model in transformers, its weights unpacked to `dtype`: the truth for tokens, and a peer."""
    import transformers

    # Since 5.17 transformers leaves the weights in GGUF blocks unless asked; before, it had no such class and always unpacked.
    unpack = {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    file = weights.locate(None)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=dtype, **unpack)
    return model.eval().to(device)


@functools.cache
def _widths() -> tuple[int, int, int, int]:
    """Weights in all, those of the (tied) embedding, and the columns of q and of k and v summed over layers."""
    sizes = {name: math.prod(tensor.shape) for name, tensor in gguf.read(weights.locate(None)).tensors.items()}
    hidden = sizes["output_norm.weight"]
    q, kv = (sum(n for name, n in sizes.items() if name.endswith(ends)) // hidden for ends in (("attn_q.weight",), ("attn_k.weight", "attn_v.weight")))
    return sum(sizes.values()), sizes["token_embd.weight"], q, kv


def _model_cost(p: Generate) -> Cost:
    """Weights read once a step, keys and values written (prefill) or read (decode) once; only last positions meet the vocabulary."""
    stored, embedding, q_cols, kv_cols = _widths()
    size = p.dtype.itemsize
    if p.phase == "prefill":
        flops = 2 * (stored - embedding) * p.prompt + 2 * embedding + 4 * q_cols * Causal().area(p.prompt, p.prompt)
        return Cost(p.batch * flops, size * (stored + p.batch * p.prompt * kv_cols))
    keys = p.prompt + p.new // 2  # of the middle step
    return Cost(p.batch * (2 * stored + 4 * q_cols * keys), size * (stored + p.batch * keys * kv_cols))
