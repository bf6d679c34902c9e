"""One decoder for every family: attention, then a gated MLP, each after an RMSNorm (and before another, in Gemma) and added to the residual stream."""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.cache.paged import PagePool
from onchip.core.kernel import Op
from onchip.core.masks import Window
from onchip.kernels.attention import DECODE, PREFILL
from onchip.models.families import ModelConfig
from onchip.models.gguf import ModelError
from onchip.models.layers import Linear, Norm, unchanged
from onchip.models.rope import rope_table
from onchip.ops.activation import gated_act
from onchip.ops.attention import PagedKV, attention_packed, paged_attention
from onchip.ops.fused import Append, QKNorm, rope_append

SLAB = 64  # rows of a product that has to be the same whatever their number
LONG = 1024  # queries of a chunk, more than kernels of few queries take


class Step(NamedTuple):
    """The tokens of one forward pass, and where they belong: a prefill (whole prompts end to end), a decode (one token a sequence, or the next few of
    each, as many of one as of another), or both: chunks of any lengths end to end, over what is in pages already.

    tokens, positions   int64 [tokens].        slots   int64 [tokens]: where their keys and values go; -1: nowhere.
    offsets, longest    of a prefill or chunks: int32 [batch + 1], and the most tokens of a sequence.
    page_table, lengths of a decode or chunks: int32 [batch, pages] and [batch], the new tokens counted.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    offsets: Tensor | None = None
    longest: int = 0
    page_table: Tensor | None = None
    lengths: Tensor | None = None


class Layer:
    """The weights of one block, q, k, v in one product and gate, up in another."""

    def __init__(self, c: ModelConfig, dtype: torch.dtype, device: torch.device):
        at = {"dtype": dtype, "device": device}
        norm = functools.partial(Norm, eps=c.eps, offset=c.norm_offset, **at)
        self.norm_in, self.norm_mlp = norm(c.width), norm(c.width)
        self.norm_attended, self.norm_fed = (norm(c.width), norm(c.width)) if c.post_norms else (unchanged, unchanged)
        self.qkv = Linear((c.heads + 2 * c.kv_heads) * c.dim, c.width, bias=c.qkv_bias, **at)
        self.out = Linear(c.width, c.heads * c.dim, bias=c.out_bias, **at)
        self.gate_up = Linear(2 * c.inner, c.width, bias=c.mlp_bias, **at)
        self.down = Linear(c.width, c.inner, bias=c.mlp_bias, **at)
        self.qk_norm = QKNorm(torch.empty(c.dim, **at), torch.empty(c.dim, **at), c.eps, c.norm_offset) if c.qk_norm else None
        self.rope: Tensor | None = None


class Decoder:
    """A Llama-like decoder on onchip's operators. `forward` writes the cache and returns hidden states; `logits` turns them into logits."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device):
        self.config, self.dtype, self.device = config, dtype, device
        self.embedding = torch.empty(config.vocab, config.width, dtype=dtype, device=device)
        self.layers = [Layer(config, dtype, device) for _ in range(config.layers)]
        self.norm = Norm(config.width, config.eps, config.norm_offset, dtype=dtype, device=device)
        self.head = Linear(config.vocab, config.width, bias=False, dtype=dtype, device=device)
        self.embedding_scale = torch.tensor(config.embedding_scale).to(dtype).item()  # rounded, as Gemma was trained
        self.kernel = "auto"  # a kernel for attention, by name
        self.batch_invariant = False  # see `make_invariant`

    def make_invariant(self) -> None:
        """A token's bits do not depend on the other tokens of a step, as long as it is in a decode or in a chunk of its own sequence as before."""
        self.batch_invariant = True
        parts = [self.norm, self.head, *(part for layer in self.layers for part in vars(layer).values())]
        for part in parts:
            if isinstance(part, Linear | Norm):
                part.slab = SLAB

    # ---- forward

    def forward(self, step: Step, pool: PagePool) -> Tensor:
        """Hidden states `[tokens, width]` before the last norm; keys and values of the tokens are in the pool afterwards."""
        c = self.config
        residual = self._embed(step.tokens)
        x = self.layers[0].norm_in(residual)
        for i, layer in enumerate(self.layers):
            append = Append(*pool.layer(i), step.slots)
            q, k, v = rope_append(layer.qkv(x), layer.rope, step.positions, (c.heads, c.kv_heads), layout=c.rope_layout, norm=layer.qk_norm, append=append)
            x = layer.norm_attended(layer.out(self._attend(i, q, k, v, step, pool)))
            x, residual = layer.norm_mlp(x, residual)
            x = layer.norm_fed(layer.down(gated_act(layer.gate_up(x), c.act)))
            if i + 1 < c.layers:
                x, residual = self.layers[i + 1].norm_in(x, residual)
        return x + residual

    def _embed(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embedding)
        return x if self.embedding_scale == 1 else x.mul_(self.embedding_scale)

    def _attend(self, i: int, q: Tensor, k: Tensor, v: Tensor, step: Step, pool: PagePool) -> Tensor:
        """Attention of layer `i`, `[tokens, heads dim]`: over the prompts themselves in a prefill, over pages else."""
        how = {"mask": self.config.masks[i], "scale": self.config.scale, "softcap": self.config.softcap, "batch_invariant": self.batch_invariant}
        if step.page_table is None:
            return attention_packed(q, k, v, step.offsets, longest=step.longest, **how, kernel=_of(PREFILL, self.kernel)).flatten(1)
        cache = PagedKV(*pool.layer(i), step.page_table, step.lengths)
        if step.offsets is not None:
            chunks = {"q_offsets": step.offsets, "longest": step.longest}
            return paged_attention(q, cache, **chunks, **how, kernel=_of(DECODE, self.kernel, packed=True)).flatten(1)
        each = q.unflatten(0, (len(step.lengths), -1))
        return paged_attention(each, cache, **how, kernel=_of(DECODE, self.kernel)).flatten(2).flatten(0, 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, vocab]` of hidden states `[rows, width]`."""
        logits, cap = self.head(self.norm(hidden)), self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    # ---- weights

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every weight from (Hugging Face name, tensor) pairs. Raises ModelError for one that is missing, unknown or of another shape."""
        pieces, fused = self._pieces()
        missing = set(pieces)
        for name, tensor in tensors:
            if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self.config.tied):
                continue
            parts = fused.get(name, [name])
            if not set(parts) <= set(pieces):
                raise ModelError(
                    f"weights: {name!r} has no place in this {self.config.family} of {self.config.layers} layers; config and weights are not of one model"
                )
            targets = [pieces[part] for part in parts]
            shape = [sum(len(t) for t in targets), *targets[0].shape[1:]]
            if list(tensor.shape) != shape:
                raise ModelError(f"weights: {name} is {list(tensor.shape)}, the config makes it {shape}; config and weights are not of one model")
            for target, part in zip(targets, tensor.split([len(t) for t in targets]), strict=True):
                target.copy_(part)
            missing.difference_update(parts)
        if missing:
            few = ", ".join(sorted(missing)[:3])
            raise ModelError(f"weights: {len(missing)} tensors are missing, among them {few}; the file is incomplete or of another model")

    def randomise(self, seed: int = 0) -> None:
        """Random weights of a plausible size: the shape of a model without its file, for benchmarks."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for piece in self._pieces()[0].values():
            if piece.ndim == 1:
                piece.fill_(1.0 - self.config.norm_offset)
            else:
                piece.normal_(std=piece.shape[1] ** -0.5, generator=generator)

    def prepare(self, positions: int) -> None:
        """After the weights are in: tie the head, lay weights out for the device, and make the rotary tables for `positions`."""
        c = self.config
        if c.tied:
            self.head.weight = self.embedding
        for layer in self.layers:
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
                linear.pack()
        self.head.pack(keep=c.tied)
        everywhere = rope_table(positions, c.rotary_dim, c.theta, c.rope, self.device)
        windowed = everywhere if c.window_theta is None else rope_table(positions, c.rotary_dim, c.window_theta, device=self.device)
        for layer, mask in zip(self.layers, c.masks, strict=True):
            layer.rope = windowed if isinstance(mask, Window) else everywhere

    def _pieces(self) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
        """{Hugging Face name: the (part of a) weight it fills}, and {name of a fused tensor: the names it stands for}."""
        c = self.config
        pieces = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        if not c.tied:
            pieces["lm_head.weight"] = self.head.weight
        fused: dict[str, list[str]] = {}

        def linear(prefix: str, target: Linear, rows: dict[str, int], whole: str | None = None) -> None:
            for kind, tensor in (("weight", target.weight), ("bias", target.bias)):
                if tensor is not None:
                    names = [f"{prefix}.{name}.{kind}" for name in rows]
                    pieces.update(zip(names, tensor.split(list(rows.values())), strict=True))
                    fused.update({f"{prefix}.{whole}.{kind}": names} if whole else {})

        for i, layer in enumerate(self.layers):
            at = f"model.layers.{i}"
            q, kv = c.heads * c.dim, c.kv_heads * c.dim
            linear(f"{at}.self_attn", layer.qkv, {"q_proj": q, "k_proj": kv, "v_proj": kv}, "qkv_proj")
            linear(f"{at}.self_attn", layer.out, {"o_proj": c.width})
            linear(f"{at}.mlp", layer.gate_up, {"gate_proj": c.inner, "up_proj": c.inner}, "gate_up_proj")
            linear(f"{at}.mlp", layer.down, {"down_proj": c.width})
            norms = {"input": layer.norm_in, "post_attention": layer.norm_mlp}
            if c.post_norms:
                norms |= {"post_attention": layer.norm_attended, "pre_feedforward": layer.norm_mlp, "post_feedforward": layer.norm_fed}
            pieces.update({f"{at}.{name}_layernorm.weight": norm.weight for name, norm in norms.items()})
            if layer.qk_norm is not None:
                pieces[f"{at}.self_attn.q_norm.weight"] = layer.qk_norm.q
                pieces[f"{at}.self_attn.k_norm.weight"] = layer.qk_norm.k
        return pieces, fused


def _of(op: Op, kernel: str, packed: bool = False) -> str:
    """The kernel asked for where it is one of this operator, and if need be one for chunks of any lengths."""
    found = any(one.name == kernel and not (packed and "len_q" in one.accepts and LONG not in one.accepts["len_q"]) for one in op.kernels)
    return kernel if found else "auto"
