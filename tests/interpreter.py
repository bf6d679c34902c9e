"""Repairs for Triton 3.6's interpreter (TRITON_INTERPRET=1), so that CPU tests can run bf16 and fp8 kernels.

1. numpy >= 2.4 no longer turns a one-element array into an int, so every range() over a runtime bound fails.
2. tl.dot multiplies the raw bits of bf16 operands.
3. Casts to bf16 and fp8 truncate; a GPU rounds to nearest even.
4. Adding a tile to memory through a descriptor is missing; programs run one after the other, so load, add and store will do.
5. Each call of a device function looks through all of triton.language for what to replace, which a launch has replaced already, each new tensor describes
   its shape anew, each look at a dtype builds a table of all, and each type of a tile checks and names its shape: together half of the time.
6. Each sum and product of integers is made a second time in 64 bits, to see whether it overflows, and nobody hears of it, since `debug` is off.
"""

import dataclasses

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

NARROW = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
TORCH_BITS = {16: torch.int16, 8: torch.uint8}
NUMPY_BITS = {16: np.uint16, 8: np.uint8}


def _widen(data, ty):
    """Raw bits of a narrow type -> float32 array."""
    bits = ty.primitive_bitwidth
    raw = np.array(data).view(NUMPY_BITS[bits])
    return torch.from_numpy(raw.view(np.int16) if bits == 16 else raw).view(NARROW[ty]).float().numpy()


def _narrow(data, ty):
    """Float array -> raw bits of a narrow type, rounded to nearest even."""
    bits = ty.primitive_bitwidth
    return torch.from_numpy(np.array(data, dtype=np.float32)).to(NARROW[ty]).view(TORCH_BITS[bits]).numpy().view(NUMPY_BITS[bits])


def hasten() -> None:
    """Let the interpreter do once what it does again and again."""
    patch, numpy_dtype, describe, check = interpreter._patch_lang, interpreter._get_np_dtype, tl.tensor.__init__, tl.block_type.__init__
    modules, dtypes, shapes = {}, {}, {}  # of a function: the parts of Triton that it names; of a type's name: numpy's, and a tensor's shape and size
    tiles = {}  # of an element's type and a shape: all that the tile's type says
    replaced = set()

    def patch_lang(fn):
        if fn not in modules:
            modules[fn] = {id(value) for value in fn.__globals__.values() if value in (tl, tl.core)}
        if modules[fn] <= replaced:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        restore = scope.restore
        scope.restore = lambda: (restore(), replaced.clear())
        replaced.update(modules[fn])
        return scope

    def get_np_dtype(ty):
        if ty.name not in dtypes:
            dtypes[ty.name] = numpy_dtype(ty)
        return dtypes[ty.name]

    def init(self, handle, type):
        if type.name not in shapes:
            describe(self, handle, type)
            shapes[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[type.name]

    def init_type(self, element_ty, shape):
        known = element_ty.name, *(n.value if isinstance(n, tl.constexpr) else n for n in shape)
        if known not in tiles:
            check(self, element_ty, shape)
            tiles[known] = self.__dict__.copy()
        self.__dict__.update(tiles[known])

    interpreter._patch_lang, interpreter._get_np_dtype = patch_lang, get_np_dtype
    tl.tensor.__init__, tl.block_type.__init__ = init, init_type


def repair() -> None:
    """Patch the interpreter of this process."""
    hasten()
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)
    convert, dot, patch = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot, interpreter._patch_lang_tensor

    def convert_float(data, src, dst, rounding):
        if src in NARROW and dst == tl.float32:
            return _widen(data, src).view(np.uint32)
        if src in NARROW and dst == tl.float16:
            return _widen(data, src).astype(np.float16).view(np.uint16)
        if dst in NARROW and rounding != interpreter._ir.ROUNDING_MODE.RTZ:
            if src in (tl.float32, tl.float16):
                return _narrow(np.array(data).view(np.float32 if src == tl.float32 else np.float16), dst)
            if src in NARROW:
                return _narrow(_widen(data, src), dst)
        return convert(data, src, dst, rounding)

    def create_dot(self, a, b, d, *rest):
        if a.dtype.scalar in NARROW or b.dtype.scalar in NARROW:
            x, y = (_widen(t.data, t.dtype.scalar) if t.dtype.scalar in NARROW else t.data for t in (a, b))
            return interpreter.TensorHandle(np.matmul(x, y, dtype=d.data.dtype) + d.data, d.dtype.scalar)
        return dot(self, a, b, d, *rest)

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))

    def create_descriptor_reduce(self, kind, desc, value, indices):
        pointers, mask = desc.materialize_pointers(indices)
        zero = interpreter.TensorHandle(np.zeros_like(value.data), value.dtype)
        before = self.create_masked_load(pointers, mask, zero, None, None, False)
        self.create_masked_store(pointers, interpreter.TensorHandle(before.data + value.data, value.dtype), mask, None, None)

    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_descriptor_reduce = create_descriptor_reduce
    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter._patch_lang_tensor = patch_lang_tensor
