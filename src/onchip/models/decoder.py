"""One decoder for every family: attention, then a gated MLP, each after an RMSNorm (and before another, in Gemma) and added to the residual stream."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.cache.paged import PagePool
from onchip.core.kernel import Op
from onchip.core.masks import Causal, Mask, Window
from onchip.core.once import one_pass
from onchip.core.problem import Rows
from onchip.dispatch import native
from onchip.kernels.attention import DECODE, PREFILL
from onchip.kernels.fused import SKINNY_LINEAR
from onchip.models.families import ModelConfig
from onchip.models.gguf import View
from onchip.models.layers import Linear, Norm, summed
from onchip.models.lora import AdapterTable
from onchip.models.parallel import ALONE, TensorParallel
from onchip.models.pieces import Places, whole
from onchip.models.rope import rope_table
from onchip.ops.activation import gated_act
from onchip.ops.attention import PagedKV, attention_packed, paged_attention
from onchip.ops.cascade import Level, cascade_attention
from onchip.ops.fused import Append, rope_append
from onchip.ops.rotary import QKNorm

SLAB = 64  # rows of a product that has to be the same whatever their number
LONG = 1024  # queries of a chunk, more than kernels of few queries take


class Shared(NamedTuple):
    """What layers that see all keys read for rows that decode: `levels` once for those that share them, and what is left of each row's pages and keys.

    page_table, lengths   int32 [rows, pages] and [rows].        offsets   int32 [chunks + 1], of the chunks behind the rows; None where there are none.
    """

    levels: list[Level]
    page_table: Tensor
    lengths: Tensor
    offsets: Tensor | None = None


class Step(NamedTuple):
    """The tokens of one forward pass, and where they belong: a prefill (whole prompts end to end), a decode (one token a sequence, or the next few of
    each, as many of one as of another), or both: chunks of any lengths end to end, over what is in pages already.

    tokens, positions   int64 [tokens].        slots   int64 [tokens]: where their keys and values go; -1: nowhere.
    offsets, longest    of a prefill or chunks: int32 [batch + 1], and the most tokens of a sequence.
    page_table, lengths of a decode or chunks: int32 [batch, pages] and [batch], the new tokens counted.
    adapters            int32 [tokens]: the LoRA adapter of each, a slot of the decoder's table, -1 for none. None: nobody has one.
    masks               one a layer in place of the config's: of a decode whose tokens of each sequence are a tree.
    shared              of the first rows, which decode and stand side by side as it wants them. None: every row reads its keys for itself.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    offsets: Tensor | None = None
    longest: int = 0
    page_table: Tensor | None = None
    lengths: Tensor | None = None
    adapters: Tensor | None = None
    masks: tuple[Mask, ...] | None = None
    shared: Shared | None = None


class Layer:
    """The weights of one block, q, k, v in one product and gate, up in another. `bias`: whether this rank has the biases of what ranks sum up."""

    def __init__(self, c: ModelConfig, dtype: torch.dtype, device: torch.device, bias: bool):
        at = {"dtype": dtype, "device": device}
        norm = functools.partial(Norm, eps=c.eps, offset=c.norm_offset, **at)
        self.norm_in, self.norm_mlp = norm(c.width), norm(c.width)
        self.norm_attended, self.norm_fed = (norm(c.width), norm(c.width)) if c.post_norms else (None, None)
        self.qkv = Linear((c.heads + 2 * c.kv_heads) * c.dim, c.width, bias=c.qkv_bias, **at)
        self.out = Linear(c.width, c.heads * c.dim, bias=c.out_bias and bias, **at)
        self.gate_up = Linear(2 * c.inner, c.width, bias=c.mlp_bias, **at)
        self.down = Linear(c.width, c.inner, bias=c.mlp_bias and bias, **at)
        self.qk_norm = QKNorm(torch.empty(c.dim, **at), torch.empty(c.dim, **at), c.eps, c.norm_offset) if c.qk_norm else None
        self.rope: Tensor | None = None


class Decoder:
    """A Llama-like decoder on onchip's operators. `forward` writes the cache and returns hidden states; `logits` turns them into logits.

    parallel   the ranks that have the model together; what is here is this one's share of it, and each has a cache of its own.
    config     the shape of what is here: `heads`, `kv_heads` and `inner` are this rank's, all else is the model's.
    adapters   LoRA adapters (`AdapterTable`), for steps that say which token has which.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, parallel: TensorParallel = ALONE):
        self.parallel, self.share, self.dtype, self.device = parallel, parallel.share(config), dtype, device
        heads, kv_heads, inner, vocab = self.share
        self.config = c = dataclasses.replace(config, heads=heads.count, kv_heads=kv_heads.count, inner=inner.count)
        words = -(-c.vocab // parallel.of)
        self.embedding = torch.empty(words, c.width, dtype=dtype, device=device)
        self.layers = [Layer(c, dtype, device, bias=parallel.rank == 0) for _ in range(c.layers)]
        self.norm = Norm(c.width, c.eps, c.norm_offset, dtype=dtype, device=device)
        self.head = Linear(words, c.width, bias=False, dtype=dtype, device=device)
        for matrix in (self.embedding, self.head.weight):
            matrix[vocab.count :].zero_()  # no words: their logits are left off
        self.embedding_scale = torch.tensor(c.embedding_scale).to(dtype).item()  # rounded, as Gemma was trained
        self.kernel = "auto"  # a kernel for attention, or for products of few rows, by name
        self.batch_invariant = False  # see `make_invariant`
        self.adapters: AdapterTable | None = None
        self.ranks = parallel.meet(c.width, dtype, device)
        self.places = self._places()

    def make_invariant(self) -> None:
        """A token's bits do not depend on the other tokens of a step, as long as it is in a decode or in a chunk of its own sequence as before."""
        self.batch_invariant = True
        parts = [self.norm, self.head, *(part for layer in self.layers for part in vars(layer).values())]
        for part in parts:
            if isinstance(part, Linear | Norm):
                part.slab = SLAB

    # ---- forward

    @one_pass()
    def forward(self, step: Step, pool: PagePool) -> Tensor:
        """Hidden states `[tokens, width]` before the last norm; keys and values of the tokens are in the pool afterwards."""
        c = self.config
        lora = None if step.adapters is None else self.adapters.route(step.adapters)
        residual = self._embed(step.tokens)
        few = None if c.post_norms or lora is not None else self._few(len(residual), c.inner, c.act)
        if few is not None:
            return self._forward_few(residual, step, pool, few)
        x = self.layers[0].norm_in(residual)
        for i, layer in enumerate(self.layers):
            x = layer.out(self._attend(i, layer.qkv(x, lora), step, pool), lora)
            x, residual = self._joined(x, layer.norm_attended, layer.norm_mlp, residual)
            x = layer.down(gated_act(layer.gate_up(x, lora), c.act), lora)
            if i + 1 < c.layers:
                x, residual = self._joined(x, layer.norm_fed, self.layers[i + 1].norm_in, residual)
        return summed(x, self.ranks, residual) if layer.norm_fed is None else layer.norm_fed.of_sum(x, self.ranks) + residual

    def _joined(self, x: Tensor, own: Norm | None, norm: Norm, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`norm` of the stream, and the stream, to which the sum of all ranks' x is added: its `own` norm of some families."""
        return norm.of_sum(x, self.ranks, residual) if own is None else norm(own.of_sum(x, self.ranks), residual)

    def _forward_few(self, x: Tensor, step: Step, pool: PagePool, kernel: str) -> Tensor:
        """`forward` of embedded tokens by products that begin with their norm and end with the gate or the sum: four of the eight operators of a layer."""

        def added(linear: Linear, y: Tensor) -> Tensor:
            return linear.around(y, kernel, residual=x) if self.ranks.of == 1 else summed(linear.around(y, kernel), self.ranks, x)

        for i, layer in enumerate(self.layers):
            x = added(layer.out, self._attend(i, layer.qkv.around(x, kernel, layer.norm_in), step, pool))
            x = added(layer.down, layer.gate_up.around(x, kernel, layer.norm_mlp, self.config.act))
        return x

    def _few(self, rows: int, out: int, *act: str) -> str | None:
        """The kernel that takes a norm and a product of so few rows in one, if the menu has one for this model: of a layer it is asked for gates and ups."""
        if self.batch_invariant:
            return None
        problem = Rows("skinny_linear", rows, out, self.dtype, " ".join((f"from {self.config.width} norm", *act)))
        return native(problem, self.device, _of(SKINNY_LINEAR, self.kernel))

    def _embed(self, tokens: Tensor) -> Tensor:
        if self.parallel.of == 1:
            x = F.embedding(tokens, self.embedding)
        else:  # a word is on one rank, and 0 on the others
            local = tokens - self.share.vocab.first
            here = (local >= 0) & (local < self.share.vocab.count)
            x = summed(F.embedding(torch.where(here, local, 0), self.embedding).masked_fill_(~here[:, None], 0), self.ranks)
        return x if self.embedding_scale == 1 else x.mul_(self.embedding_scale)

    def _attend(self, i: int, qkv: Tensor, step: Step, pool: PagePool) -> Tensor:
        """Attention of layer `i`, `[tokens, heads dim]`: over the prompts themselves in a prefill, over pages else. Writes keys and values to the pool."""
        c, layer, kv = self.config, self.layers[i], pool.layer(i)
        append = Append(*kv, step.slots)
        q, k, v = rope_append(qkv, layer.rope, step.positions, (c.heads, c.kv_heads), layout=c.rope_layout, norm=layer.qk_norm, append=append)
        how = {"mask": (step.masks or c.masks)[i], "scale": c.scale, "softcap": c.softcap, "batch_invariant": self.batch_invariant}
        if step.page_table is None:
            return attention_packed(q, k, v, step.offsets, longest=step.longest, **how, kernel=_of(PREFILL, self.kernel)).flatten(1)
        if step.shared is not None and isinstance(how["mask"], Causal):
            return self._attend_shared(q, kv, step, how).flatten(1)
        cache = PagedKV(*kv, step.page_table, step.lengths)
        if step.offsets is not None:
            chunks = {"q_offsets": step.offsets, "longest": step.longest}
            return paged_attention(q, cache, **chunks, **how, kernel=_of(DECODE, self.kernel, packed=True)).flatten(1)
        each = q.view(step.lengths.shape[0], -1, c.heads, c.dim)
        return paged_attention(each, cache, **how, kernel=_of(DECODE, self.kernel)).flatten(2).flatten(0, 1)

    def _attend_shared(self, q: Tensor, kv: tuple[Tensor, Tensor], step: Step, how: dict) -> Tensor:
        """`[tokens, heads, dim]`: rows that decode by levels, the chunks behind them over their pages."""
        levels, table, lengths, offsets = step.shared
        rows = len(lengths)
        read = cascade_attention(q[:rows, None], PagedKV(*kv, table, lengths), levels, scale=how["scale"], softcap=how["softcap"])[:, 0]
        if offsets is None:
            return read
        chunks = PagedKV(*kv, step.page_table[rows:], step.lengths[rows:])
        return torch.cat((read, paged_attention(q[rows:], chunks, q_offsets=offsets, longest=step.longest, **how)))

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, vocab]` of hidden states `[rows, width]`."""
        few, cap = self._few(len(hidden), self.config.vocab), self.config.logit_softcap
        found = self.head(self.norm(hidden)) if few is None else self.head.around(hidden, few, self.norm)
        logits = self.parallel.gather(found, self.config.vocab)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    # ---- weights

    def load(self, tensors: Iterable[tuple[str, Tensor | View]]) -> None:
        """Fill every weight from (Hugging Face name, tensor or view) pairs: of `weights.views`, only what this rank has is read.

        Raises ModelError for one that is missing, unknown or of another shape.
        """
        self.places.fill(tensors)

    def randomise(self, seed: int = 0) -> None:
        """Random weights of a plausible size: the shape of a model without its file, for benchmarks."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for piece, spans in self.places.pieces.values():
            if piece.ndim == 1:
                piece.fill_(1.0 - self.config.norm_offset)
            else:
                piece.normal_(std=spans[1].whole ** -0.5, generator=generator)

    def prepare(self, positions: int, rows: int | None = None) -> None:
        """After the weights are in: tie the head, lay weights out for the device, and make the rotary tables for `positions`, of `rows` (`rope_table`)."""
        c = self.config
        self.places.pieces.clear()  # weights are packed next; what stays is the names of matrices, for adapters
        if c.tied:
            self.head.weight = self.embedding
        for layer in self.layers:
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
                linear.pack()
        self.head.pack(keep=c.tied)
        everywhere = rope_table(positions, c.rotary_dim, c.theta, c.rope, self.device, rows)
        windowed = everywhere if c.window_theta is None else rope_table(positions, c.rotary_dim, c.window_theta, device=self.device, rows=rows)
        for layer, mask in zip(self.layers, c.masks, strict=True):
            layer.rope = windowed if isinstance(mask, Window) else everywhere

    def _places(self) -> Places:
        """Where the tensors of a file go."""
        c, (heads, kv_heads, inner, vocab) = self.config, self.share
        places = Places(f"{c.family} of {c.layers} layers")
        places.add("model.embed_tokens.weight", self.embedding[: vocab.count], vocab, whole(c.width))
        places.add("model.norm.weight", self.norm.weight)
        if c.tied:
            places.ignored.append(r"lm_head\.weight")
        else:
            places.add("lm_head.weight", self.head.weight[: vocab.count], vocab, whole(c.width))
        q, kv, width = heads.times(c.dim), kv_heads.times(c.dim), whole(c.width)
        for i, layer in enumerate(self.layers):
            at = f"model.layers.{i}"
            places.linear(f"{at}.self_attn", layer.qkv, {"q_proj": q, "k_proj": kv, "v_proj": kv}, width, bias=c.qkv_bias, fused="qkv_proj")
            places.linear(f"{at}.self_attn", layer.out, {"o_proj": width}, q, bias=c.out_bias)
            places.linear(f"{at}.mlp", layer.gate_up, {"gate_proj": inner, "up_proj": inner}, width, bias=c.mlp_bias, fused="gate_up_proj")
            places.linear(f"{at}.mlp", layer.down, {"down_proj": width}, inner, bias=c.mlp_bias)
            norms = {"input": layer.norm_in, "post_attention": layer.norm_mlp}
            if c.post_norms:
                norms |= {"post_attention": layer.norm_attended, "pre_feedforward": layer.norm_mlp, "post_feedforward": layer.norm_fed}
            for name, norm in norms.items():
                places.add(f"{at}.{name}_layernorm.weight", norm.weight)
            if layer.qk_norm is not None:
                places.add(f"{at}.self_attn.q_norm.weight", layer.qk_norm.q)
                places.add(f"{at}.self_attn.k_norm.weight", layer.qk_norm.k)
        return places


def _of(op: Op, kernel: str, packed: bool = False) -> str:
    """The kernel asked for where it is one of this operator, and if need be one for chunks of any lengths."""
    if kernel == "auto":
        return kernel
    found = any(one.name == kernel and not (packed and "len_q" in one.accepts and LONG not in one.accepts["len_q"]) for one in op.kernels)
    return kernel if found else "auto"
