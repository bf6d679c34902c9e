"""The menu of attention: each operator's cost and its kernels, fastest first. Imports no DSL."""

import torch

from onchip.core.kernel import Kernel, Op
from onchip.core.masks import MASKS
from onchip.core.problem import Attention, Cost

HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32)
GPUS = {"cuda": 80, "hip": 942}


def cost(p: Attention) -> Cost:
    """Two products of `dim` multiply-adds for each pair the mask lets through; q, k, v read once, the output and LSE written once.

    FlashAttention (Dao et al., 2022) moves Theta(N^2 d^2 / M) bytes; with tiles this large K and V are re-read from L2, so
    the floor counts each tensor once.
    """
    size = p.dtype.itemsize
    if p.keys == "packed":  # sequences of equal length stand in for the lengths, which are not part of the Problem
        each = max(1, p.tokens // p.batch)
        pairs, queries, keys = p.batch * p.mask.area(each, each), p.tokens, p.tokens
    else:
        pairs, queries = p.batch * p.mask.area(p.len_q, p.len_k), p.batch * p.len_q
        keys = p.batch * len(p.mask.keys(p.len_k - p.len_q, p.len_k - 1, p.len_k))
    moved = size * p.dim * (2 * queries * p.heads + 2 * keys * p.kv_heads) + 4 * queries * p.heads
    return Cost(4 * pairs * p.heads * p.dim, moved)


def _rows_of_a_group(p: Attention) -> str | None:
    rows = p.len_q * p.group
    return f"{p.len_q} queries x {p.group} heads a group = {rows} rows, of at most 64" if rows > 64 else None


PREFILL = Op(
    "prefill",
    cost,
    (
        Kernel(
            "triton_prefill",
            "onchip.kernels.attention.triton_prefill:launch",
            GPUS,
            {"dtype": FLOATS, "dim": range(16, 257), "mask": MASKS, "keys": ("dense", "packed"), "grad": (False,)},
        ),
        Kernel("blocked", "onchip.kernels.attention.blocked:prefill", accepts={"mask": MASKS, "keys": ("dense", "packed"), "grad": (False,)}, portable=True),
        Kernel("reference", "onchip.kernels.attention.reference:prefill", accepts={"keys": ("dense", "packed")}, portable=True),
    ),
)

DECODE = Op(
    "decode",
    cost,
    (
        Kernel(
            "triton_decode",
            "onchip.kernels.attention.triton_decode:launch",
            GPUS,
            {
                "dtype": FLOATS,
                "dim": range(16, 257),
                "mask": MASKS,
                "keys": ("paged",),
                "len_q": range(1, 17),
                "page": [1 << i for i in range(11)],
                "grad": (False,),
            },
            also=(_rows_of_a_group,),
        ),
        Kernel("blocked", "onchip.kernels.attention.blocked:decode", accepts={"mask": MASKS, "keys": ("paged",), "grad": (False,)}, portable=True),
        Kernel("reference", "onchip.kernels.attention.reference:decode", accepts={"keys": ("paged",)}, portable=True),
    ),
)

OPS = (PREFILL, DECODE)
