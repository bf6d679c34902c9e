"""Mask and score functions inside Triton kernels: each line of a traced text (`core/trace.py`) becomes a line of device code.

A kernel takes the functions as constexpr arguments and calls them on a tile of places. `b, h, len_q, len_k` are scalars, `i` and `j`
int32 tiles [M, 1] and [1, N], or transposed [1, M] and [N, 1]; `c` is `captured(tensors)`, `g` the first of `gradients(tensors, wanted)`.

    MASK(b, h, i, j, len_q, len_k, c)                          -> bool [M, N]
    SCORE(s, b, h, i, j, len_q, len_k, c)                      -> float32 [M, N]
    SCORE_GRAD(s, ds, b, h, i, j, len_q, len_k, c, g, I_AXIS)  -> float32 [M, N], the gradient by `s`; adds those by captured tensors to `g`

A kernel can have what rows or columns alone decide made once each (`split_functions`), which it then gives to the functions as `known`, (r, k):

    ROWS(b, h, i, len_q, len_k, (c of the mask, c of the score)) -> r, with i [M]
    KEYS(b, h, j, len_q, len_k, (c of the mask, c of the score)) -> k, with j [N], one in each thread
    MASK(b, h, i, j, len_q, len_k, c, known, HAND), SCORE(s, b, h, i, j, len_q, len_k, c, known, HAND), where HAND(x, j) brings x [N] to the columns j [1, N]

and so what a score reads at [.., i, j] (`pair_tile`), copied tile by tile: with `tiled` it is float32 [M, N] in `known`, (r, k, tile). With `of_row`
each row has a head of its own: `h` is [M] in ROWS and [M, 1] in MASK and SCORE, and KEYS does not look at it.

Values stay as small as what they depend on: a slope of a head is a scalar, an id of a row [M, 1]. A captured tensor is never read
outside of its sizes; what lies there reads as 0. At places past the ends a function may give anything, NaN included, and the kernel's
`where` decides; `SCORE_GRAD` gives and adds 0 wherever `ds` is 0, even if `s` is NaN there. All floats are float32, whatever the tensor's dtype.
"""

import ast
import functools
import hashlib
import linecache
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.core.kernel import Unsupported
from onchip.kernels.attention.texts import pair_tile
from onchip.kernels.curves import tanh  # noqa: F401  what is generated calls it

# ---- device: what Triton lacks


@triton.jit
def _tanh_fast(x):
    """The instruction of sm_75 and later: to 2^-11."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _erf_fast(x):
    """To 3e-5 and never beyond 1, so that gelu ends in 0: an odd polynomial up to 3, where it has passed 1. NaN stays."""
    x = tl.minimum(tl.maximum(x, -3.0, tl.PropagateNan.ALL), 3.0, tl.PropagateNan.ALL)
    square = x * x
    out = ((4.07420799e-08 * square - 1.94482163e-06) * square + 4.10605062e-05) * square - 0.00051103672
    out = ((out * square + 0.0042354269) * square - 0.0251028594) * square + 0.111079335
    out = x * ((out * square - 0.375314862) * square + 1.1282695)
    return tl.minimum(tl.maximum(out, -1.0, tl.PropagateNan.ALL), 1.0, tl.PropagateNan.ALL)


@triton.jit
def _log2_fast(x):
    """The instruction: to 2^-22 of 1, or relatively."""
    return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _real(x):
    """An int of 0 to 2^23 - 1 as a float: its bits are those of 2^23 + x. The instruction for it has a quarter of an addition's rate, or less."""
    return tl.cast(x + 0x4B000000, tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _gather(pointer, inside):
    """float32 values that lie anywhere. A plain load here is copied ahead through shared memory, 4 bytes at a time, and takes three times as long."""
    code: tl.constexpr = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$1]; }"
    return tl.inline_asm_elementwise(code, "=f,l,r", [pointer.to(tl.int64), inside.to(tl.int32)], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _round(x):
    """Halves go to the even neighbour."""
    low = tl.floor(x)
    odd = low - 2.0 * tl.floor(0.5 * low)
    return tl.where((x - low > 0.5) | ((x - low == 0.5) & (odd == 1.0)), low + 1.0, low)


@triton.jit
def _remainder(x, y):
    """Python's, of the divisor's sign; the machine's has the sign of `x`."""
    rest = x % y
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


# ---- host: the operators

INF = math.inf
MOST = (1 << 23) - 1  # tokens of a sequence, heads, sequences: what may then exceed an int32 is an int64, and a distance is exact in float32
SPANS = {"uint8": (0, 255)} | {f"int{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)}
SHARED = "tl.where({{0}} == {{1}}, 0.5 * {{d}}, tl.where({{0}} {} {{1}}, {{d}}, 0.0))"  # torch halves a gradient between equals

# name: the value, and its derivative by each argument, of arguments {0}, {1}, {2}, the value {o} and its gradient {d}
FLOATS = {
    "add": ("{0} + {1}", "{d}", "{d}"),
    "sub": ("{0} - {1}", "{d}", "-{d}"),
    "mul": ("{0} * {1}", "{d} * {1}", "{d} * {0}"),
    "div_rn": ("tl.math.div_rn({0}, {1})", "tl.math.div_rn({d}, {1})", "-{d} * tl.math.div_rn({o}, {1})"),
    "div_fast": ("{0} / {1}", "{d} / {1}", "-{d} * ({o} / {1})"),
    "neg": ("-{0}", "-{d}"),
    "abs": ("tl.abs({0})", "tl.where({0} == 0.0, 0.0, tl.where({0} < 0.0, -{d}, {d}))"),
    "minimum": ("tl.minimum({0}, {1})", SHARED.format("<"), SHARED.format(">")),
    "maximum": ("tl.maximum({0}, {1})", SHARED.format(">"), SHARED.format("<")),
    "clamp_min": ("tl.maximum({0}, {1})", "tl.where({0} >= {1}, {d}, 0.0)", "tl.where({0} >= {1}, 0.0, {d})"),
    "clamp_max": ("tl.minimum({0}, {1})", "tl.where({0} <= {1}, {d}, 0.0)", "tl.where({0} <= {1}, 0.0, {d})"),
    "where": ("tl.where({0}, {1}, {2})", "", "tl.where({0}, {d}, 0.0)", "tl.where({0}, 0.0, {d})"),
    "exp": ("tl.exp({0})", "{d} * {o}"),
    "exp2": ("tl.exp2({0})", "{d} * ({o} * 0.6931471805599453)"),
    "log_rn": ("tl.log({0})", "{d} / {0}"),
    "log_fast": ("0.6931471805599453 * _log2_fast({0})", "{d} / {0}"),
    "log2_rn": ("tl.log2({0})", "{d} * 1.4426950408889634 / {0}"),
    "log2_fast": ("_log2_fast({0})", "{d} * 1.4426950408889634 / {0}"),
    "sqrt": ("tl.sqrt_rn({0})", "{d} * 0.5 / {o}"),
    "rsqrt": ("tl.rsqrt({0})", "-0.5 * {d} * {o} / {0}"),
    "sin": ("tl.sin({0})", "{d} * tl.cos({0})"),
    "cos": ("tl.cos({0})", "-{d} * tl.sin({0})"),
    "tanh_rn": ("tanh({0})", "{d} * (1.0 - {o} * {o})"),
    "tanh_fast": ("_tanh_fast({0})", "{d} * (1.0 - {o} * {o})"),
    "sigmoid": ("tl.math.div_rn(1.0, 1.0 + tl.exp(-{0}))", "{d} * ({o} * (1.0 - {o}))"),
    "erf_rn": ("tl.erf({0})", "{d} * (1.1283791670955126 * tl.exp(-{0} * {0}))"),
    "erf_fast": ("_erf_fast({0})", "{d} * (1.1283791670955126 * tl.exp(-{0} * {0}))"),
    "power": ("tl.exp2(tl.log2({0}) * {1})", "{d} * {1} * {o} / {0}", "{d} * {o} * tl.log({0})"),
    "floor": ("tl.floor({0})",),
    "ceil": ("tl.ceil({0})",),
    "trunc": ("tl.where({0} < 0.0, tl.ceil({0}), tl.floor({0}))",),
    "round": ("_round({0})",),
    "sign": ("tl.where({0} > 0.0, 1.0, tl.where({0} < 0.0, -1.0, 0.0))",),
}
BOTH = ("add", "sub", "mul", "neg", "abs", "minimum", "maximum", "clamp_min", "clamp_max", "where")
FINITE = {*BOTH, "tanh_rn", "tanh_fast", "sigmoid", "sin", "cos", "erf_rn", "erf_fast"}
INTS = {name: FLOATS[name][0] for name in BOTH} | {
    "sign": "tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0))",
    "div_floor": "({0} - _remainder({0}, {1})) // {1}",
    "div_trunc": "{0} // {1}",
    "mod_floor": "_remainder({0}, {1})",
    "mod_trunc": "{0} % {1}",
    "bitwise_not": "~{0}",
    **{f"bitwise_{name}": f"{{0}} {sign} {{1}}" for name, sign in (("and", "&"), ("or", "|"), ("xor", "^"), ("left_shift", "<<"), ("right_shift", ">>"))},
}
BOOLS = {"and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "~{0}", "where": "tl.where({0}, {1}, {2})", "mul": "{0} & {1}", "add": "{0} | {1}"}
COMPARE = {name: f"{{0}} {sign} {{1}}" for name, sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))}
# name: between what an int lies, of (lowest, highest) of each argument; None: all that its type holds
RANGES = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "mul": lambda x, y: (min(a * b for a in x for b in y), max(a * b for a in x for b in y)),
    "neg": lambda x: (-x[1], -x[0]),
    "abs": lambda x: (max(x[0], -x[1], 0), max(-x[0], x[1])),
    "where": lambda _, x, y: (min(x[0], y[0]), max(x[1], y[1])),
    **dict.fromkeys(("minimum", "clamp_max"), lambda x, y: (min(x[0], y[0]), min(x[1], y[1]))),
    **dict.fromkeys(("maximum", "clamp_min"), lambda x, y: (max(x[0], y[0]), max(x[1], y[1]))),
    "div_floor": lambda x, y: (min(x[0] // y[0], x[0] // y[1]), max(x[1] // y[0], x[1] // y[1])) if y[0] > 0 else (-max(-x[0], x[1]), max(-x[0], x[1])),
    "mod_floor": lambda x, y: (min(y[0], 0), max(y[1], 0)),
    "bitwise_and": lambda x, y: (0, min(top for low, top in (x, y) if low >= 0)) if max(x[0], y[0]) >= 0 else None,
    **dict.fromkeys(("bitwise_or", "bitwise_xor"), lambda x, y: (0, (1 << max(x[1], y[1]).bit_length()) - 1) if min(x[0], y[0]) >= 0 else None),
    "bitwise_right_shift": lambda x, y: (x[0] >> y[0], x[1] >> y[0]) if x[0] >= 0 and 0 <= y[0] == y[1] < 64 else None,
}


def _div(p, x, y, rounding_mode=None):
    x, y = _value(x), _value(y)
    if rounding_mode and _kind(p.dtype) == "int":
        return p.op(f"div_{rounding_mode}", x, y)
    loose = p.fast and "s" in x.by | y.by  # not where a place alone decides: a rounding must not put a distance into another bucket
    if y.number and math.isfinite(y.number) and (loose or abs(math.frexp(y.number)[0]) == 0.5):
        out = p.op("mul", x, 1 / y.number)
    else:
        out = p.op("div_fast" if loose else "div_rn", x, y)
    return p.op(rounding_mode, out) if rounding_mode else out


def _mod(p, x, y, mode):
    return p.op(f"mod_{mode}", x, y) if _kind(p.dtype) == "int" else p.op("sub", x, p.op("mul", _div(p, x, y, mode), y))


def _clamp(p, x, min=None, max=None):
    x = x if min is None else p.op("clamp_min", x, min)
    return x if max is None else p.op("clamp_max", x, max)


def _pow(p, x, y):
    x, y = _value(x), _value(y)
    if x.number is not None and x.number > 0 and _kind(p.dtype) == "float":
        return p.op("exp2", y if x.number == 2 else p.op("mul", y, math.log2(x.number)))
    if x.number == 2:
        return p.op("bitwise_left_shift", 1, y)
    if y.number in (0.5, -0.5):
        return p.op("sqrt" if y.number > 0 else "rsqrt", x)
    if y.number in range(1, 9):
        return functools.reduce(lambda out, _: p.op("mul", out, x), range(int(y.number) - 1), x)
    return p.op("div", 1, _pow(p, x, -y.number)) if y.number in range(-8, 0) else p.op("power", x, y)


def _gelu(p, x, approximate="none"):
    if approximate == "tanh":
        inner = p.op("tanh", p.op("mul", p.op("add", x, p.op("mul", _pow(p, x, 3), 0.044715)), math.sqrt(2 / math.pi)))
    else:
        inner = p.op("erf", p.op("mul", x, math.sqrt(0.5)))
    return p.op("mul", p.op("mul", x, 0.5), p.op("add", inner, 1))


def _softplus(p, x, beta=1, threshold=20):
    y = p.op("mul", x, beta)
    tail = p.op("log1p", p.op("exp", p.op("neg", p.op("abs", y))))
    return p.op("div", p.op("add", p.op("clamp_min", y, 0), tail), beta)


DERIVED = {  # operators made of others
    "div": _div,
    "floor_divide": lambda p, x, y: _div(p, x, y, "floor"),
    "remainder": lambda p, x, y: _mod(p, x, y, "floor"),
    "fmod": lambda p, x, y: _mod(p, x, y, "trunc"),
    "clamp": _clamp,
    "pow": _pow,
    "gelu": _gelu,
    "softplus": _softplus,
    **{name: lambda p, x, name=name: p.op(f"{name}_{'fast' if p.fast and 's' in x.by else 'rn'}", x) for name in ("tanh", "erf", "log", "log2")},
    "_to_copy": lambda p, x, **_: p.cast(_value(x)),
    **dict.fromkeys(("clone", "alias"), lambda p, x, **_: x),
    "detach": lambda p, x: replace(x, active=False),
    "rsub": lambda p, x, y: p.op("sub", y, x),
    "square": lambda p, x: p.op("mul", x, x),
    "reciprocal": lambda p, x: p.op("div", 1, x),
    "relu": lambda p, x: p.op("where", p.op("gt", x, 0), x, 0),
    "leaky_relu": lambda p, x, slope=0.01: p.op("where", p.op("gt", x, 0), x, p.op("mul", x, slope)),
    "hardtanh": lambda p, x, least=-1, most=1: _clamp(p, x, least, most),
    "hardswish": lambda p, x: p.op("div", p.op("mul", x, _clamp(p, p.op("add", x, 3), 0, 6)), 6),
    "sgn": lambda p, x: p.op("sign", x),
    "silu": lambda p, x: p.op("mul", x, p.op("sigmoid", x)),
    "log1p": lambda p, x: p.op("log", p.op("add", x, 1)),
    "expm1": lambda p, x: p.op("sub", p.op("exp", x), 1),
    **{f"f{end}": lambda p, x, y, end=end: p.op(f"{end}imum", x, y) for end in ("max", "min")},
    "lerp": lambda p, x, y, weight: p.op("add", x, p.op("mul", weight, p.op("sub", y, x))),
    "masked_fill": lambda p, x, where, value: p.op("where", where, value, x),
    "full_like": lambda p, x, value, **_: value,
    "zeros_like": lambda p, x, **_: 0,
    "ones_like": lambda p, x, **_: 1,
    "isnan": lambda p, x: p.op("ne", x, x),
    "isinf": lambda p, x: p.op("logical_or", p.op("eq", x, INF), p.op("eq", x, -INF)),
    "isneginf": lambda p, x: p.op("eq", x, -INF),
    "__lshift__": lambda p, x, y: p.op("bitwise_left_shift", x, y),
    "__rshift__": lambda p, x, y: p.op("bitwise_right_shift", x, y),
}

# ---- host: one line after the other


@dataclass(frozen=True, eq=False)
class _Value:
    """A value of the text: its `code`, a name; `kind`, "float", "int" or "bool"; and `number`, of a constant.

    by     which of b, h, i, j, s decide it.           low, high, wide   between what an int lies, and whether it is an int64.
    real   an int's code as a float, if it has one.    finite, active    neither infinite nor NaN; a gradient flows through it.
    """

    code: str
    kind: str
    by: frozenset = frozenset()
    low: int = SPANS["int64"][0]
    high: int = SPANS["int64"][1]
    wide: bool = False
    real: str = ""
    finite: bool = True
    active: bool = False
    number: float | None = None

    @property
    def axes(self) -> str:
        return "ij" if "s" in self.by else "".join(sorted(self.by & {"i", "j"}))

    def as_(self, kind: str, wide: bool = False) -> str:
        """The code that gives it as another kind."""
        if self.number is not None:
            number = {"float": float, "int": int, "bool": bool}[kind](self.number)
            return f'float("{number}")' if not math.isfinite(number) else f"({number})" if number < 0 else repr(number)
        if self.kind == kind and self.wide >= wide:
            return self.code
        if kind == "float":
            small = self.kind == "int" and not self.wide and 0 <= self.low <= self.high < 1 << 23
            return self.real or (f"_real({self.code})" if small else f"tl.cast({self.code}, tl.float32)")
        return f"({self.code} != 0)" if kind == "bool" else f"tl.cast({self.code}, {'tl.int64' if wide else 'tl.int32'})"


def _value(x) -> _Value:
    """A Python number as a value."""
    if isinstance(x, _Value):
        return x
    whole = int(x) if math.isfinite(x) else 0
    return _Value("", _kind(type(x).__name__), low=whole, high=whole, finite=math.isfinite(x), number=x)


def _kind(dtype: str) -> str:
    return "bool" if dtype == "bool" else "float" if "float" in dtype else "int"


class _Program:
    """A text as lines of device code, and the steps by which gradients go back."""

    def __init__(self, text: str, wanted: Sequence[bool] = (), fast: bool = False, tiled: bool = False, of_row: bool = False):
        self.fast, self.lines, self.kinds, self.steps = fast, [], {}, []
        self.rows = {"i", "h"} if of_row else {"i"}  # what differs from row to row
        self.tile = pair_tile(text) if tiled else None  # what it finds in `t`
        *lines, last = ast.parse(text).body[0].body
        names = ast.parse(text).body[0].args.args
        self.values = {name.arg: _Value(name.arg, "int", frozenset({name.arg} & set("bhij")), 0, MOST) for name in names[1:7]}
        self.values |= {name: replace(self.values[name], by=frozenset({name, "i"})) for name in self.rows}
        self.score = self.values["s"] = _Value("s", "float", frozenset("s"), finite=False, active=True)
        self.captured, at, at_g = {}, 0, 0  # {name: (dtype, dimensions, its place in `c`, in `g` or None)}
        for n, name in enumerate(names[7:]):
            dtype, _, ndim = name.annotation.value.rstrip("]").partition("[")
            gets = n < len(wanted) and wanted[n] and _kind(dtype) == "float"
            self.captured[name.arg] = (dtype, int(ndim), at, at_g if gets else None)
            at, at_g = at + 1 + 2 * int(ndim), at_g + gets * (1 + int(ndim))
        for line in lines:
            self.line, self.dtype = ast.unparse(line.value), line.annotation.value
            self.values[line.target.id] = _value(self.translate(line.value))
        self.out = _value(self.argument(last.value))

    def refuse(self, why: str):
        raise Unsupported(f"{why} has no Triton form (`{self.line}`)")

    def translate(self, call: ast.Call):
        """The value of one line."""
        name = ast.unparse(call.func).split(".")[1]
        name = name if name[0] == "_" else name.rstrip("_")  # in place is no matter: the text names each state
        if name == "index":
            return self.load(ast.unparse(call.args[0]), [_value(self.argument(x)) for x in call.args[1].elts])
        args, words = [self.argument(x) for x in call.args], {word.arg: self.argument(word.value) for word in call.keywords}
        if not any(isinstance(x, _Value) and x.number is None for x in args):  # constants: torch computes them
            known = {name: torch.tensor(v.number) for name, v in self.values.items() if v.number is not None}
            return eval(ast.unparse(call), {"aten": torch.ops.aten, "torch": torch, "float": float, **known}).item()
        if name in ("add", "sub", "rsub") and (words or len(args) > 2):
            scaled = name != "rsub"
            args[scaled] = self.op("mul", args[scaled], words.pop("alpha") if words else args.pop())
        return self.op(name, *args, **words)

    def argument(self, node):
        """A value, or what Python makes of it."""
        if isinstance(node, ast.Name):
            return self.load(node.id, []) if node.id in self.captured else self.values[node.id]
        return eval(ast.unparse(node), {"torch": torch, "float": float})

    def emit(self, code: str, kind: str, *known, **also) -> _Value:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {code}")
        self.kinds[name] = kind
        return _Value(name, kind, *known, **also)

    def op(self, name: str, *args, **words) -> _Value:
        """The value of one operator, of the line's dtype."""
        if name in DERIVED:
            return DERIVED[name](self, *args, **words)
        args, kind, (first, _, last) = [_value(x) for x in args], _kind(self.dtype), name.rpartition("_")
        if kind == "int" and name in ("floor", "ceil", "trunc", "round"):
            return args[0]
        wanted, derivatives = kind, []
        if name in COMPARE:
            template, kind, wanted = COMPARE[name], "bool", next(k for k in ("float", "int", "bool") if any(x.kind == k for x in args))
        elif first == "logical" or kind == "bool":
            template, kind, wanted = BOOLS.get(last, ""), "bool", "bool"
        elif kind == "int":
            template = INTS.get(name, "")
        else:
            template, *derivatives = FLOATS.get(name, [""])
        if not template or words:
            self.refuse(f"aten.{name} of {self.dtype}{' with ' if words else ''}{', '.join(words)}")
        by = frozenset().union(*(x.by for x in args))
        if kind == "int":
            return self.int_op(name, template, by, args)
        codes = [x.as_("bool" if name == "where" and n == 0 else wanted) for n, x in enumerate(args)]
        active, finite = any(x.active for x in args) and bool(derivatives), name in FINITE and all(x.finite for x in args)
        out = self.emit(template.format(*codes), kind, by, finite=finite or kind == "bool", active=active)
        self.steps += [(out, name, args, codes, derivatives)] * active
        return out

    def int_op(self, name: str, template: str, by, args) -> _Value:
        number = args[-1].number
        if name in ("div_floor", "mod_floor") and number and number > 0 and number & (number - 1) == 0:  # right for negative ones, too
            template = f"{{0}} >> {number.bit_length() - 1}" if name == "div_floor" else f"{{0}} & {number - 1}"
        elif name in ("div_floor", "mod_floor") and args[0].low >= 0 and args[1].low > 0:
            template = INTS[name.replace("floor", "trunc")]
        all_of, wide = SPANS.get(self.dtype, SPANS["int64"]), any(x.wide for x in args) or name == "bitwise_left_shift"
        span = RANGES.get(name, lambda *_: None)(*((x.low, x.high) for x in args)) or SPANS["int64" if wide else "int32"]
        wraps = not all_of[0] <= span[0] <= span[1] <= all_of[1]
        span = all_of if wraps else span
        wide = wide or not SPANS["int32"][0] <= span[0] <= span[1] <= SPANS["int32"][1]
        code = template.format(*(x.as_("bool" if name == "where" and n == 0 else "int", wide) for n, x in enumerate(args)))
        if wraps and self.dtype in ("int8", "int16", "uint8"):
            code = f"tl.cast(tl.cast({code}, tl.{self.dtype}), tl.int32)"
        out = self.emit(code, "int", by, *span, wide)
        if not wraps and name in ("add", "sub", "neg", "abs") and out.axes == "ij" and -4 * MOST <= span[0] <= span[1] <= 4 * MOST:
            # of i - j as a float the two small tiles are cast, not the large one; what nobody reads is compiled away
            out = replace(out, real=self.emit(FLOATS[name][0].format(*(x.as_("float") for x in args)), "float").code)
        return out

    def cast(self, x: _Value) -> _Value:
        """To the line's dtype; all floats are alike."""
        kind, all_of = _kind(self.dtype), SPANS.get(self.dtype, SPANS["int64"])
        if x.kind == kind and (kind != "int" or all_of[0] <= x.low <= x.high <= all_of[1]):
            return x
        if kind != "int":
            return self.emit(x.as_(kind), kind, x.by)
        wide = self.dtype == "int64" and x.kind == "float"
        code, span = x.as_("int", wide), (0, 1) if x.kind == "bool" else all_of
        return self.emit(f"tl.cast(tl.cast({code}, tl.{self.dtype}), tl.int{64 if wide else 32})", "int", x.by, *span, wide)

    def load(self, name: str, indices: Sequence[_Value]) -> _Value:
        """`name[indices]` of a captured tensor, 0 where an index lies outside; or, of one that has a single element, without indices."""
        if self.tile and name == f"c{self.tile.tensor}" and indices:
            return _Value("t", "float", frozenset("bhij"), finite=False)
        dtype, ndim, at, at_g = self.captured.get(name, ("", -1, 0, None))
        if (indices and ndim != len(indices)) or any(x.kind != "int" for x in indices):
            self.refuse("a tensor that is not read at one place by integers")
        guards, places = [], []
        for n in sorted(range(len(indices)), key=lambda n: len(indices[n].axes)):  # the smallest first, so that sums stay small
            x, size = indices[n].as_("int"), f"c[{at + 1 + n}]"
            if indices[n].low < 0:
                x = self.emit(f"tl.where({x} < 0, {x} + {size}, {x})", "int").code
                guards.append(f"({x} >= 0)")
            guards.append(f"({x} < {size})")
            places.append((f"tl.cast({x}, tl.int64)", n))
        inside = self.emit(" & ".join(guards), "bool").code if guards else ""
        guard = f", mask={inside}" if guards else ""
        where = " + ".join([f"c[{at}]", *(f"{x} * c[{at + 1 + ndim + n}]" for x, n in places)])
        scattered = self.fast and dtype == "float32" and any(x.axes == "ij" for x in indices)
        code = f"_gather({where}, {inside})" if scattered else f"tl.load({where}{guard}{', other=0' if guards else ''})"
        kind, by, wide = _kind(dtype), frozenset().union(*(x.by for x in indices)), dtype not in SPANS or dtype == "int64"
        code = f"{code} != 0" if kind == "bool" else f"tl.cast({code}, {'tl.float32' if kind == 'float' else 'tl.int64' if wide else 'tl.int32'})"
        out = self.emit(code, kind, by, *SPANS.get(dtype, SPANS["int64"]), kind == "int" and wide, finite=kind != "float", active=at_g is not None)
        if out.active:
            where = " + ".join([f"g[{at_g}]", *(f"{x} * g[{at_g + 1 + n}]" for x, n in places)])
            self.steps.append((out, "load", (), (), f"tl.atomic_add({where}, {{d}}{guard}, sem='relaxed')"))
        return out

    def split(self, rows: int, keys: int) -> tuple[dict, list[str]]:
        """{"i": (lines that the rows alone decide, what of them the others use), "j": (the same of the keys)}, and the others.

        Those find it in `known`, from `rows` and `keys` on. What reads nothing and is short stays: knowing a tile's places saves ptxas more.
        """
        names, codes = zip(*(line.split(" = ", 1) for line in self.lines), strict=True) if self.lines else ((), ())
        uses = [set(re.findall(r"\b(?:v\d+|[hsijt])\b", code)) for code in codes]
        by, live = {x: {x} for x in "sjt"} | {x: {"i"} for x in self.rows}, {self.out.code}
        for name, used in zip(names, uses, strict=True):
            by[name] = set().union(*(by.get(x, ()) for x in used))
        for name, used in zip(reversed(names), reversed(uses), strict=True):
            live |= used if name in live else set()
        of, left, back = {"i": ([], []), "j": ([], [])}, [n for n, name in enumerate(names) if name in live], []
        for axis, first, form in (("i", rows, "known[0][{}][:, None]"), ("j", keys, "HAND(known[1][{}], j)")):
            mine = [n for n in left if by[names[n]] == {axis}]
            used = set().union({self.out.code}, *(uses[n] for n in left if n not in mine))
            handed = [names[n] for n in mine if names[n] in used]
            if any("tl.load" in codes[n] for n in mine) or len(mine) > 10 * len(handed):
                alone = [n for n in left if not by[names[n]]]  # values of no place, which everybody makes
                ints = [f"tl.cast({name}, tl.int32)" if self.kinds[name] == "bool" else name for name in handed]
                of[axis] = [self.lines[n] for n in sorted(alone + mine)], ints
                back += [f"{name} = {form.format(first + n)}{' != 0' if self.kinds[name] == 'bool' else ''}" for n, name in enumerate(handed)]
                left = [n for n in left if n not in mine]
        back = ["t = known[2]", *back] if self.tile else back
        return of, back + [self.lines[n] for n in left]

    def backward(self) -> tuple[list[str], str]:
        """The lines from the gradient `ds` of the result back to the tensors', and the name of that by `s`."""
        lines, parts = [], {self.out: {"ij": ["ds"]}}  # {value: {the axes of a tile: tiles to be summed}}

        def name_of(code: str) -> str:
            if code.isidentifier():
                return code
            lines.append(f"d{len(lines)} = {code}")
            return f"d{len(lines) - 1}"

        def gather(value) -> str:
            """A value's whole gradient, of its own shape."""
            axis = {"i": ", 1 - I_AXIS, keep_dims=True", "j": ", I_AXIS, keep_dims=True"}.get(value.axes, "")
            sums = [(axes, " + ".join(tiles)) for axes, tiles in parts[value].items()]
            return name_of(" + ".join(code if axes == value.axes else f"tl.sum({code}{axis})" for axes, code in sums))

        for out, name, args, codes, derivatives in reversed(self.steps):
            if out not in parts:
                continue
            d = gather(out)
            if name == "load":
                lines.append(derivatives.format(d=d))
            for n, x in enumerate(args):
                if not x.active:
                    continue
                code = derivatives[n].format(*codes, o=out.code, d=d)
                used = [y for m, y in [*enumerate(args), ("o", out)] if f"{{{m}}}" in derivatives[n]]
                if not code.startswith("tl.where") and not all(y.finite and (name in FINITE or y.number) for y in used):
                    code = f"tl.where({d} == 0.0, 0.0, {code})"  # where nothing counts, 0 times infinity would be NaN
                parts.setdefault(x, {}).setdefault(out.axes, []).append(name_of(code))
        return lines, gather(self.score) if self.score in parts else "tl.zeros_like(ds)"


# ---- host: functions


def _function(name: str, parameters: str, lines: Sequence[str], out: str):
    """A device function from its source, which Triton reads back through `linecache`."""
    source = "\n    ".join([f"def {name}({parameters}):", *lines, f"return {out}\n"])
    file = f"<onchip {name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space = dict(globals())
    exec(compile(source, file, "exec"), space)
    return triton.jit(space[name])


def _tile(out: _Value, kind: str) -> str:
    code = f"tl.cast({out.as_(kind)}, {'tl.int1' if kind == 'bool' else 'tl.float32'})"
    if "j" not in out.axes:  # an operation alone broadcasts a number in Gluon, and rows to keys that have an axis more (of warps)
        return f"(i + j == i + j) & {code}" if kind == "bool" else f"tl.cast((i + j) * 0, tl.float32) + {code}"
    return f"tl.broadcast_to({code}, (i + j).shape)"


@functools.lru_cache(maxsize=1024)
def mask_function(text: str):
    """The device function MASK of a mask's text. Raises Unsupported when Triton has no form of an operator."""
    program = _Program(text)
    return _function("sees", "b, h, i, j, len_q, len_k, c", program.lines, _tile(program.out, "bool"))


@functools.lru_cache(maxsize=1024)
def score_functions(text: str, wanted: tuple[bool, ...] = (), fast: bool = False):
    """The device functions SCORE and SCORE_GRAD of a score's text.

    wanted   which captured tensors get a gradient; the same as for `gradients`.
    fast     tanh may err by 2^-11, erf by 3e-5, log by 2^-22 and a quotient by 2 ulp: for half precision. On an NVIDIA GPU; elsewhere it changes nothing.
    """
    program = _Program(text, wanted, fast and _on_nvidia())
    (back, ds), place = program.backward(), "b, h, i, j, len_q, len_k, c"
    forward = _function("score", f"s, {place}", program.lines, _tile(program.out, "float"))
    return forward, _function("score_grad", f"s, ds, {place}, g, I_AXIS: tl.constexpr", [*program.lines, *back], ds)


def functions(mask: str | None, score: str | None, fast: bool = False):
    """The device functions MASK and SCORE of a mask's and a score's text, None without one."""
    return mask and mask_function(mask), score and score_functions(score, fast=fast)[0]


@functools.lru_cache(maxsize=1024)
def split_functions(mask: str | None, score: str | None, fast: bool = False, tiled: bool = False, of_row: bool = False):
    """The device functions ROWS, KEYS, MASK and SCORE, the latter two with `known`, of a mask's and a score's text. None: no text; nothing worth it."""
    lines, over, found, place = {"i": [], "j": []}, {"i": [], "j": []}, [], "b, h, i, j, len_q, len_k, c, known, HAND: tl.constexpr"
    for text, name, parameters, kind in ((mask, "sees", place, "bool"), (score, "score", f"s, {place}", "float")):
        program = _Program(text, (), fast and _on_nvidia(), tiled and name == "score", of_row) if text is not None else None
        if program:
            of, late = program.split(len(over["i"]), len(over["j"]))
            for axis, (early, handed) in of.items():  # side by side in one function: names and captured tensors of their own
                lines[axis] += [re.sub(r"\bv(?=\d)", name, re.sub(r"\bc\[", f"c[{len(found)}][", line)) for line in early]
                over[axis] += [re.sub(r"\bv(?=\d)", name, code) for code in handed]
        found.append(_function(name, parameters, late, _tile(program.out, kind)) if program else None)
    ahead = ((name, axis) for name, axis in (("rows", "i"), ("keys", "j")))
    return *(_function(name, f"b, h, {x}, len_q, len_k, c", lines[x], f"({', '.join(over[x])},)") if over[x] else None for name, x in ahead), *found


def _on_nvidia() -> bool:
    return not triton.knobs.runtime.interpret and torch.version.hip is None


@functools.lru_cache(maxsize=1024)
def refuses(text: str) -> str | None:
    """Why Triton cannot run this text, in one sentence; None when it can."""
    try:
        _Program(text)
    except Unsupported as why:
        return str(why)
    return None


def captured(tensors: Sequence[Tensor]) -> tuple:
    """The argument `c` of a kernel: for each tensor its pointer, its sizes and its strides, in one flat tuple."""
    return tuple(x for t in tensors for x in (t.view(torch.uint8) if t.dtype == torch.bool else t, *t.shape, *t.stride()))


def gradients(tensors: Sequence[Tensor], wanted: Sequence[bool]) -> tuple[tuple, list[Tensor | None]]:
    """The argument `g` of a kernel, pointers and strides, and what it points to: zeroed float32 tensors of the captured ones' shapes, or None."""
    want = [flag and t.dtype.is_floating_point for t, flag in zip(tensors, wanted, strict=True)]
    buffers = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) if flag else None for t, flag in zip(tensors, want, strict=True)]
    return tuple(x for buffer in buffers if buffer is not None for x in (buffer, *buffer.stride())), buffers
