"""The menu of attention: each operator's cost and its kernels, fastest first. Imports no DSL."""

import importlib

import torch

from onchip.core.formats import FORMATS, Format
from onchip.core.kernel import Extra, Kernel, Op
from onchip.core.masks import BANDS, Band, Causal, Full
from onchip.core.problem import E4M3, SHORT, Attention, Cost, Rows
from onchip.core.trace import Traced

HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32)
GPUS = {"cuda": 80, "hip": 942}
MASKS = (*BANDS, Traced)
KV = ("", *map(str, FORMATS))
WIDE = {"dtype": FLOATS, "dim": range(8, 577), "value_dim": range(8, 513), "mask": MASKS, "keys": ("paged",)}  # what Triton's kernels over pages take
PAGES = [1 << i for i in range(3, 11)]  # that TMA copies: rows of shared memory are swizzled by eights
CUTLASS = Extra("cutlass", "nvidia-cutlass-dsl", "4.8")
FEW = 1e8  # pairs of a query and a key
PARTS = 16  # that one launch merges: each has a pointer and three strides of its own


def area(p: Attention, len_q: int, len_k: int) -> int:
    """The (query, key) pairs that a mask lets through; of a mask that is not a band those of the band around it, an upper bound."""
    return (p.mask if isinstance(p.mask, Band) else p.mask.hull).area(len_q, len_k)


def cost(p: Attention) -> Cost:
    """A product of `dim` and one of `value_dim` multiply-adds for each pair the mask lets through; q, k, v read once, the output and LSE written once.

    FlashAttention (Dao et al., 2022) moves Theta(N^2 d^2 / M) bytes; with tiles this large K and V are re-read from L2, so
    the floor counts each tensor once.
    """
    size, both = p.dtype.itemsize, p.dim + p.value_dim
    pairs, queries, keys = _counts(p)
    moved = size * p.dim * queries * p.heads + bytes_of_token(p) * keys * p.kv_heads + max(2, size) * p.value_dim * queries * p.heads + 4 * queries * p.heads
    return Cost(2 * pairs * p.heads * both, moved)


def bytes_of_token(p: Attention) -> int:
    """Of a key and its value, for one key head: as numbers or as codes with their scales; of a latent cache the key alone, in e4m3 656."""
    if p.op == "latent":
        return 656
    if p.kv:
        return Format.of(p.kv).bytes(p.dim) + Format.of(p.kv).bytes(p.value_dim)
    return p.dtype.itemsize * (p.dim if "latent" in p.extras else p.dim + p.value_dim)


def backward_cost(p: Attention) -> Cost:
    """Five products where the forward pass has two: the scores again, dV, dP, dQ, dK.

    q, k, v, the output and its gradient, and LSE are read; three gradients are written: of q, k and v in e4m3, in bf16 as the output is.
    """
    size, both = p.dtype.itemsize, p.dim + p.value_dim
    wide = max(2, size)
    pairs, queries, keys = _counts(p)
    moved = ((size + wide) * p.dim + 2 * wide * p.value_dim + 4) * queries * p.heads + (size + wide) * both * keys * p.kv_heads
    return Cost(2 * pairs * p.heads * (3 * p.dim + 2 * p.value_dim), moved)


def quantise_cost(p: Rows) -> Cost:
    """Every number is read and a byte of it written, a scale of the whole head reads it twice; a rotation adds and subtracts log2(dim) times."""
    reads = 2 if "head" in p.variant else 1
    return Cost((2 + p.width.bit_length()) * p.rows * p.width, (reads * p.dtype.itemsize + 1) * p.rows * p.width)


def merge_cost(p: Rows) -> Cost:
    """Each part and its LSE is read, one of both is written; a multiply-add for each number."""
    parts = int(p.variant.partition(" ")[0])
    return Cost(2 * parts * p.rows * p.width, (parts + 1) * p.rows * (p.width * p.dtype.itemsize + 4))


def page_scores_cost(p: Rows) -> Cost:
    """Rows are a sequence's pages for a key head: two bounds each are read, for each head of the group two products made and a float32 written."""
    group = int(p.variant.split()[0])
    return Cost(4 * p.rows * p.width * group, p.rows * (2 * p.width * p.dtype.itemsize + 4 * group))


def _counts(p: Attention) -> tuple[int, int, int]:
    """(query, key) pairs, queries, and keys that are read."""
    if p.keys == "packed":  # sequences of equal length stand in for the lengths, which are not part of the Problem
        keys = p.tokens_k or p.tokens
        return p.batch * area(p, max(1, p.tokens // max(1, p.batch)), max(1, keys // max(1, p.batch))), p.tokens, keys
    band = p.mask if isinstance(p.mask, Band) else p.mask.hull
    len_q = max(1, p.tokens // max(1, p.batch)) if p.tokens else p.len_q
    queries = p.tokens or p.batch * len_q
    shift = band.shift(len_q, p.len_k)
    keys = p.batch * len(band.keys(shift, shift + len_q - 1, p.len_k))
    return queries * area(p, len_q, p.len_k) // max(1, len_q), queries, keys


# ---- what no single field can say


def _codes_in_pairs(p: Attention) -> str | None:
    """Codes are read two bytes at a time, and multiplied in float16."""
    if p.kv not in KV[1:]:
        return None
    if p.dtype not in HALF:
        return f"{SHORT.get(p.dtype, p.dtype)} queries of keys and values in {p.kv}, of bf16 and fp16"
    form = Format.of(p.kv)
    for dim in (p.dim, p.value_dim):
        groups = dim // form.group if form.group else 1
        if form.columns(dim) % 2 or (form.name == "int4" and groups > 1 and groups % 2):
            return f"{p.kv} of dim {dim}: a row of codes is an even number of bytes, and of int4 an even number of groups"
    return None


def _rows_of_a_group(p: Attention) -> str | None:
    rows = p.len_q * p.group
    return f"{p.len_q} queries x {p.group} heads a group = {rows} rows, of at most 64" if rows > 64 else None


def _float32_of_a_row(p: Attention) -> str | None:
    wide = p.dtype == torch.float32 and p.dim > 512  # 16 queries and 16 keys of 1024 are 128 KiB: not every GPU has as much shared memory
    return f"float32 of dim {p.dim}, of at most 512" if wide else None


def _smallest_tiles(p: Attention, kind: str) -> int:
    """Bytes of 16 queries and 16 keys or values; on AMD one of them is in registers by the time that the other comes."""
    return (1 if kind == "hip" else 2) * 16 * max(_columns(p)) * max(2, p.dtype.itemsize)


def _smallest_tiles_backward(p: Attention, kind: str) -> int:
    """The same, of gradients: queries, keys, values and dO at once, and in half precision the widest of them once more, turned (as compiled for sm_80)."""
    if kind == "hip":
        return _smallest_tiles(p, kind)
    size = max(2, p.dtype.itemsize)
    return 16 * (2 * sum(_columns(p)) + (size == 2) * max(_columns(p))) * size + 1024  # LSE, delta


def _columns(p: Attention) -> tuple[int, int]:
    """Of keys and values in a tile."""
    return tuple(max(16, 1 << (dim - 1).bit_length()) for dim in (p.dim, p.value_dim))


def _only(*known: str):
    """No extra but these."""

    def rule(p: Attention) -> str | None:
        unknown = [extra for extra in p.extras if extra not in known]
        return f"no {', '.join(unknown)}" if unknown else None

    return rule


def _not_latent(p: Attention) -> str | None:
    return None if "latent" in p.extras else "values in memory of their own; give those that are the first columns of the keys: PagedKV(k, k[..., :512], ...)"


def _top_left(p: Attention) -> str | None:
    return f"{p.mask} is aligned to the top left" if isinstance(p.mask, Causal) and p.mask.align == "top_left" else None


def _no_gradient_of_reads(p: Attention) -> str | None:
    both = "deterministic" in p.extras and "score_grad" in p.extras
    return "gradients of what the score reads are summed in any order, so not deterministic" if both else None


def _texts():
    """What a text says (`texts.py`): a menu imports nothing of the kernels' before it is asked."""
    return importlib.import_module("onchip.kernels.attention.texts")


def _translates(p: Attention) -> str | None:
    """Whether the texts of mask and score have a Triton form."""
    traced = [part.text for part in (p.mask, p.score) if isinstance(part, Traced)]
    if not traced:
        return None
    refuses = importlib.import_module("onchip.kernels.attention.mods").refuses
    return next((why for text in traced if (why := refuses(text))), None)


def _one_width(p: Attention) -> str | None:
    return f"values of dim {p.dim_v} beside queries of dim {p.dim}" if p.dim_v else None


def _quantised_is_dense(p: Attention) -> str | None:
    dense = p.dtype != E4M3 or p.keys == "dense"
    return None if dense else f"{p.keys} calls take no numbers in e4m3; give them to a dense call as Quantised, or bf16 queries beside a quantised cache (kv)"


def _scales_of_blocks(p: Attention) -> str | None:
    if "token_scales" in p.extras:
        return "no token_scales for gradients: accepted is one scale for a head, or for 128 tokens in a row; quantise with share='head' or 'block'"
    return None


def _few_scores(p: Attention) -> str | None:
    if p.score is None or (p.dim > 64 and _texts().is_tanh(p.score.text)) or _texts().ahead_of(p) is not None or _texts().bias_of(p):
        return None
    took = "none, in dense calls what depends on the distance alone and a bias of q's dtype for each query and key, and a softcap beside more than 64"
    return f"score {p.score} beside dim {p.dim}: accepted are {took}: hopper_backward takes the others"


def _score_on_hopper(p: Attention) -> str | None:
    """What a score may not read there."""
    if p.score is None:
        return None
    tile = _texts().pair_tile(p.score.text)
    if _texts().pair_bytes(p.score.text) and tile is None:
        return "a score reads more for each query and key than one float tensor at [.., i, j]: slow"
    if tile and tile.dtype == torch.float32 and max(p.dim, p.value_dim) > 128:
        return f"a score reads fp32 for each query and key beside heads of {max(p.dim, p.value_dim)}, of at most 128: no room for tiles of it"
    return None if _texts().far_of(p) is not None else _not_measured(p)


def _slower_on_hopper(p: Attention) -> str | None:
    """What `triton_prefill` does faster on an H200."""
    pairs = p.batch * p.heads * p.len_q * p.len_k
    if pairs < FEW and _texts().far_of(p) is not None:
        return f"{pairs:.0e} pairs of a query and a key, of at least {FEW:.0e}: to lay distances out takes twenty launches, and triton_prefill is faster"
    tile = p.score and _texts().pair_tile(p.score.text)
    alone = p.keys == "packed" and "batch_invariant" in p.extras  # the longest sequence must not show in others
    if tile and p.len_k * tile.dtype.itemsize % 16 and not alone:  # of a tensor that is contiguous; a copy costs more than it saves
        return f"a score reads rows of {p.len_k} in {SHORT[tile.dtype]}, of a multiple of 16 bytes: triton_prefill is faster"
    narrow = max(p.dim, p.value_dim) <= 64 and p.len_q > 1024 and not alone
    if narrow and isinstance(p.mask, Traced) and not _texts().only_compares(p.mask.text):
        # 8k, d64: a document 302 us (409 there), a dilated window 1,306 (1,035), Morton's order 918 (702)
        return f"dim {p.dim} under a mask with arithmetic of its own, {p.len_q} queries, of at most 1024: triton_prefill is faster"
    return None


def _rows_of_a_tile(p: Attention) -> str | None:
    places = 1 << (p.group - 1).bit_length()  # of the heads of a group
    return f"{p.len_q} queries of {places} heads, of at most 64 in all" if p.len_q * places > 64 else None


def _score_in_registers(p: Attention) -> str | None:
    """No tile of what a score reads for each query and key is copied."""
    if p.score and (_texts().pair_bytes(p.score.text) or _texts().of_heads_and_keys(p.score.text)):
        return "a score reads values of keys for each query or head: triton_decode looks them up"
    return _not_measured(p)


def _reads_again(p: Attention) -> str | None:
    """What another kernel does by reading the keys once; the batch does not choose for codes where it must not show."""
    rows = p.len_q * p.group
    if p.kv and ("batch_invariant" in p.extras or p.len_q > 16):
        return None
    again = f"{rows} rows of a key head, of at most 32: they are tiles of 16, each of which reads the keys" if rows > 32 else None
    return again or (None if p.kv else _any_length(p))


def _faster_with_split_keys(p: Attention) -> str | None:
    """What `triton_decode`, which splits keys among programs, does as fast or faster on an H200: both read 8k at the bandwidth of memory with 16 rows."""
    rows, heads = p.len_q * p.group, p.batch * p.kv_heads
    if p.len_q > 16 or rows > 64 or _any_length(p):
        return None
    if rows <= 16:
        # 64 x 8k: 16 rows 476 us (488 there), 32 479 (724), 64 487 (653)
        return f"{rows} rows of a key head, of at least 17: triton_decode splits keys"
    if "batch_invariant" in p.extras:
        return f"{p.len_q} queries of a batch_invariant problem, of at least 17: the batch may not choose, so triton_decode takes them all"
    # 8 x 8k by 8 heads: 79 us (127 there)
    return f"{heads} key heads of sequences, of at least 64: triton_decode splits keys" if heads < 64 else None


def _map_of_small_pages(p: Attention) -> str | None:
    return f"pages of {p.page} under {p.mask}, of a multiple of 8: not measured" if p.page % 8 and isinstance(p.mask, Traced) else None


def _any_length(p: Attention) -> str | None:
    """The longest of the batch may not choose the kernel of another sequence."""
    alone = p.tokens and "batch_invariant" in p.extras
    return "packed queries of a batch_invariant problem: the longest of the batch may not choose" if alone else None


def _few_narrow_heads(p: Attention) -> str | None:
    """What `register_decode`, which begins and ends sooner, does faster on an H200. The batch does not choose where it must not show."""
    heads, plain = p.batch * p.kv_heads, p.score is None and not p.tokens and "batch_invariant" not in p.extras
    if not plain or p.len_q > 1 or p.group > 8 or p.len_k > 4096 or not p.dim == p.value_dim == 64 or heads > 32:
        return None
    # 3 heads of 1k 6.05 us (5.07 there), of 4k 7.64 (5.63), 24 of 1k 8.54 (7.52), 32 of 1k 8.61 (8.25), 8 of 4k 8.79 (8.40); but 96 of 1k 14.1 (14.4)
    return f"{heads} key heads of sequences of 64 columns and up to 4096 keys, of at least 33: register_decode begins and ends sooner"


def _not_measured(p: Attention) -> str | None:
    gathers = p.score is not None and _texts().gathers(p.score.text)
    return "a score looks values up at places that it computes: not measured" if gathers else None


def _sums_in_memory(p: Attention) -> bool:
    """Whether `hopper_backward` adds up dQ in memory, in any order."""
    return max(p.dim, p.value_dim) <= 128 and {"batch_invariant", "deterministic"}.isdisjoint(p.extras)


def _gradients_on_hopper(p: Attention) -> str | None:
    """What a score may look up there, and what of it has a gradient."""
    if _texts().far_of(p) is not None and _sums_in_memory(p):
        return None
    if "score_grad" in p.extras:
        return "no score_grad for anything but what is looked up by distance, beside heads of up to 128 and where nothing is to be the same every time"
    return _not_measured(p)


def _drops_where_sums_are_in_memory(p: Attention) -> str | None:
    if "dropout" not in p.extras:
        return None
    if max(p.dim, p.value_dim) > 128:
        return f"dropout beside heads of {max(p.dim, p.value_dim)}, of at most 128"
    beside = [extra for extra in ("batch_invariant", "deterministic", "score_grad") if extra in p.extras]
    return f"no dropout beside {', '.join(beside)}" if beside else None


def _slower_backward_on_hopper(p: Attention) -> str | None:
    """What `triton_backward` does faster on an H200. The batch does not choose where it must not show."""
    pairs = p.batch * p.heads * p.len_q * p.len_k
    # 8 heads of 2,048: 53 TFLOP/s there, 34 here, both with the launch; 256 of 1,024, causal, without it: 290 and 315
    if pairs < FEW and "batch_invariant" not in p.extras:
        return f"{pairs:.0e} pairs of a query and a key, of at least {FEW:.0e}: two more launches cost what the faster kernel saves"
    if isinstance(p.mask, Traced) and _texts().pair_bytes(p.mask.text) and p.len_q < 2048 and "batch_invariant" not in p.extras:
        # us, causal behind padding, d128: 512 492 (413 there), 1k 620 (565), 2k 892 (886), 4k 1,266 (1,367); d64 758 (638), 900 (815), 1,178 (1,180)
        return f"a mask reads a value for each query and key, of {p.len_q} queries, of at least 2048: triton_backward is faster"
    if p.score is None or not _texts().pair_bytes(p.score.text):
        return None
    tile = _texts().pair_tile(p.score.text) if _texts().only_adds(p.score.text) else None
    if tile and tile.dtype.itemsize == 2 and p.len_k % 8 == 0 and _sums_in_memory(p):  # B2 h16 8k d128
        return None
    return "a score reads a value for each query and key, and is no half-precision bias beside heads of up to 128: triton_backward is faster"


def _many_parts(p: Rows) -> str | None:
    return f"{p.variant}, of at most {PARTS}" if int(p.variant.partition(" ")[0]) > PARTS else None


def _sinks_of_tokens(p: Attention) -> str | None:
    return "sinks in a packed batch" if "sinks" in p.extras and p.keys == "packed" else None


PORTABLE = (_quantised_is_dense,)

PREFILL = Op(
    "prefill",
    cost,
    (
        Kernel(
            "hopper_prefill",
            "onchip.kernels.attention.hopper_prefill:launch",
            {"cuda": (90,)},
            {"dtype": HALF, "dim": range(8, 257, 8), "value_dim": range(8, 257, 8), "mask": MASKS, "keys": ("dense", "packed")},
            also=(_only("batch_invariant", "deterministic", "dropout", "sinks", "used"), _score_on_hopper, _translates),
            slower=(_slower_on_hopper,),
        ),
        Kernel(
            "hopper_fp8",
            "onchip.kernels.attention.hopper_fp8:launch",
            {"cuda": (90,)},
            {"dtype": (E4M3,), "dim": (64, 128, 256), "mask": BANDS, "keys": ("dense",), "score": (None,)},
            also=(_one_width, _only("deterministic", "key_scales", "token_scales")),
        ),
        Kernel(
            "bf16_of_e4m3",
            "onchip.kernels.attention.bf16_of_e4m3:prefill",
            GPUS,
            {"dtype": (E4M3,), "dim": range(8, 577), "value_dim": range(8, 513), "mask": MASKS, "keys": ("dense",)},
            also=(_only("batch_invariant", "deterministic", "dropout", "key_scales", "sinks", "token_scales"), _translates),
            least=_smallest_tiles,
        ),
        Kernel(
            "triton_prefill",
            "onchip.kernels.attention.triton_prefill:launch",
            GPUS,
            {"dtype": FLOATS, "dim": range(8, 577), "value_dim": range(8, 513), "mask": MASKS, "keys": ("dense", "packed")},
            also=(_only("batch_invariant", "deterministic", "dropout", "sinks", "tf32", "used"), _translates),
            least=_smallest_tiles,
        ),
        Kernel("blocked", "onchip.kernels.attention.blocked:prefill", accepts={"mask": MASKS, "keys": ("dense", "packed")}, also=PORTABLE, portable=True),
        Kernel("reference", "onchip.kernels.attention.reference:prefill", accepts={"keys": ("dense", "packed")}, also=PORTABLE, portable=True),
    ),
)

BACKWARD = Op(
    "backward",
    backward_cost,
    (
        Kernel(
            "cutlass_backward",
            "onchip.kernels.attention.cutlass_backward:launch",
            {"cuda": (90,)},
            {"dtype": HALF, "dim": range(8, 129, 8), "mask": BANDS, "keys": ("dense", "packed")},
            also=(_one_width, _only("sinks", "used"), _sinks_of_tokens, _few_scores),
            slower=(_slower_backward_on_hopper,),
            extra=CUTLASS,
        ),
        Kernel(
            "hopper_backward",
            "onchip.kernels.attention.hopper_backward:launch",
            {"cuda": (90,)},
            {"dtype": HALF, "dim": range(8, 257, 8), "value_dim": range(8, 257, 8), "mask": MASKS, "keys": ("dense", "packed")},
            also=(
                _only("batch_invariant", "deterministic", "dropout", "score_grad", "sinks", "used"),
                _gradients_on_hopper,
                _drops_where_sums_are_in_memory,
                _translates,
            ),
            slower=(_slower_backward_on_hopper,),
        ),
        Kernel(
            "hopper_fp8_backward",
            "onchip.kernels.attention.hopper_fp8_backward:launch",
            {"cuda": (90,)},
            {"dtype": (E4M3,), "dim": (64, 128), "mask": BANDS, "keys": ("dense",), "score": (None,)},
            also=(_one_width, _only("batch_invariant", "deterministic", "key_scales", "token_scales"), _scales_of_blocks),
        ),
        Kernel(
            "bf16_of_e4m3_backward",
            "onchip.kernels.attention.bf16_of_e4m3:backward",
            GPUS,
            {"dtype": (E4M3,), "dim": range(8, 577), "value_dim": range(8, 513), "mask": MASKS, "keys": ("dense",)},
            also=(
                _only("batch_invariant", "deterministic", "dropout", "key_scales", "score_grad", "sinks", "token_scales"),
                _no_gradient_of_reads,
                _translates,
            ),
            least=_smallest_tiles_backward,
        ),
        Kernel(
            "triton_backward",
            "onchip.kernels.attention.triton_backward:launch",
            GPUS,
            {"dtype": FLOATS, "dim": range(8, 577), "value_dim": range(8, 513), "mask": MASKS, "keys": ("dense", "packed")},
            also=(_only("batch_invariant", "deterministic", "dropout", "score_grad", "sinks", "tf32", "used"), _no_gradient_of_reads, _translates),
            least=_smallest_tiles_backward,
        ),
        Kernel("blocked", "onchip.kernels.attention.blocked:backward", accepts={"mask": MASKS, "keys": ("dense", "packed")}, also=PORTABLE, portable=True),
        Kernel("reference", "onchip.kernels.attention.reference:backward", accepts={"keys": ("dense", "packed")}, also=PORTABLE, portable=True),
    ),
)

DECODE = Op(
    "decode",
    cost,
    (
        Kernel(
            "hopper_decode",
            "onchip.kernels.attention.hopper_decode:launch",
            {"cuda": (90,)},
            {
                "dtype": HALF,
                "dim": range(8, 257, 8),
                "value_dim": range(8, 257, 8),
                "mask": BANDS,
                "keys": ("paged",),
                "len_q": range(1, 17),
                "page": PAGES,
                "kv": ("",),
            },
            also=(_only("batch_invariant", "deterministic", "sinks"), _rows_of_a_tile, _score_in_registers, _translates),
            slower=(_any_length, _few_narrow_heads),
        ),
        Kernel(
            "hopper_paged",
            "onchip.kernels.attention.hopper_prefill:launch_paged",
            {"cuda": (90,)},
            {
                "dtype": HALF,
                "dim": range(8, 257, 8),
                "value_dim": range(8, 257, 8),
                "mask": MASKS,
                "keys": ("paged",),
                "len_q": range(1, 1 << 20),
                "page": range(1, 1 << 20),
                "kv": ("",),
            },
            also=(_only("batch_invariant", "deterministic", "latent", "sinks"), _score_on_hopper, _translates),
            slower=(_faster_with_split_keys, _map_of_small_pages),
        ),
        Kernel(
            "hopper_mla",
            "onchip.kernels.attention.hopper_mla:launch",
            {"cuda": (90,)},
            {
                "dtype": HALF,
                "dim": (576,),
                "value_dim": (512,),
                "kv_heads": (1,),
                "mask": (Full, Causal),
                "keys": ("paged",),
                "len_q": range(1, 1 << 20),
                "page": [1 << i for i in range(3, 11)],
                "tokens": (0,),
                "kv": ("",),
                "score": (None,),
            },
            also=(_only("deterministic", "latent"), _not_latent, _top_left),
        ),
        Kernel(
            "register_decode",
            "onchip.kernels.attention.register_decode:launch",
            {"cuda": 89},
            {
                "dtype": HALF,
                "dim": (64, 128, 256),
                "value_dim": (64, 128, 256),
                "mask": BANDS,
                "keys": ("paged",),
                "len_q": range(1, 1 << 20),
                "page": range(1, 1 << 20),
                "kv": ("", "e4m3", "e5m2", "int8", "int4"),
                "score": (None,),
            },
            also=(_only("batch_invariant", "deterministic", "sinks"),),
            slower=(_reads_again,),
        ),
        Kernel(
            "triton_decode",
            "onchip.kernels.attention.triton_decode:launch",
            GPUS,
            WIDE | {"len_q": range(1, 17), "page": [1 << i for i in range(11)], "tokens": (0,), "kv": ("",)},
            also=(_rows_of_a_group, _float32_of_a_row, _only("batch_invariant", "deterministic", "latent", "sinks", "tf32"), _translates),
        ),
        Kernel(
            "triton_shares",
            "onchip.kernels.attention.triton_shares:launch",
            GPUS,
            WIDE | {"len_q": range(1, 17), "page": range(1, 1 << 20), "kv": KV},
            also=(_codes_in_pairs, _float32_of_a_row, _only("batch_invariant", "deterministic", "latent", "sinks", "tf32"), _translates),
            slower=(_any_length,),
        ),
        Kernel(
            "triton_paged",
            "onchip.kernels.attention.triton_prefill:launch_paged",
            GPUS,
            WIDE | {"len_q": range(1, 1 << 20), "page": range(1, 1 << 20), "kv": ("",)},
            also=(_only("batch_invariant", "deterministic", "latent", "sinks", "tf32"), _translates),
            least=_smallest_tiles,
        ),
        Kernel("blocked", "onchip.kernels.attention.blocked:decode", accepts={"mask": MASKS, "keys": ("paged",), "kv": KV}, also=PORTABLE, portable=True),
        Kernel("reference", "onchip.kernels.attention.reference:decode", accepts={"keys": ("paged",), "kv": KV}, also=PORTABLE, portable=True),
    ),
)

LATENT = Op(
    "latent",
    cost,
    (
        Kernel(
            "hopper_mla_codes",
            "onchip.kernels.attention.hopper_mla:launch",
            {"cuda": (90,)},
            {"dtype": (torch.bfloat16,), "mask": (Full, Causal), "len_q": range(1, 1 << 20), "page": range(1, 1 << 20), "score": (None,)},
            also=(_only("deterministic", "latent"), _top_left),
        ),
        Kernel(
            "bf16_of_latent",
            "onchip.kernels.attention.bf16_of_e4m3:latent",
            GPUS,
            {"dtype": FLOATS, "mask": MASKS, "len_q": range(1, 1 << 20), "page": range(1, 1 << 20)},
            also=(_only("deterministic", "latent", "tf32"), _translates),
            least=_smallest_tiles,
        ),
        Kernel("blocked", "onchip.kernels.attention.latent_plain:blocked", accepts={"mask": MASKS}, portable=True),
        Kernel("reference", "onchip.kernels.attention.latent_plain:reference", portable=True),
    ),
)

QUANTISE = Op(
    "quantise",
    quantise_cost,
    (
        Kernel("triton_quantise", "onchip.kernels.attention.quantise:launch", {"cuda": 89}, {"dtype": FLOATS, "width": range(1, 257)}),
        Kernel("reference", "onchip.kernels.attention.reference:quantise", portable=True),
    ),
)

MERGE = Op(
    "merge",
    merge_cost,
    (
        Kernel("triton_merge", "onchip.kernels.attention.triton_merge:launch", GPUS, {"dtype": FLOATS, "width": range(1, 1025)}, also=(_many_parts,)),
        Kernel("reference", "onchip.kernels.attention.reference:merge", portable=True),
    ),
)

PAGE_SCORES = Op(
    "page_scores",
    page_scores_cost,
    (
        Kernel("triton_page_scores", "onchip.kernels.attention.page_scores:launch", GPUS, {"dtype": FLOATS, "width": range(8, 577)}),
        Kernel("reference", "onchip.kernels.attention.reference:page_scores", portable=True),
    ),
)

OPS = (PREFILL, BACKWARD, DECODE, LATENT, QUANTISE, MERGE, PAGE_SCORES)
