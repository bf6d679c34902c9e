"""One result from partial ones over disjoint keys: o = sum_s exp(lse_s - lse) o_s, lse = log sum_s exp(lse_s).

A row is one query of one head; a program takes a few whole rows of every part, each of which is read once where it lies, by its
own strides, so that traffic is the floor: parts and their LSE read, one result written. The loads of all parts are in flight
together: none waits for an LSE. A part whose LSE is -inf saw nothing, and adds nothing whatever it holds.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.problem import Rows
from onchip.kernels.attention.tile import LN2
from onchip.kernels.launch import starts_early


class Tiles(NamedTuple):
    """Rows of a program, the columns of its tile, and warps."""

    rows: int
    block: int
    warps: int

    def __str__(self):
        return f"{self.rows}x{self.block} tiles, {self.warps} warps"


# ---- device


@triton.jit
def _places(row, len_q, heads, strides):
    """Where rows lie, by strides of (batch, query, head); the heads of a query are neighbours."""
    token, head = row // heads, row % heads
    return (token // len_q).to(tl.int64) * strides[0] + (token % len_q).to(tl.int64) * strides[1] + head.to(tl.int64) * strides[2]


@triton.jit(do_not_specialize=["rows"])
def _merge(outs, lses, out_strides, lse_strides, o_ptr, o_lse_ptr, o_lse_strides, rows, len_q, heads,
           PARTS: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    near = row < rows
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    inside = near[:, None] & (cols < DV)[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for s in tl.static_range(PARTS):
        lse = tl.load(lses[s] + _places(row, len_q, heads, lse_strides[s]), mask=near, other=float("-inf"))
        top = tl.maximum(top, lse)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for s in tl.static_range(PARTS):
        lse = tl.load(lses[s] + _places(row, len_q, heads, lse_strides[s]), mask=near, other=float("-inf"))  # from L1
        part = tl.load(outs[s] + _places(row, len_q, heads, out_strides[s])[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        weight = tl.exp(lse - base)
        total += weight
        acc += tl.where((weight > 0.0)[:, None], part, 0.0) * weight[:, None]
    acc *= tl.where(total == 0.0, 0.0, tl.math.div_rn(1.0, total))[:, None]
    tl.store(o_ptr + row.to(tl.int64)[:, None] * DV + cols[None, :], acc.to(o_ptr.dtype.element_ty), mask=inside)
    tl.store(o_lse_ptr + _places(row, len_q, heads, o_lse_strides), top + tl.math.log2(total) * LN2, mask=near)


# ---- host

ELEMENTS = 1024  # of a tile: 8 a thread and part, so that 16 parts in flight stay in registers


def configs(p: Rows, device: Device) -> list[Tiles]:
    """Several rows a program, as long as that leaves two programs for each multiprocessor."""
    block = triton.next_power_of_2(p.width)
    rows = max(1, min(ELEMENTS // block, p.rows // (2 * device.sms)))
    rows = 1 << (rows.bit_length() - 1)
    return [Tiles(rows, block, max(1, min(4, rows * block // 256)))]  # 16 bytes of bf16 a thread


def launch(p: Rows, how: Tiles, states):
    """states: (output [..., len_q, heads, dim_v], LSE [..., heads, len_q]) pairs, at most one dimension before these; returns such a pair."""
    outs = [out if out.stride(-1) == 1 else out.contiguous() for out, _ in states]
    shape, (len_q, heads, dim_v) = outs[0].shape, outs[0].shape[-3:]
    out = torch.empty(shape, dtype=outs[0].dtype, device=outs[0].device)
    lse = torch.empty((*shape[:-3], heads, len_q), dtype=torch.float32, device=out.device)
    lses = [part for _, part in states]
    early = starts_early(out)
    _merge[(triton.cdiv(p.rows, how.rows),)](
        tuple(outs), tuple(lses), tuple(_strides(o, (-4, -3, -2), 4) for o in outs), tuple(_strides(e, (-3, -1, -2), 3) for e in lses),
        out, lse, _strides(lse, (-3, -1, -2), 3), p.rows, len_q, heads,
        PARTS=len(states), DV=dim_v, ROWS=how.rows, BLOCK=how.block, EARLY=early, num_warps=how.warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out, lse


def _strides(t: torch.Tensor, dims: tuple[int, int, int], rank: int) -> tuple[int, ...]:
    """Of batch, query and head; of a tensor without a batch 0 for that."""
    return tuple(0 if t.ndim < rank and d == -rank else t.stride(d) for d in dims)
