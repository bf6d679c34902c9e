"""Compile a Triton or Gluon kernel for a GPU that is not here, and read what its assembler made of it.

>>> facts = compile_for(kernel, {"x_ptr": "*bf16", "width": "i32"}, {"BLOCK": 1024}, "sm_90", aligned=("width",))
>>> assert not facts.spills
"""

import contextlib
import io
import itertools
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

NEWEST = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)  # `make newest`
OPTIONS = ["--regAllocOptLevel=2"] if NEWEST else []  # as Triton's own call has it
wide = pytest.mark.wide
VECTOR_LOAD = re.compile(r"ld\.global[.\w:]*\.(v4\.b32|v2\.b64|v8\.b32|v4\.b64)|global_load_dwordx4|buffer_load_dwordx4")


@dataclass(frozen=True)
class Facts:
    """What a kernel became.

    registers   of one thread.                      spills   bytes a thread spills (loads and stores), 0 when all is in registers.
    shared      bytes of shared memory a block.     wgmma, tma_loads   how many such instructions the code holds.
    ptx         the assembly: PTX, or amdgcn for an AMD GPU.
    serialized  whether ptxas says that it waits for each wgmma.
    """

    registers: int
    spills: int
    shared: int
    wgmma: int
    tma_loads: int
    ptx: str
    serialized: bool = False

    @property
    def vector_loads(self) -> int:
        """How many instructions read 16 bytes or more of global memory a thread."""
        return len(VECTOR_LOAD.findall(self.ptx))

    @property
    def barriers(self) -> list[int]:
        """Where in shared memory mbarriers are made."""
        known = {m[1]: 0 for m in re.finditer(r"mov\.b32\s+(%r\d+), global_smem;", self.ptx)} | {"global_smem": 0}
        known |= {m[1]: int(m[3]) for m in re.finditer(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", self.ptx) if m[2] in known}
        return [known[m[1]] + int(m[2] or 0) for m in re.finditer(r"mbarrier\.init\S* \[(%r\d+|global_smem)\+?(\d*)\]", self.ptx)]


def across(gpus, cases, **kept) -> list:
    """Each of `cases` on each GPU, as parameters; all `wide` but those whose numbers `kept` has for that GPU (by default all of Hopper, none of others)."""
    kept = {"sm_90": range(len(cases))} | kept
    params = []
    for (i, case), arch in itertools.product(enumerate(cases), gpus):
        name = "-".join(str(part).removeprefix("torch.") for part in (*case, arch))
        params.append(pytest.param(*case, arch, id=name, marks=[wide] * (i not in kept.get(arch, ()))))
    return params


def compile_for(
    fn,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object],
    arch: str,
    num_warps: int = 4,
    num_stages: int = 3,
    aligned: tuple[str, ...] = (),
    ctas: int = 1,
    most_registers: int = 0,
) -> Facts:
    """Compile the JITFunction `fn` for `arch` ("sm_80", "sm_90", "gfx942") without a GPU.

    signature    {argument: type}: "*bf16", "i32", "fp32", "tensordesc<bf16[1,1,64,128]>", or a tuple of such; an argument passed as None is a constexpr.
    aligned      integers that are multiples of 16 in a launch; pointers always are.      ctas   of a cluster.
    most_registers   of a thread (`maxnreg`); 0: no limit.
    Raises RuntimeError with ptxas's own words when it refuses the code. Skips the test under TRITON_INTERPRET.
    """
    if not isinstance(fn, JITFunction):
        pytest.skip("TRITON_INTERPRET is set: @triton.jit made an interpreted function, which cannot be compiled")
    types = {name: "constexpr" if name in constexprs else signature[name] for name in fn.arg_names}
    places = [(path, ty, name) for i, (name, given) in enumerate(types.items()) for path, ty in _leaves((i,), given)]
    divisible = {path: [["tt.divisibility", 16]] for path, ty, name in places if ty.startswith("*") or name in aligned}
    source = (GluonASTSource if fn.is_gluon() else ASTSource)(fn, types, dict(constexprs), divisible)
    kind, _, number = arch.rpartition("_") if arch.startswith("sm_") else ("hip", "", arch)
    target = GPUTarget("hip", number, 64) if kind == "hip" else GPUTarget("cuda", int(number), 32)
    options = {"num_warps": num_warps, "num_stages": num_stages, "num_ctas": ctas} | ({"maxnreg": most_registers} if most_registers else {})
    return assembled(source, target, options, arch)


def compiled(kernel, args, rest, arch: str) -> Facts:
    """A kernel compiled as Triton would for these arguments."""
    amd = arch.startswith("gfx")
    target = GPUTarget("hip", arch, 64) if amd else GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    backend = make_backend(target)
    bound, kinds, options = create_function_from_signature(kernel.signature, kernel.params, backend)(*args, **rest)
    options, signature, constexprs, attrs = kernel._pack_args(backend, rest | {"debug": False}, bound, kinds, options)
    return assembled((GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constexprs, attrs), target, options.__dict__, arch)


KNOWN: dict[str, Facts] = {}  # by the name that a kernel has in Triton's cache


def assembled(source, target: GPUTarget, options: Mapping[str, object], arch: str) -> Facts:
    """What Triton makes of a kernel's source. Its own run of ptxas is listened to: another one would be a fifth of the whole time."""
    said = io.StringIO()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=target, options=dict(options))
    if compiled.hash not in KNOWN:
        log = said.getvalue() if " registers" in said.getvalue() or target.backend == "hip" else _ptxas(compiled.asm["ptx"], arch)
        KNOWN[compiled.hash] = _amd(compiled) if target.backend == "hip" else _nvidia(compiled, log)
    return KNOWN[compiled.hash]


def _leaves(path: tuple[int, ...], given):
    """(place, type) of an argument, or of each in a tuple of tuples."""
    if isinstance(given, str):
        yield path, given
        return
    for i, part in enumerate(given):
        yield from _leaves((*path, i), part)


def _nvidia(compiled, log: str) -> Facts:
    ptx = compiled.asm["ptx"]
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    spills = sum(int(size) for size in re.findall(r"(\d+) bytes spill", log))
    wgmma = len(re.findall(r"wgmma\.mma_async", ptx))
    tma_loads = len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared", ptx))
    return Facts(registers, spills, compiled.metadata.shared, wgmma, tma_loads, ptx, "serializ" in log)


def _ptxas(ptx: str, arch: str) -> str:
    """What `ptxas -v` says of the code, where Triton has compiled it before or does not at all."""
    target = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        command = [get_ptxas(int(re.search(r"\d+", arch)[0])).path, "-v", *OPTIONS, f"--gpu-name={target}", str(file), "-o", str(file.with_suffix(".cubin"))]
        run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"ptxas refused the kernel for {arch} ({target}): {(run.stdout + run.stderr).strip()}")
    return run.stdout + run.stderr


def _amd(compiled) -> Facts:
    code = compiled.asm["amdgcn"]
    numbers = {name: int(re.search(rf"\.{name}:\s+(\d+)", code)[1]) for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")}
    return Facts(numbers["vgpr_count"], 4 * (numbers["vgpr_spill_count"] + numbers["sgpr_spill_count"]), compiled.metadata.shared, 0, 0, code)
