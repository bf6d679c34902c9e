"""Mask and score functions inside Triton kernels: each line of a traced text (`core/trace.py`) becomes a line of device code.

A kernel takes the functions as constexpr arguments and calls them on a tile of places. `b, h, len_q, len_k` are scalars, `i` and `j`
int32 tiles [M, 1] and [1, N], or transposed [1, M] and [N, 1]; `c` is `captured(tensors)` and `g` is `gradients(tensors, wanted)[0]`.

    MASK(b, h, i, j, len_q, len_k, c)                          -> bool [M, N]
    SCORE(s, b, h, i, j, len_q, len_k, c)                      -> float32 [M, N]
    SCORE_GRAD(s, ds, b, h, i, j, len_q, len_k, c, g, I_AXIS)  -> float32 [M, N], the gradient by `s`; adds those of captured tensors to `g`

Values stay as small as what they depend on: a slope of a head is a scalar, an id of a row [M, 1]. A captured tensor is never read
outside of its sizes: what lies there reads as 0. So at places that do not exist a function may give anything, NaN included, and the
kernel's `where` decides; `SCORE_GRAD` gives 0 wherever `ds` is 0. Floats are float32 throughout, whatever a tensor's dtype.
"""

import ast
import functools
import hashlib
import linecache
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.core.kernel import Unsupported

INF = math.inf
SPANS = {"bool": (0, 1), "uint8": (0, 255), "int8": (-128, 127), "int16": (-(1 << 15), (1 << 15) - 1), "int32": (-(1 << 31), (1 << 31) - 1)}
LONG = (-(1 << 63), (1 << 63) - 1)
MOST = 1 << 24  # tokens of a sequence, heads, sequences: products that may exceed an int32 then are int64
TYPES = {"int8": "tl.int8", "uint8": "tl.uint8", "int16": "tl.int16", "int32": "tl.int32"}

# ---- device: what Triton lacks


@triton.jit
def _tanh(x):
    """To 1.6 ulp: near 0 a polynomial, as 1 - 2 / (1 + exp(2 x)) cancels there."""
    square = x * x
    near = (((-0.005905854981392622 * square + 0.020805373787879944) * square - 0.05378668010234833) * square + 0.13331958651542664) * square
    far = 1.0 - 2.0 / (1.0 + tl.exp2(tl.abs(x) * 2.8853900817779268))
    return tl.where(tl.abs(x) < 0.6, x + x * square * (near - 0.33333298563957214), tl.where(x < 0.0, -far, far))


@triton.jit
def _tanh_fast(x):
    """The instruction of sm_75 and later: to 2^-11."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def _int_sign(x):
    return tl.where(x > 0, 1, tl.where(x < 0, -1, 0))


@triton.jit
def _trunc(x):
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))


@triton.jit
def _round(x):
    """Halves go to the even neighbour."""
    low = tl.floor(x)
    odd = low - 2.0 * tl.floor(0.5 * low)
    return tl.where((x - low > 0.5) | ((x - low == 0.5) & (odd == 1.0)), low + 1.0, low)


@triton.jit
def _floor_divide(x, y):
    """Python's: towards minus infinity, where the machine's goes towards 0."""
    quotient = x // y
    rest = x - quotient * y
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), quotient - 1, quotient)


@triton.jit
def _remainder(x, y):
    """Python's: of the divisor's sign."""
    rest = x % y
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


# ---- host: the operators
# name: (the value, its derivative by each argument), of arguments {0}, {1}, {2}, the value {o} and the value's gradient {d}

FLOATS = {
    "add": ("{0} + {1}", "{d}", "{d}"),
    "sub": ("{0} - {1}", "{d}", "-{d}"),
    "mul": ("{0} * {1}", "{d} * {1}", "{d} * {0}"),
    "over": ("{0} / {1}", "{d} / {1}", "-{d} * {o} / {1}"),
    "div": ("tl.math.div_rn({0}, {1})", "tl.math.div_rn({d}, {1})", "-{d} * tl.math.div_rn({o}, {1})"),
    "neg": ("-{0}", "-{d}"),
    "abs": ("tl.abs({0})", "{d} * _sign({0})"),
    "minimum": ("tl.minimum({0}, {1})", *(f"tl.where({{0}} == {{1}}, 0.5 * {{d}}, tl.where({{0}} {sign} {{1}}, {{d}}, 0.0))" for sign in "<>")),
    "maximum": ("tl.maximum({0}, {1})", *(f"tl.where({{0}} == {{1}}, 0.5 * {{d}}, tl.where({{0}} {sign} {{1}}, {{d}}, 0.0))" for sign in "><")),
    "clamp_min": ("tl.maximum({0}, {1})", "tl.where({0} >= {1}, {d}, 0.0)", "tl.where({0} >= {1}, 0.0, {d})"),
    "clamp_max": ("tl.minimum({0}, {1})", "tl.where({0} <= {1}, {d}, 0.0)", "tl.where({0} <= {1}, 0.0, {d})"),
    "where": ("tl.where({0}, {1}, {2})", None, "tl.where({0}, {d}, 0.0)", "tl.where({0}, 0.0, {d})"),
    "exp": ("tl.exp({0})", "{d} * {o}"),
    "exp2": ("tl.exp2({0})", "{d} * ({o} * 0.6931471805599453)"),
    "log": ("tl.log({0})", "{d} / {0}"),
    "log2": ("tl.log2({0})", "{d} * 1.4426950408889634 / {0}"),
    "sqrt": ("tl.sqrt_rn({0})", "{d} * 0.5 / {o}"),
    "rsqrt": ("tl.rsqrt({0})", "-0.5 * {d} * {o} / {0}"),
    "sin": ("tl.sin({0})", "{d} * tl.cos({0})"),
    "cos": ("tl.cos({0})", "-{d} * tl.sin({0})"),
    "tanh": ("_tanh({0})", "{d} * (1.0 - {o} * {o})"),
    "tanh_fast": ("_tanh_fast({0})", "{d} * (1.0 - {o} * {o})"),
    "sigmoid": ("tl.math.div_rn(1.0, 1.0 + tl.exp(-{0}))", "{d} * ({o} * (1.0 - {o}))"),
    "erf": ("tl.erf({0})", "{d} * (1.1283791670955126 * tl.exp(-{0} * {0}))"),
    "power": ("tl.exp2(tl.log2({0}) * {1})", "{d} * {1} * {o} / {0}", "{d} * {o} * tl.log({0})"),
    "floor": ("tl.floor({0})",),
    "ceil": ("tl.ceil({0})",),
    "trunc": ("_trunc({0})",),
    "round": ("_round({0})",),
    "sign": ("_sign({0})",),
}
INTS = {
    **{name: (FLOATS[name][0],) for name in ("add", "sub", "mul", "neg", "abs", "minimum", "maximum", "clamp_min", "clamp_max", "where")},
    "sign": ("_int_sign({0})",),
    "floor_divide": ("_floor_divide({0}, {1})",),
    "remainder": ("_remainder({0}, {1})",),
    "divide": ("{0} // {1}",),
    "fmod": ("{0} % {1}",),
    "bitwise_and": ("{0} & {1}",),
    "bitwise_or": ("{0} | {1}",),
    "bitwise_xor": ("{0} ^ {1}",),
    "bitwise_not": ("~{0}",),
    "bitwise_left_shift": ("{0} << {1}",),
    "bitwise_right_shift": ("{0} >> {1}",),
}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
FINITE = {
    "add",
    "sub",
    "mul",
    "neg",
    "abs",
    "minimum",
    "maximum",
    "clamp_min",
    "clamp_max",
    "where",
    "tanh",
    "tanh_fast",
    "sigmoid",
    "sin",
    "cos",
    "erf",
    "floor",
    "ceil",
}
FINITE |= {"trunc", "round", "sign"}  # of finite arguments, finite values
SAME = {"clone", "alias", "contiguous", "positive"}
RISING = {"log": math.log, "log2": math.log2, "sqrt": math.sqrt, "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc, "round": round}
DERIVED = {  # operators made of others: f(operator, *arguments)
    "rsub": lambda op, x, y: op("sub", y, x),
    "square": lambda op, x: op("mul", x, x),
    "reciprocal": lambda op, x: op("div", 1, x),
    "absolute": lambda op, x: op("abs", x),
    "relu": lambda op, x: op("where", op("gt", x, 0), x, 0),
    "silu": lambda op, x: op("mul", x, op("sigmoid", x)),
    "log1p": lambda op, x: op("log", op("add", x, 1)),
    "expm1": lambda op, x: op("sub", op("exp", x), 1),
    "log10": lambda op, x: op("mul", op("log2", x), math.log10(2)),
    "masked_fill": lambda op, x, where, value: op("where", where, value, x),
    "isnan": lambda op, x: op("ne", x, x),
    "isinf": lambda op, x: op("eq", op("abs", x), INF),
    "isneginf": lambda op, x: op("eq", x, -INF),
    "isposinf": lambda op, x: op("eq", x, INF),
    "__lshift__": lambda op, x, y: op("bitwise_left_shift", x, y),
    "__rshift__": lambda op, x, y: op("bitwise_right_shift", x, y),
    "__and__": lambda op, x, y: op("bitwise_and", x, y),
    "__or__": lambda op, x, y: op("bitwise_or", x, y),
    "__xor__": lambda op, x, y: op("bitwise_xor", x, y),
}

# ---- host: one line after the other


@dataclass(frozen=True, eq=False)
class _Value:
    """What is known of a value.

    code       its name.                                 kind     "float", "int" or "bool".      number   its value, of a constant.
    by         which of b, h, i, j, s decide it.         finite   surely neither infinite nor NaN.
    low, high  it surely lies between, and as an int that may need 64 bits is one: `wide`.
    active     a gradient flows through it.
    """

    code: str
    kind: str
    by: frozenset = frozenset()
    low: float = -INF
    high: float = INF
    finite: bool = True
    active: bool = False
    number: float | None = None

    @property
    def axes(self) -> str:
        return "ij" if "s" in self.by else "".join(sorted(self.by & {"i", "j"}))

    @property
    def wide(self) -> bool:
        return self.kind == "int" and not (SPANS["int32"][0] <= self.low and self.high <= SPANS["int32"][1])

    def as_(self, kind: str, wide: bool = False) -> str:
        """The code that gives it as another kind."""
        if self.number is not None:
            number = {"float": float, "int": int, "bool": bool}[kind](self.number)
            return f"({number})" if math.isfinite(number) else f'float("{number}")'
        if kind == "bool":
            return self.code if self.kind == "bool" else f"({self.code} != 0)"
        if self.kind == kind and (self.wide or not wide):
            return self.code
        return f"tl.cast({self.code}, {'tl.float32' if kind == 'float' else 'tl.int64' if wide else 'tl.int32'})"


def _value(x) -> _Value:
    """A Python number as a value."""
    if isinstance(x, _Value):
        return x
    return _Value(repr(x), _kind(type(x).__name__), low=-INF if x != x else x, high=INF if x != x else x, finite=math.isfinite(x), number=x)


def _kind(dtype: str) -> str:
    return "bool" if dtype == "bool" else "float" if "float" in dtype else "int"


def _span(name: str, args: Sequence[_Value]) -> tuple[float, float]:
    """Between what the operator's value lies."""
    low, high = args[0].low, args[0].high
    if name in RISING:  # a little more, as float32 rounds
        low, high = low - 1e-4 * max(1, abs(low)), high + 1e-4 * max(1, abs(high))
        return (
            (RISING[name](low) if low > 0 or name not in ("log", "log2", "sqrt") else -INF, RISING[name](high) if 0 < high < INF else INF)
            if low > -INF
            else (-INF, INF)
        )
    if name == "neg":
        return -high, -low
    if name == "abs":
        return (0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))
    if len(args) < 2:
        return -INF, INF
    low2, high2 = args[1].low, args[1].high
    if name == "add":
        return low + low2, high + high2
    if name == "sub":
        return low - high2, high - low2
    if name == "mul":
        products = [0 if 0 in (x, y) else x * y for x in (low, high) for y in (low2, high2)]
        return min(products), max(products)
    if name in ("minimum", "clamp_max"):
        return min(low, low2), min(high, high2)
    if name in ("maximum", "clamp_min"):
        return max(low, low2), max(high, high2)
    if name == "where":
        return min(low2, args[2].low), max(high2, args[2].high)
    if name == "bitwise_and" and max(low, low2) >= 0:
        return 0, min(top for bottom, top in ((low, high), (low2, high2)) if bottom >= 0)
    if low2 > 0 and name in ("floor_divide", "divide") and args[0].kind == args[1].kind == "int":
        return min(low // low2, low // high2), max(high // low2, high // high2)
    if low2 > 0 and name == "remainder" and args[0].kind == args[1].kind == "int":
        return 0, high2 - 1
    if name in ("div", "over") and args[1].number and args[1].number > 0:
        return low / low2, high / low2
    return -INF, INF


class _Program:
    """A text as lines of device code, forward and, where tensors are `wanted`, what is needed to go back."""

    def __init__(self, text: str, wanted: Sequence[bool] = (), fast: bool = False):
        self.fast, self.lines, self.steps, self.count = fast, [], [], 0
        function = ast.parse(text).body[0]
        names = ("b", "h", "i", "j", "len_q", "len_k")
        self.values = {name: _Value(name, "int", frozenset({name} & set("bhij")), 0, MOST) for name in names}
        self.values["s"] = _Value("s", "float", frozenset("s"), active=True)
        self.captured, at, at_g = {}, 0, 0  # {name: (dtype, dimensions, its place in `c`, in `g` or None)}
        for n, argument in enumerate(function.args.args[7:]):
            dtype, _, ndim = argument.annotation.value.rstrip("]").partition("[")
            gets = n < len(wanted) and wanted[n] and _kind(dtype) == "float"
            self.captured[argument.arg] = (dtype, int(ndim), at, at_g if gets else None)
            at, at_g = at + 1 + 2 * int(ndim), at_g + gets * (1 + int(ndim))
        for line in function.body[:-1]:
            self.line, self.dtype = ast.unparse(line.value), line.annotation.value
            self.values[line.target.id] = _value(self.translate(line.value))
        self.line, self.dtype = ast.unparse(function.body[-1]), "float32"
        self.out = _value(self.argument(function.body[-1].value))

    def refuse(self, why: str):
        raise Unsupported(f"{why} in `{self.line}`")

    def translate(self, call: ast.Call):
        """The value of one line."""
        name = ast.unparse(call.func).split(".")[1]
        name = name if name[0] == "_" else name.rstrip("_")  # in place: the text has a name for each state
        if name == "index":
            return self.load(ast.unparse(call.args[0]), [_value(self.argument(x)) for x in call.args[1].elts])
        args, words = [self.argument(x) for x in call.args], {word.arg: self.argument(word.value) for word in call.keywords}
        if not any(isinstance(x, _Value) and x.number is None for x in args):
            return self.fold(call)
        if name in ("full_like", "zeros_like", "ones_like"):
            return args[1] if name == "full_like" else int(name == "ones_like")
        words.pop("dtype", None)
        if "alpha" in words:
            args[1] = self.op("mul", args[1], words.pop("alpha"))
        special = getattr(self, f"op_{name.strip('_')}", None)
        if words and special is None:
            self.refuse(f"aten.{name} with {', '.join(words)} has no Triton form")
        return special(*args, **words) if special else self.op(name, *args)

    def argument(self, node):
        """A value, or what Python makes of it."""
        if isinstance(node, ast.Name):
            return self.load(node.id, []) if node.id in self.captured else self.values[node.id]
        if isinstance(node, ast.List):
            return [self.argument(x) for x in node.elts]
        return eval(ast.unparse(node), {"torch": torch, "float": float})

    def fold(self, call: ast.Call):
        """A line of constants, computed by torch."""
        known = {name: torch.tensor(v.number) for name, v in self.values.items() if v.number is not None}
        result = eval(ast.unparse(call), {"aten": torch.ops.aten, "torch": torch, "float": float, **known})
        if result.numel() != 1:
            self.refuse(f"a constant of {list(result.shape)} is not one value")
        return result.item()

    def emit(self, code: str, kind: str, **known) -> _Value:
        name, self.count = f"v{self.count}", self.count + 1
        self.lines.append(f"{name} = {code}")
        return _Value(name, kind, **known)

    # ---- operators

    def op(self, name: str, *args) -> _Value:
        """The value of one operator, of the line's dtype."""
        if name in DERIVED:
            return DERIVED[name](self.op, *args)
        args = [_value(x) for x in args]
        by, kind = frozenset().union(*(x.by for x in args)), _kind(self.dtype)
        if name in SAME or (kind == "int" and name in RISING):
            return args[0]
        if name in COMPARE:
            kind = "float" if any(x.kind == "float" for x in args) else "bool" if all(x.kind == "bool" for x in args) else "int"
            return self.emit(f"{args[0].as_(kind)} {COMPARE[name]} {args[1].as_(kind)}", "bool", by=by, low=0, high=1)
        first, _, last = name.partition("_")
        if first == "logical" or (first == "bitwise" and kind == "bool"):
            codes, sign = [x.as_("bool") for x in args], {"and": "&", "or": "|", "xor": "^"}.get(last)
            return self.emit(f"{codes[0]} {sign} {codes[1]}" if sign else f"~{codes[0]}", "bool", by=by, low=0, high=1)
        if kind == "bool" and name == "where":
            codes = [x.as_("bool") for x in args]
            return self.emit(f"tl.where({', '.join(codes)})", "bool", by=by, low=0, high=1)
        table = {"float": FLOATS, "int": INTS}.get(kind, {})
        if name not in table:
            self.refuse(f"aten.{name} of {self.dtype} has no Triton form")
        return (self.float_op if kind == "float" else self.int_op)(name, args, by, *table[name])

    def float_op(self, name: str, args, by, template: str, *derivatives) -> _Value:
        codes = [x.as_("bool" if name == "where" and n == 0 else "float") for n, x in enumerate(args)]
        finite, active = name in FINITE and all(x.finite for x in args), any(x.active for x in args) and bool(derivatives)
        low, high = _span(name, args)
        low, high = (-INF, INF) if math.isnan(low) or math.isnan(high) else (low, high)
        out = self.emit(template.format(*codes), "float", by=by, low=low, high=high, finite=finite, active=active)
        if active:
            self.steps.append((out, name, args, codes, derivatives))
        return out

    def int_op(self, name: str, args, by, template: str) -> _Value:
        number = args[-1].number
        power = number.bit_length() - 1 if isinstance(number, int) and number > 0 and number & (number - 1) == 0 else None
        if name == "floor_divide" and power is not None:
            template = f"{{0}} >> {power}"
        elif name == "remainder" and power is not None:
            template = f"{{0}} & {number - 1}"
        elif name in ("floor_divide", "remainder") and args[0].low >= 0 and args[1].low > 0:
            template = "{0} // {1}" if name == "floor_divide" else "{0} % {1}"
        low, high = _span(name, args)
        least, most = SPANS.get(self.dtype, LONG)
        fits = least <= low and high <= most
        out = _Value("", "int", by, *((low, high) if fits else (least, most)))
        wide = out.wide or any(x.wide for x in args)
        code = template.format(*(x.as_("bool" if name == "where" and n == 0 else "int", wide) for n, x in enumerate(args)))
        if not fits and self.dtype in TYPES:  # wraps around as torch's does
            code = f"tl.cast(tl.cast({code}, {TYPES[self.dtype]}), tl.int32)"
        elif wide and not out.wide:
            code = f"tl.cast({code}, tl.int32)"
        return self.emit(code, "int", by=by, low=out.low, high=out.high)

    def op_div(self, x, y, rounding_mode=None):
        if rounding_mode and _kind(self.dtype) == "int":
            return self.op({"floor": "floor_divide", "trunc": "divide"}[rounding_mode], x, y)
        x, y = _value(x), _value(y)
        loose = self.fast and "s" in x.by | y.by  # not of a place: a bucket's number must not change by a rounding
        if y.number and math.isfinite(y.number) and (loose or math.frexp(y.number)[0] == 0.5):
            out = self.op("mul", x, 1 / y.number)
        else:
            out = self.op("over" if loose else "div", x, y)
        return self.op(rounding_mode, out) if rounding_mode else out

    def op_floor_divide(self, x, y):
        return self.op("floor_divide", x, y) if _kind(self.dtype) == "int" else self.op_div(x, y, "floor")

    def op_remainder(self, x, y):
        return self.op("remainder", x, y) if _kind(self.dtype) == "int" else self.op("sub", x, self.op("mul", self.op_div(x, y, "floor"), y))

    def op_fmod(self, x, y):
        return self.op("fmod", x, y) if _kind(self.dtype) == "int" else self.op("sub", x, self.op("mul", self.op_div(x, y, "trunc"), y))

    def op_clamp(self, x, min=None, max=None):
        x = x if min is None else self.op("clamp_min", x, min)
        return x if max is None else self.op("clamp_max", x, max)

    def op_tanh(self, x):
        return self.op("tanh_fast" if self.fast else "tanh", x)

    def op_detach(self, x):
        return replace(x, active=False)

    def op_to_copy(self, x):
        """A cast to the line's dtype; all floats are alike."""
        x, kind = _value(x), _kind(self.dtype)
        low, high = x.low, x.high
        if x.kind == "float" and kind == "int":
            low, high = (int(end + sign * 1e-4 * max(1, abs(end))) if math.isfinite(end) else sign * INF for end, sign in ((low, -1), (high, 1)))
        least, most = SPANS.get(self.dtype, LONG)
        fits = kind == "float" or (least <= low and high <= most)
        if x.kind == kind and fits:
            return x
        out = _Value("", kind, x.by, *((low, high) if fits else (least, most)))
        code = x.as_(kind, out.wide)
        if not fits and self.dtype in TYPES:
            code = f"tl.cast(tl.cast({x.code}, {TYPES[self.dtype]}), tl.int32)"
        return self.emit(code, kind, by=x.by, low=out.low, high=out.high)

    def op_pow(self, x, y):
        x, y = _value(x), _value(y)
        power = y.number
        if x.number is not None and _kind(self.dtype) == "float" and x.number > 0:
            return self.op("exp2", self.op("mul", y, math.log2(x.number)) if x.number != 2 else y)
        if x.number == 2 and y.low >= 0:
            return self.op("bitwise_left_shift", 1, y)
        if power in (0.5, -0.5):
            return self.op("sqrt" if power > 0 else "rsqrt", x)
        if power is not None and power == int(power) and abs(power) <= 8:
            out = functools.reduce(lambda a, _: self.op("mul", a, x), range(abs(int(power)) - 1), x) if power else 1
            return out if power >= 0 else self.op_div(1, out)
        return self.op("power", x, y)

    def op_gelu(self, x, approximate="none"):
        inner = self.op("mul", x, math.sqrt(0.5)) if approximate == "none" else self.op_pow(x, 3)
        if approximate == "tanh":
            inner = self.op_tanh(self.op("mul", self.op("add", x, self.op("mul", inner, 0.044715)), math.sqrt(2 / math.pi)))
        else:
            inner = self.op("erf", inner)
        return self.op("mul", self.op("mul", x, 0.5), self.op("add", inner, 1.0))

    def op_softplus(self, x, beta=1, threshold=20):
        y = self.op("mul", x, beta)
        out = self.op("add", self.op("clamp_min", y, 0.0), self.op("log", self.op("add", self.op("exp", self.op("neg", self.op("abs", y))), 1.0)))
        return self.op_div(out, beta)

    # ---- captured tensors

    def load(self, name: str, indices: Sequence[_Value]) -> _Value:
        """`name[indices]`; 0 where an index lies outside."""
        if name not in self.captured:
            self.refuse("a computed tensor is indexed, which has no Triton form")
        dtype, ndim, at, at_g = self.captured[name]
        if ndim != len(indices) or any(x.kind != "int" for x in indices):
            self.refuse(f"a tensor of {ndim} dimensions is read by {len(indices)} integers, which has no Triton form")
        if (name, *indices) in self.values:
            return self.values[name, *indices]
        guards, places = [], []
        for n in sorted(range(ndim), key=lambda n: len(indices[n].axes)):  # the smallest first, so that sums stay small
            x, size = indices[n].as_("int"), f"c[{at + 1 + n}]"
            if indices[n].low < 0:
                x = self.emit(f"tl.where({x} < 0, {x} + {size}, {x})", "int").code
                guards.append(f"({x} >= 0)")
            guards.append(f"({x} < {size})")
            places.append((f"tl.cast({x}, tl.int64)", n))
        guard = f"mask={self.emit(' & '.join(guards), 'bool').code}, " if guards else ""
        code = f"tl.load({' + '.join([f'c[{at}]', *(f'{x} * c[{at + 1 + ndim + n}]' for x, n in places)])}{', ' + guard + 'other=0' if guards else ''})"
        kind, by = _kind(dtype), frozenset().union(*(x.by for x in indices))
        low, high = (-INF, INF) if kind == "float" else SPANS.get(dtype, LONG)
        if kind == "bool":
            code = f"{code} != 0"
        elif kind == "float" or dtype in TYPES:
            code = f"tl.cast({code}, {'tl.float32' if kind == 'float' else 'tl.int32'})"
        out = self.emit(code, kind, by=by, low=low, high=high, finite=kind != "float", active=at_g is not None)
        if out.active:
            where = " + ".join([f"g[{at_g}]", *(f"{x} * g[{at_g + 1 + n}]" for x, n in places)])
            self.steps.append((out, "load", (), (), f"tl.atomic_add({where}, {{d}}, {guard}sem='relaxed')"))
        self.values[name, *indices] = out
        return out


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
    code = out.as_(kind)
    return (
        f"tl.full((i + j).shape, {code}, {'tl.int1' if kind == 'bool' else 'tl.float32'})"
        if out.number is not None
        else f"tl.broadcast_to({code}, (i + j).shape)"
    )


@functools.lru_cache(maxsize=1024)
def mask_function(text: str):
    """The device function `MASK` of a mask's text. Raises Unsupported where Triton has no form of an operator."""
    program = _Program(text)
    return _function("sees", "b, h, i, j, len_q, len_k, c", program.lines, _tile(program.out, "bool"))


@functools.lru_cache(maxsize=1024)
def score_functions(text: str, wanted: Sequence[bool] = (), fast: bool = False):
    """The device functions `SCORE` and `SCORE_GRAD` of a score's text.

    wanted   which captured tensors get a gradient.
    fast     what depends on the score may err by 2^-11 of it (tanh by the GPU's instruction): for half precision, on an NVIDIA GPU.
    """
    program = _Program(text, tuple(wanted), fast and not triton.knobs.runtime.interpret and torch.version.hip is None)
    forward = _function("score", "s, b, h, i, j, len_q, len_k, c", program.lines, _tile(program.out, "float"))
    return forward, None


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
    """The argument `g` of a kernel, and a zeroed float32 tensor of each captured tensor's shape, or None where no gradient is wanted.

    `g` holds the pointer and the strides of each of these tensors.
    """
    buffers = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) if want else None for t, want in zip(tensors, wanted, strict=True)]
    return tuple(x for buffer in buffers if buffer is not None for x in (buffer, *buffer.stride())), buffers
