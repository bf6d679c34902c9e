"""Who is timed: ours, and every peer that can be imported. One function a peer makes the call to be timed from a row's inputs."""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from onchip.bench import block, data, ladder, meters, paged_peers, passes, rows
from onchip.bench.bars import PORTABLE
from onchip.bench.call import Call
from onchip.bench.data import Prompts, Tensors, Tiny
from onchip.bench.paged import Paged
from onchip.bench.row_operator import TILES
from onchip.bench.suite import Asked, Generate, Ladder, Overhead, Pass, Shared
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import E4M3, SHORT, Attention, Operands, Rope, Rows
from onchip.dispatch import record, select
from onchip.ops.activation import gated_act
from onchip.ops.attention import attention, attention_packed, paged_attention, quantise, random_signs
from onchip.ops.norm import rms_norm

HALF = (torch.bfloat16, torch.float16)
CACHE_GIB = 2.0  # for keys and values: several times what a row of "generate" needs, and leaves a GPU's memory to the peer
LOOP = 500  # calls a reading of an Overhead row: more would fill the launch queue of a GPU, which holds 1,024


@dataclass(frozen=True)
class Peer:
    """Someone who answers Problems of one kind.

    prepare   inputs -> Call; copies and plans made here are not timed.
    rules     functions (problem, device) -> the reason it cannot take this row, or None.
    module, package   what is imported, and the distribution whose version is written down; empty: part of onchip or torch.
    draws     whether its random numbers, where a row asks for some, are others than ours.
    """

    name: str
    kind: type
    prepare: Callable[..., Call]
    rules: tuple[Callable, ...] = ()
    module: str = ""
    package: str = ""
    draws: bool = False

    @property
    def installed(self) -> bool:
        try:
            return not self.module or importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # the parent of a dotted name
            return False

    def why_not(self, problem: Asked, device: torch.device) -> str | None:
        return next((why for rule in self.rules if (why := rule(problem, device))), None)


def contenders(problem: Asked, device: torch.device) -> tuple[list[Peer], dict[str, str]]:
    """Those who take this row, ours first, and the reasons of the others that are installed."""
    reasons = {peer: peer.why_not(problem, device) for peer in PEERS if isinstance(problem, peer.kind) and peer.installed}
    return [peer for peer, why in reasons.items() if why is None], {peer.name: why for peer, why in reasons.items() if why}


def versions() -> dict[str, str]:
    """The versions of triton and of each peer that is a package of its own, where they are installed."""
    found = {}
    for package in dict.fromkeys(["triton", *(peer.package for peer in PEERS if peer.package)]):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _on(kind: str) -> Callable:
    return lambda _problem, device: None if device.type == kind else f"timed on {kind} only"


def _op(name: str) -> Callable:
    return lambda p, _device: None if p.op == name else f"no {p.op}"


def _quantised(p: Attention | Pass, _device) -> str | None:
    return None if p.dtype == E4M3 or (isinstance(p, Attention) and p.kv) else "beside quantised numbers only"


def _half(p: Attention | Pass, _device) -> str | None:
    return None if p.dtype in HALF else f"no {SHORT[p.dtype]}"


# ---- ours


def _onchip(inputs: Tensors | Paged) -> Call:
    p, i = inputs.problem, inputs
    if p.keys == "paged":
        return paged_peers.onchip(i)
    if p.dtype == E4M3:
        quantised = quantise(i.q, i.k, i.v, share="head", rotation=random_signs(p.dim, device=i.q.device))
        return Call(lambda: attention(*quantised, mask=p.mask))
    if p.keys == "packed":
        return Call(lambda: attention_packed(i.q, i.k, i.v, i.offsets, longest=p.len_q, mask=p.mask))
    return Call(lambda: attention(i.q, i.k, i.v, mask=p.mask))


def _onchip_triton(inputs: Tensors) -> Call:
    """By the kernels that every NVIDIA GPU has, wherever this runs."""
    p, i = inputs.problem, inputs
    how = {"mask": p.mask, "kernel": "triton_prefill"}
    if p.keys == "packed":
        return Call(lambda: attention_packed(i.q, i.k, i.v, i.offsets, longest=p.len_q, **how))
    return Call(lambda: attention(i.q, i.k, i.v, **how))


def _onchip_bf16(inputs: Tensors | Paged) -> Call:
    """What attention over numbers quantised beforehand is to beat."""
    i = inputs
    if i.problem.keys == "paged":
        return paged_peers.onchip_bf16(i)
    return Call(lambda: attention(i.q, i.k, i.v, mask=i.problem.mask))


def _onchip_generate(inputs: Prompts) -> Call:
    from onchip import SamplingParams

    llm = _llm(SHORT[inputs.problem.dtype], str(inputs.device))

    def go(new: int):
        prompts = inputs.draw()
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        return prompts, [list(done.tokens) for done in llm.generate(prompts, params)]

    return _phase(inputs.problem, go)


@functools.lru_cache(maxsize=1)
def _llm(dtype: str, device: str):
    from onchip import LLM

    return LLM(None, dtype=dtype, device=device, cache_gib=CACHE_GIB, prefix_cache=None)


def _phase(p: Generate, go: Callable[[int], tuple]) -> Call:
    """Prefill is the time to one token; decode what `new` further tokens add to it."""
    return Call(lambda: go(1)) if p.phase == "prefill" else Call(lambda: go(p.new + 1), lambda: go(1), p.new)


def _public(p: Overhead, args: tuple) -> Callable:
    """The public function on its arguments."""
    if p.inner.op == "rms_norm":
        return lambda: rms_norm(*args)
    if p.inner.op == "gated_act":
        return lambda: gated_act(*args)
    function = paged_attention if p.inner.op == "decode" else attention
    return lambda: function(*args, mask=p.inner.mask)


def _loop(call: Callable) -> Call:
    def run():
        for _ in range(LOOP):
            last = call()
        return last

    return Call(run, count=LOOP)


def _onchip_overhead(inputs: Tiny) -> Call:
    p = inputs.problem
    return _loop(_public(p, inputs.args) if p.op == "call" else _select(p, inputs.args))


def _select(p: Overhead, args: tuple) -> Callable:
    """What the public function does before its kernel: the Problem from a tensor's shape, and its Decision."""
    x, inner = args[0], p.inner
    if isinstance(inner, Rows):
        divide = x.shape[-1] // inner.width
        return lambda: select(Rows(inner.op, x.numel() // x.shape[-1], x.shape[-1] // divide, x.dtype, inner.variant), x.device)

    def choose():
        batch, len_q, heads, dim = x.shape
        return select(inner._replace(batch=batch, len_q=len_q, heads=heads, dim=dim, dtype=x.dtype), x.device)

    return choose


def _kernel_alone(inputs: Tiny) -> Call:
    """The chosen kernel on the same arguments, called as the public function calls it, without Problem and select."""
    p, args = inputs.problem, inputs.args
    with record() as decisions:
        _public(p, args)()
    launch = decisions[-1].launch
    x = Operands(args[0].shape[-1] ** -0.5)
    rest = {"prefill": (x, False), "decode": (x, False), "rms_norm": (1e-6, None), "gated_act": ()}
    return _loop(functools.partial(launch, *args, *rest[p.inner.op]))


# ---- the ladder


def _rung(rung: ladder.Rung) -> Callable[[Tensors], Call]:
    """In the layout of a rung, [batch, heads, n, dim]; a host that lacks the memory for it says so before it is tried."""

    def prepare(inputs: Tensors) -> Call:
        p = inputs.problem
        meters.make_room(rung.held(p, inputs.q.device), inputs.q.device)
        q, k, v = (x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v))
        return Call(lambda: rung.attend(p, q, k, v).transpose(1, 2))

    return prepare


# ---- torch


def _torch_tiny(inputs: Tiny) -> Call:
    """The bare expression; for paged attention there is none."""
    p, args = inputs.problem.inner, inputs.args
    if p.op == "rms_norm":
        return _loop(lambda: F.rms_norm(args[0], (p.width,), args[1]))
    if p.op == "gated_act":
        return _loop(lambda: F.silu(args[0][..., : p.width]) * args[0][..., p.width :])
    q, k, v = (x.transpose(1, 2).contiguous() for x in args)
    return _loop(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))


def _no_paged_keys(p: Overhead, _device) -> str | None:
    return "no paged keys" if p.inner.op == "decode" else None


def _sdpa(backend: str | None) -> Callable[[Tensors], Call]:
    """torch's attention in the layout it likes best, [batch, heads, len, dim]; `backend` None: torch chooses."""

    def prepare(inputs: Tensors) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        p = inputs.problem
        q, k, v = (x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v))
        attend = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=isinstance(p.mask, Causal), enable_gqa=p.group > 1)

        def run():
            with sdpa_kernel(getattr(SDPBackend, backend)) if backend else nullcontext():
                return attend().transpose(1, 2)

        return Call(run)

    return prepare


def _sdpa_takes(p: Attention, _device) -> str | None:
    if p.op != "prefill" or p.keys != "dense":
        return "no packed or paged keys"
    if not isinstance(p.mask, (Full, Causal)):
        return f"{p.mask} only as a dense mask"
    return "aligns Causal to the top left" if isinstance(p.mask, Causal) and p.len_q != p.len_k else None


# ---- packages


def _fa4(inputs: Tensors) -> Call:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    p, i = inputs.problem, inputs
    window = (p.mask.left, 0) if isinstance(p.mask, Window) else (None, None)
    keywords = {"causal": isinstance(p.mask, Causal), "window_size": window}
    if p.keys == "packed":
        keywords |= {"cu_seqlens_q": i.offsets, "cu_seqlens_k": i.offsets, "max_seqlen_q": p.len_q, "max_seqlen_k": p.len_k}
    function = flash_attn_varlen_func if p.keys == "packed" else flash_attn_func
    return Call(lambda: function(i.q, i.k, i.v, **keywords)[0])  # (out, LSE or None)


def _transformers(inputs: Prompts) -> Call:
    model = data.packaged_model(inputs.problem.dtype, inputs.device)

    def go(new: int):
        prompts = inputs.draw()
        ids = torch.tensor(prompts, device=inputs.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
        return prompts, out[:, ids.shape[1] :].tolist()

    return _phase(inputs.problem, go)


GPU_PREFILL = (_on("cuda"), _op("prefill"), _half)
GPU_PASS = (_on("cuda"), _half)
GPU_ROWS = (_on("cuda"), _half, rows.no_backward)
GPU_PAGED = (_on("cuda"), _op("decode"), _half)
FLASHINFER = ("flashinfer", "flashinfer-python")
PEERS = (  # ours first, for its output is what the others are compared with
    Peer("onchip", Attention, _onchip),
    Peer(PORTABLE, Attention, _onchip_triton, GPU_PREFILL),
    Peer("onchip, bf16", Attention, _onchip_bf16, (_quantised,)),
    Peer("onchip", Generate, _onchip_generate),
    Peer("onchip", Overhead, _onchip_overhead),
    Peer("onchip", Ladder, _onchip),
    Peer("onchip", Pass, passes.onchip),
    Peer(PORTABLE, Pass, passes.onchip_triton, (*GPU_PASS, passes.plain_only)),
    Peer("onchip, bf16", Pass, passes.onchip_bf16, (_quantised,)),
    *(Peer(name, Ladder, _rung(rung)) for name, rung in ladder.RUNGS.items()),
    Peer("onchip kernel alone", Overhead, _kernel_alone, (_op("call"),)),
    Peer("cuDNN (torch)", Attention, _sdpa("CUDNN_ATTENTION"), (*GPU_PREFILL, _sdpa_takes)),
    Peer("FlashAttention-2 (torch)", Attention, _sdpa("FLASH_ATTENTION"), (*GPU_PREFILL, _sdpa_takes)),
    Peer("FlashAttention-4", Attention, _fa4, GPU_PREFILL, "flash_attn.cute", "flash-attn-4"),
    Peer("onchip", Shared, paged_peers.onchip_cascade),
    Peer("onchip, one by one", Shared, paged_peers.onchip),
    Peer("FlashInfer (cascade)", Shared, paged_peers.flashinfer_cascade, (_on("cuda"), _half), *FLASHINFER),
    Peer("FlashInfer", Shared, paged_peers.flashinfer(True), (_on("cuda"), _half), *FLASHINFER),
    Peer("torch SDPA, dense keys", Shared, paged_peers.sdpa),
    Peer("onchip", Rope, paged_peers.onchip_append),
    Peer("FlashInfer", Attention, paged_peers.flashinfer(True), (*GPU_PAGED, paged_peers.decode_takes), *FLASHINFER),
    Peer("FlashInfer (CUDA cores)", Attention, paged_peers.flashinfer(False), (*GPU_PAGED, paged_peers.cores_take), *FLASHINFER),
    Peer("FlashInfer (FA3)", Attention, paged_peers.flashinfer_fa3, (*GPU_PAGED, paged_peers.fa3_takes), *FLASHINFER),
    Peer("FlashInfer (MLA)", Attention, paged_peers.flashinfer_latent, (*GPU_PAGED, paged_peers.latent_takes), *FLASHINFER),
    Peer("FlashInfer", Rope, paged_peers.flashinfer_append, (_on("cuda"), _half, paged_peers.append_takes), *FLASHINFER),
    Peer("torch SDPA", Attention, _sdpa(None), (_on("cpu"), _sdpa_takes)),
    Peer("torch SDPA, dense keys", Attention, paged_peers.sdpa, (_op("decode"), paged_peers.sdpa_takes)),
    Peer("cuDNN (torch)", Pass, passes.sdpa("CUDNN_ATTENTION"), (*GPU_PASS, passes.sdpa_takes), draws=True),
    Peer("FlashAttention-2 (torch)", Pass, passes.sdpa("FLASH_ATTENTION"), (*GPU_PASS, passes.flash_takes), draws=True),
    Peer("FlashAttention-4", Pass, passes.fa4, (*GPU_PASS, passes.no_mod), "flash_attn.cute", "flash-attn-4"),
    Peer("torch SDPA", Pass, passes.sdpa(None), (_on("cpu"), passes.sdpa_takes), draws=True),
    Peer("FlexAttention", Pass, passes.flex(True), (_on("cuda"), passes.flex_takes)),
    Peer("FlexAttention, eager", Pass, passes.flex(False), (_on("cpu"), passes.flex_takes)),
    Peer("onchip", rows.RowOp, rows.onchip),
    Peer("onchip, one by one", rows.RowOp, rows.package("onchip, one by one"), (rows.has("onchip, one by one"),)),
    *(Peer(name, rows.RowOp, rows.package(name), (_on("cuda"), rows.has(name), rows.has_tiles(n))) for n, name in enumerate(TILES, 2)),
    Peer("torch.compile", rows.RowOp, rows.torch_compiled, (_on("cuda"),)),
    Peer("Liger", rows.RowOp, rows.package("Liger"), (*GPU_ROWS, rows.has("Liger")), "liger_kernel", "liger-kernel"),
    Peer("quack", rows.RowOp, rows.package("quack"), (*GPU_ROWS, rows.has("quack")), "quack", "quack-kernels"),
    Peer("FlashInfer", rows.RowOp, rows.package("FlashInfer"), (*GPU_ROWS, rows.has("FlashInfer")), *FLASHINFER),
    Peer("torch", rows.RowOp, rows.torch_eager),
    Peer("onchip", block.Block, block.peer(block.ONCHIP)),
    *(Peer(name, block.Block, block.peer(fusion.undone)) for name, fusion in block.FUSIONS.items()),
    Peer("torch.compile", block.Block, block.compiled, (_on("cuda"),)),
    Peer("Liger", block.Block, block.peer(block.LIGER), (_on("cuda"), _half), "liger_kernel", "liger-kernel"),
    Peer("torch", block.Block, block.peer(block.TORCH)),
    Peer("torch", Overhead, _torch_tiny, (_op("call"), _no_paged_keys)),
    Peer("transformers", Generate, _transformers, (), "transformers", "transformers"),
)
