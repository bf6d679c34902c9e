"""Masks and score functions in plain Python, as FlexAttention takes them: what suite "mods" asks of it and of onchip.

Those of GYM follow the files of attention-gym (github.com/meta-pytorch/attention-gym), written anew; its tree of drafted tokens
is missing, for it is a decode. `b, h, i, j` are sequence, head, query and key, counted from 0; lengths are powers of two.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.bench.mod import Mod, Size
from onchip.core.masks import Causal, KeyPadding
from onchip.core.problem import Attention, Dropout
from onchip.core.scores import ALiBi

DROP = Dropout(0.1, seed=20_260_101)  # given, so that the reference drops the same weights


def make(name: str, p: Attention, device: torch.device) -> Mod:
    """The mod `name` for the sizes of `p`."""
    return MODS[name](Size(p.batch, p.heads, p.len_q, p.len_k, p.dtype, device))


def sizes(name: str, p: Attention) -> Attention:
    """`p` with the sizes that a mod needs otherwise: rotated dimensions beside the others, keys beside those of the queries' own."""
    if name == "latent attention":
        return p._replace(dim=p.dim + p.dim // 2, dim_v=p.dim)
    return p._replace(len_k=p.len_q + p.len_q // 4) if name == "draft training" else p


# ---- what a mod costs: the plain kernel, and one thing more at a time


def plain(_size: Size) -> Mod:
    return Mod()


def softcap(_size: Size) -> Mod:
    return Mod(score=lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0), own={"softcap": 30.0})


def alibi_both(size: Size) -> Mod:
    slopes = ALiBi.slopes_of(size.heads, size.device)
    return Mod(score=lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), own={"score": ALiBi(slopes)})


def sinks(size: Size) -> Mod:
    return Mod(sinks=torch.randn(size.heads, device=size.device))


def bias_full(size: Size) -> Mod:
    bias = torch.randn(size.batch, size.heads, size.rows, size.cols, device=size.device, dtype=size.dtype)
    return Mod(score=lambda s, b, h, i, j: s + bias[b, h, i, j], own={"bias": bias})


def bias_of_keys(size: Size) -> Mod:
    bias = torch.randn(size.heads, 1, size.cols, device=size.device, dtype=size.dtype)
    return Mod(score=lambda s, b, h, i, j: s + bias[h, 0, j], own={"bias": bias})


# ---- a batch of sequences of which some are filled up, as tokenizers do


def _real(size: Size) -> Tensor:
    """Which tokens are no padding: of the first sequence, and of each second one from it on, three quarters."""
    last = torch.tensor([size.cols * 3 // 4, size.cols], device=size.device).repeat(size.batch)[: size.batch]
    return torch.arange(size.cols, device=size.device) < last[:, None]


def padding(size: Size) -> Mod:
    real = _real(size)
    return Mod(lambda b, h, i, j: real[b, j], own={"mask": KeyPadding(real)}, alike=False)


def padding_causal(size: Size) -> Mod:
    real = _real(size)
    return Mod(lambda b, h, i, j: real[b, j] & (i >= j), own={"mask": KeyPadding(real) & Causal()}, alike=False)


# ---- attention-gym: along a line


def _past(b, h, i, j):
    return i >= j


def causal(_size: Size) -> Mod:
    return Mod(_past)


def sliding_window(size: Size) -> Mod:
    window = size.rows // 8
    return Mod(lambda b, h, i, j: (i - j <= window) & (i >= j))


def prefix_lm(size: Size) -> Mod:
    prefix = size.rows // 8
    return Mod(lambda b, h, i, j: (j < prefix) | (i >= j))


def dilated_window(size: Size) -> Mod:
    window = size.rows // 8
    return Mod(lambda b, h, i, j: ((i - j).abs() <= window) & ((i - j).abs() % 4 == 0))


def global_window(size: Size) -> Mod:
    """Longformer: a window to both sides, and tokens that see all and are seen by all."""
    window, chosen = size.rows // 16, torch.zeros(size.rows, dtype=torch.bool, device=size.device)
    chosen[:: max(1, size.rows // 4)] = True
    return Mod(lambda b, h, i, j: ((i - j).abs() <= window) | chosen[i] | chosen[j])


def batched(size: Size) -> Mod:
    """A causal mask within each of eight parts."""
    part = size.rows // 8
    return Mod(lambda b, h, i, j: (i // part == j // part) & (i % part >= j % part))


def _documents(size: Size) -> tuple[Tensor, Tensor]:
    """The document of each token, eight of unequal length, and where each begins, the end included."""
    unit = size.rows // 64
    lengths = torch.tensor([4, 20, 2, 10, 6, 14, 1, 7], device=size.device) * unit
    ids = torch.repeat_interleave(torch.arange(8, device=size.device, dtype=torch.int32), lengths)
    return ids, F.pad(lengths.cumsum(0), (1, 0)).int()


def document(size: Size) -> Mod:
    ids, _ = _documents(size)
    return Mod(lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j))


def shared_prefix(size: Size) -> Mod:
    """Documents 1 to 3 continue document 0, and 5 to 7 document 4: they see all of it, and their own past."""
    ids, starts = _documents(size)
    first = torch.tensor([0, 0, 0, 0, 4, 4, 4, 4], device=size.device)[ids.long()]  # of each token, its prefix
    begin, above, below = starts[ids.long()], starts[first], starts[first + 1]
    return Mod(lambda b, h, i, j: ((j >= begin[i]) & (i >= j)) | ((j >= above[i]) & (j < below[i]) & (i >= j)))


def transfusion(size: Size) -> Mod:
    """Causal, and both ways within an image: eight images of an eighth of the tokens each, half of it text."""
    step = size.rows // 8
    return Mod(lambda b, h, i, j: (i >= j) | ((i // step == j // step) & (i % step >= step // 2) & (j % step >= step // 2)))


def block_diffusion(size: Size) -> Mod:
    """Noised tokens, then clean ones: a noised block sees itself and the clean blocks before it, clean blocks are causal."""
    half, block = size.rows // 2, size.rows // 64

    def seen(b, h, i, j):
        row, col = (i % half) // block, (j % half) // block
        noised, clean = i < half, j >= half
        return ((row == col) & (noised == (j < half))) | ((row > col) & noised & clean) | ((row >= col) & ~noised & clean)

    return Mod(seen)


def draft_training(size: Size) -> Mod:
    """JetSpec: drafted blocks of 16 see all of the prefix, and their own block's past."""
    prefix = size.cols - size.rows
    return Mod(lambda b, h, i, j: (j < prefix) | ((j >= prefix) & (i // 16 == (j - prefix) // 16) & ((j - prefix) % 16 <= i % 16)))


def cross_attention(size: Size) -> Mod:
    """Flamingo: the keys are four images, each seen by the tokens of its interval."""
    edges = torch.tensor([0, 8, 24, 40, 64], device=size.device) * (size.rows // 64)
    first, last, image = edges[:-1].clone(), edges[1:].clone(), size.cols // 4
    return Mod(lambda b, h, i, j: (i >= first[j // image]) & (i < last[j // image]))


# ---- attention-gym: on a canvas


def _canvas(n: int) -> tuple[int, int]:
    """Rows and columns of a canvas of n places."""
    cols = 1 << (n.bit_length() - 1) // 2
    return n // cols, cols


def _neighbours(place: Callable, canvas: tuple[int, int]) -> Mod:
    """NATTEN: a square of keys around each query, moved inwards at the edges; `place` gives row and column."""
    half = canvas[1] // 8
    rows, cols = ((half, size - 1 - half) for size in canvas)

    def seen(b, h, i, j):
        (row, col), (key_row, key_col) = place(i), place(j)
        return ((row.clamp(*rows) - key_row).abs() <= half) & ((col.clamp(*cols) - key_col).abs() <= half)

    return Mod(seen)


def natten(size: Size) -> Mod:
    _, cols = canvas = _canvas(size.rows)
    return _neighbours(lambda n: (n // cols, n % cols), canvas)


def natten_tiled(size: Size) -> Mod:
    """Tokens in the order of tiles of 8 x 8."""
    _, cols = canvas = _canvas(size.rows)
    side = min(8, cols // 2)
    cells, wide = side * side, cols // side
    return _neighbours(lambda n: (n // cells // wide * side + n % cells // side, n // cells % wide * side + n % side), canvas)


def natten_morton(size: Size) -> Mod:
    """Tokens in Morton's order: the bits of row and column by turns."""

    def every_other(n):
        n = n & 0x55555555
        for shift, kept in ((1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF)):
            n = (n | (n >> shift)) & kept
        return n

    return _neighbours(lambda n: (every_other(n), every_other(n >> 1)), _canvas(size.rows))


def _sliding_tiles(canvas: tuple[int, ...], tile: tuple[int, ...]) -> Mod:
    """Sliding tile attention: tokens in the order of tiles; a tile sees itself and its neighbours, moved inwards at the edges."""
    counts = [a // b for a, b in zip(canvas, tile, strict=True)]
    cells, around = torch.Size(tile).numel(), [1 if count > 2 else 0 for count in counts]
    steps = [torch.Size(counts[axis + 1 :]).numel() for axis in range(len(counts))]

    def seen(b, h, i, j):
        close = i >= 0
        for count, step, reach in zip(counts, steps, around, strict=True):
            own, other = i // cells // step % count, j // cells // step % count
            close = close & ((own.clamp(reach, count - 1 - reach) - other).abs() <= reach)
        return close

    return Mod(seen)


def sliding_tiles_2d(size: Size) -> Mod:
    rows, cols = _canvas(size.rows)
    return _sliding_tiles((rows, cols), (rows // 8, cols // 8))


def sliding_tiles_3d(size: Size) -> Mod:
    frames = 1 << (size.rows.bit_length() - 1) // 3
    rows, cols = _canvas(size.rows // frames)
    return _sliding_tiles((frames, rows, cols), (frames // 4, rows // 4, cols // 4))


# ---- attention-gym: video


def spatial_head(size: Size) -> Mod:
    """Sparse VideoGen: a prompt that sees all and is seen by all, and tokens of frames nearby."""
    prompt, wide = size.rows // 32, size.rows // 8
    return Mod(lambda b, h, i, j: (i < prompt) | (j < prompt) | ((i - j).abs() < wide))


def temporal_head(size: Size) -> Mod:
    """Sparse VideoGen: the prompt, and tokens near the same place of any frame."""
    prompt, frame, wide = size.rows // 32, size.rows // 16, max(1, size.rows // 128)
    return Mod(lambda b, h, i, j: (i < prompt) | (j < prompt) | (((i - prompt) % frame - (j - prompt) % frame).abs() < wide))


def video_sparse(size: Size) -> Mod:
    """VSA: each head's tile of 64 queries sees an eighth of the tiles of keys, drawn at random, and its own."""
    tile = min(64, size.rows // 8)
    tiles = size.rows // tile
    chosen = torch.rand(size.batch, size.heads, tiles, tiles, device=size.device).argsort(-1) < tiles // 8
    chosen |= torch.eye(tiles, dtype=torch.bool, device=size.device)
    return Mod(lambda b, h, i, j: chosen[b, h, i // tile, j // tile], alike=False)


# ---- attention-gym: scores


def alibi(size: Size) -> Mod:
    """With a causal mask: without one the keys after a query win all weight, and gradients are rounding alone."""
    heads = size.heads
    return Mod(_past, lambda s, b, h, i, j: s + (j - i) * torch.exp2(-((h + 1) * 8.0 / heads)))


def sandwich(size: Size) -> Mod:
    """A table of distances, sum_n cos((i - j) w_n) over 64 frequencies, divided by a number of each head."""
    distance = torch.arange(1 - size.cols, size.rows, device=size.device, dtype=torch.float32)
    table = torch.cos(distance[:, None] / 1e4 ** (torch.arange(64, device=size.device) / 64)).sum(1)
    weight, zero = size.heads / (8.0 * torch.arange(1, size.heads + 1, device=size.device)), size.cols - 1
    return Mod(score=lambda s, b, h, i, j: s + table[i - j + zero] * weight[h])


def relative_bias(size: Size) -> Mod:
    """A bias for each head and distance, as of a table that was learnt."""
    table, zero = torch.randn(size.heads, size.rows + size.cols, device=size.device), size.cols
    return Mod(score=lambda s, b, h, i, j: s + table[h, i - j + zero])


def graph_distance(size: Size) -> Mod:
    """Graphormer: a bias for each head and distance between two nodes."""
    table = torch.randn(size.heads, 18, device=size.device)
    distance = torch.randint(18, (size.batch, size.rows, size.cols), dtype=torch.int32, device=size.device)
    return Mod(score=lambda s, b, h, i, j: s + table[h, distance[b, i, j]])


def graph_edges(size: Size) -> Mod:
    """Graphormer: the mean of a bias for the kind of each edge on the shortest path, three edges at most."""
    tables = [torch.randn(size.heads, 8, device=size.device) for _ in range(3)]
    kinds = [torch.randint(8, (size.batch, size.rows, size.cols), dtype=torch.int32, device=size.device) for _ in range(3)]
    length = torch.randint(4, (size.batch, size.rows, size.cols), dtype=torch.int32, device=size.device)
    (t0, t1, t2), (k0, k1, k2) = tables, kinds

    def score(s, b, h, i, j):
        n = length[b, i, j]
        total = torch.where(n > 0, t0[h, k0[b, i, j]], 0.0) + torch.where(n > 1, t1[h, k1[b, i, j]], 0.0) + torch.where(n > 2, t2[h, k2[b, i, j]], 0.0)
        return s + total / torch.clamp(n, min=1)

    return Mod(score=score)


def activation(_size: Size) -> Mod:
    """Weights of gelu(s) + 1 in place of exp(s)."""
    return Mod(score=lambda s, b, h, i, j: torch.log(F.gelu(s) + 1.0))


# ---- tensors of all pairs, which torch's own attention takes as well


def bool_mask(size: Size) -> Mod:
    """Half of the keys of each query, drawn at random, and the first."""
    seen = torch.rand(size.rows, size.cols, device=size.device) < 0.5
    seen[:, 0] = True
    return Mod(lambda b, h, i, j: seen[i, j], own={"mask": seen})


def float_mask(size: Size) -> Mod:
    bias = torch.randn(size.rows, size.cols, device=size.device, dtype=size.dtype)
    return Mod(score=lambda s, b, h, i, j: s + bias[i, j], own={"bias": bias})


DENSE = {"bool mask": bool_mask, "float mask": float_mask}
DROPPED = {"dropout": lambda _size: Mod(own={"dropout": DROP}), "dropout, causal": lambda _size: Mod(_past, own={"mask": Causal(), "dropout": DROP})}
PADDED = {"padding": padding, "padding, causal": padding_causal}
PRICE = {
    "plain": plain, "softcap": softcap, "ALiBi": alibi_both, "sinks": sinks, "bias [B,H,N,N]": bias_full, "bias [H,1,N]": bias_of_keys,
    "relative bias": relative_bias, **DROPPED,
}  # fmt: skip
GYM = {
    "causal": causal, "sliding window": sliding_window, "prefix LM": prefix_lm, "document": document, "dilated window": dilated_window,
    "NATTEN": natten, "cross-attention": cross_attention, "global window": global_window, "ALiBi, causal": alibi, "latent attention": plain,
    "transfusion": transfusion,
}  # fmt: skip
REST = {
    "batched": batched, "block diffusion": block_diffusion, "shared prefix": shared_prefix, "draft training": draft_training,
    "NATTEN, tiled": natten_tiled, "NATTEN, Morton": natten_morton, "sliding tiles 2D": sliding_tiles_2d, "sliding tiles 3D": sliding_tiles_3d,
    "spatial head": spatial_head, "temporal head": temporal_head, "video sparse": video_sparse, "sandwich": sandwich,
    "graph distance": graph_distance, "graph edges": graph_edges, "activation": activation,
}  # fmt: skip
MODS: dict[str, Callable[[Size], Mod]] = {**PRICE, **PADDED, **GYM, **REST, **DENSE}
