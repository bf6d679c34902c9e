"""flash-attention's own test files, unchanged, on onchip's functions.

    python tests/integrations/peers.py CHECKOUT fa2 rotary fa3 fa4 ... [--count 40] [--most 512] [--kernel reference] [-- pytest's arguments]

CHECKOUT is a work tree of github.com/Dao-AILab/flash-attention; its tests need einops. The files define up to 300,000 cases a test, so
each test runs on a sample: `--count` cases in which every value of every parameter comes as often, drawn from `--seed`; `--count 0` is
all of them. hopper/test_flash_attn_bwd_determinism.py and test_attn_kvcache.py are not here: they give arguments that
FlashAttention-3 itself has no longer. Without a GPU "cuda" means the CPU, lengths are at most `--most`, and races are not looked for.
"""

import argparse
import itertools
import os
import random
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

SUITES = {  # name -> (file, folders whose modules it imports)
    "fa2": ("tests/test_flash_attn.py", ()),
    "rotary": ("tests/test_rotary.py", ()),
    "fa3": ("hopper/test_flash_attn.py", ("hopper",)),
    "fa3-compile": ("hopper/test_torch_compile_and_export.py", ("hopper",)),
    "fa4": ("tests/cute/test_flash_attn.py", ()),
    "fa4-fast": ("tests/cute/test_flash_attn_fast.py", ()),
    "fa4-varlen": ("tests/cute/test_flash_attn_varlen.py", ()),
    "fa4-combine": ("tests/cute/test_flash_attn_combine.py", ()),
    "fa4-race": ("tests/cute/test_flash_attn_race_condition.py", ()),
}
NOT_OURS = {  # test -> why a drop-in cannot pass it
    "test_compilation_count": "counts compilations of flash-attn's Triton kernel",
    "test_flash_attn_invalid_head_dim": "wants head dimensions refused that onchip computes",
    "test_splitkv_forwards_explicit_arch": "looks into the cache of CuTe kernels",
    "test_flash_attn_combine_dynamic_splits_and_semaphore": "looks into the cache of CuTe kernels",
    "test_flash_attn_varlen_tensor_max_seqlen_reuses_fwd_cache": "looks into the cache of CuTe kernels",
}
ONLY_GPU = {
    "test_flash_attn_race_condition": "1,000 runs of a batch of 60, beside 70 GiB",
    "test_flash_attn_cluster": "100 runs over 8,192 keys",
    "test_flash_attn_lse_grad_unused": "wants dV's bits the same with a gradient of LSE, with which a CPU leaves torch's kernel",
    "test_compile_and_package_model": "packages a model for a GPU",
    "test_flash_attn_varlen_cumsum_metadata_paths": "600 sequences of 16 heads",
}


class OnCpu(TorchFunctionMode):
    """ "cuda" means "cpu"."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:  # the number of a device
            return args[0]
        return function(*map(_cpu, args), **{key: _cpu(value) for key, value in (kwargs or {}).items()})


def _cpu(value):
    is_cuda = (isinstance(value, str) and value.startswith("cuda")) or (isinstance(value, torch.device) and value.type == "cuda")
    return "cpu" if is_cuda else value


class Sampled:
    """A pytest plugin: onchip in the library's place, and a sample of each test."""

    not_ours, only_gpu = NOT_OURS, ONLY_GPU

    def __init__(self, options):
        self.options, self.on_gpu = options, torch.cuda.is_available()
        self.left_out: dict[str, str] = {}

    def install(self):
        from onchip.integrations import flash_attn

        flash_attn.install()

    def pytest_configure(self):
        self.install()
        if not self.on_gpu:
            properties = SimpleNamespace(total_memory=80 << 30, multi_processor_count=132, major=9, minor=0, name="a CPU", gcnArchName="")
            stubs = {"get_device_capability": (9, 0), "get_device_properties": properties, "synchronize": None, "empty_cache": None, "current_device": 0}
            for name, value in stubs.items():
                setattr(torch.cuda, name, lambda *_, value=value, **__: value)
            OnCpu().__enter__()
        self._helpers()
        if self.options.kernel:
            _force(self.options.kernel)

    def _helpers(self):
        """What the tests of version 4 import from its package: its reference, and the cache of compiled kernels."""
        import importlib.util

        cache = types.ModuleType("flash_attn.cute.cache_utils")
        cache.JITCache = type("JITCache", (), {"__init__": lambda self: setattr(self, "cache", {}), "clear": lambda self: self.cache.clear()})
        sys.modules[cache.__name__] = cache
        spec = importlib.util.spec_from_file_location("flash_attn.cute.testing", self.options.checkout / "flash_attn/cute/testing.py")
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc):
        """One parametrization by a sample, in place of the product of all of them."""
        markers = [m for m in metafunc.definition.own_markers if m.name == "parametrize"]
        if not markers:
            return
        metafunc.definition.own_markers[:] = [m for m in metafunc.definition.own_markers if m.name != "parametrize"]
        names, axes = [], []
        for marker in markers:
            these = [n.strip() for n in marker.args[0].split(",")] if isinstance(marker.args[0], str) else list(marker.args[0])
            names += these
            values = marker.args[1] if len(marker.args) > 1 else marker.kwargs["argvalues"]
            values = [v.values if isinstance(v, type(pytest.param())) else v if len(these) > 1 else (v,) for v in values]
            axes.append(self._kept(these, values))
        rows = self._sample(metafunc.function.__name__, axes)
        flat = [tuple(itertools.chain(*row)) for row in rows]
        metafunc.parametrize(names, flat, ids=["-".join(str(v).removeprefix("torch.") for v in row) for row in flat])

    def _kept(self, names: list[str], rows: list[tuple]) -> list[tuple]:
        """The values of a parametrization that fit this machine."""
        return [row for row in rows if self._fits(names, row)]

    def _fits(self, names, row) -> bool:
        lengths = [v for n, v in zip(names, row, strict=True) if "seq" in n and isinstance(v, int) and not isinstance(v, bool)]
        return self.on_gpu or max(lengths, default=0) <= self.options.most

    def _sample(self, test: str, axes: list[list]) -> list[tuple]:
        count, dice = self.options.count, random.Random(f"{self.options.seed} {test}")
        product = 1
        for axis in axes:
            product *= len(axis)
        if not count or product <= count:
            return list(itertools.product(*axes))
        columns = []
        for axis in axes:
            column = (axis * -(-count // len(axis)))[:count] if len(axis) <= count else dice.sample(axis, count)
            dice.shuffle(column)
            columns.append(column)
        return list(zip(*columns, strict=True))

    def pytest_collection_modifyitems(self, items):
        reasons = self.not_ours | ({} if self.on_gpu else self.only_gpu)
        self.left_out = {item.originalname: reasons[item.originalname] for item in items if item.originalname in reasons}
        items[:] = [item for item in items if item.originalname not in reasons]

    def pytest_terminal_summary(self, terminalreporter):
        for test, why in self.left_out.items():
            terminalreporter.write_line(f"left out: {test}: {why}")


def _force(kernel: str) -> None:
    """Every call of attention that leaves the kernel open takes `kernel`."""
    from onchip import dispatch

    choose = dispatch._select

    def select(problem, device, name):
        has_it = any(k.name == kernel for k in dispatch.OPS[problem.op].kernels)
        return choose(problem, device, kernel if name == "auto" and has_it else name)

    dispatch._select = select


def main(suites: dict[str, tuple[str, tuple[str, ...]]], plugin: type[Sampled], script: str, description: str, *arguments: str) -> int:
    """Run `suites`; `arguments` are pytest's."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("suites", nargs="+", choices=suites)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--most", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernel")
    ours, _, theirs = (sys.argv[1:], 0, []) if "--" not in sys.argv else (sys.argv[1 : sys.argv.index("--")], 0, sys.argv[sys.argv.index("--") + 1 :])
    options = parser.parse_args(ours)
    options.checkout = options.checkout.resolve()
    if len(options.suites) > 1:  # the suites have modules of the same names: each in a process of its own
        rest = [*(f"--{key}={getattr(options, key)}" for key in ("count", "most", "seed")), *([f"--kernel={options.kernel}"] if options.kernel else [])]
        tail = ["--", *theirs] if theirs else []
        codes = [subprocess.run([sys.executable, script, str(options.checkout), suite, *rest, *tail], check=False).returncode for suite in options.suites]
        return max(codes)
    file, folders = suites[options.suites[0]]
    sys.path[:0] = [str(options.checkout / folder) for folder in folders]
    os.chdir(options.checkout)
    arguments = [*arguments, "-q", "-p", "no:cacheprovider", "-o", "addopts=", f"--rootdir={options.checkout}", "--import-mode=importlib", "-W", "ignore", file]
    return pytest.main([*arguments, *theirs], plugins=[plugin(options)])


if __name__ == "__main__":
    sys.exit(main(SUITES, Sampled, __file__, __doc__))
