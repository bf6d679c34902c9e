"""FlashMLA's own tests of its decoding, unchanged, on onchip's functions.

    python tests/integrations/peers_flash_mla.py CHECKOUT dense sparse [--count 40] [--most 512] [--seed 0]

CHECKOUT is a work tree of github.com/deepseek-ai/FlashMLA. Its tests are scripts that go through lists of cases: of each a sample is run, `--count 0` all
of them. Those for speed are left out, and without a GPU, where "cuda" is the CPU, what has more than `--most` keys or a batch above 8 becomes smaller.
"""

import argparse
import dataclasses
import importlib
import random
import sys
from pathlib import Path

import torch
from peers import OnCpu

SUITES = {"dense": "test_flash_mla_dense_decoding", "sparse": "test_flash_mla_sparse_decoding"}
BATCH = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("suites", nargs="+", choices=SUITES)
    for name, value in (("count", 40), ("most", 512), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    from onchip.integrations import flashinfer

    flashinfer.install()
    sys.path.insert(0, str(options.checkout / "tests"))
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        for name, value in {"get_device_capability": (9, 0), "set_device": None, "synchronize": None, "empty_cache": None}.items():
            setattr(torch.cuda, name, lambda *_, value=value: value)
        OnCpu().__enter__()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda" if on_gpu else "cpu")
    failed = 0
    for suite in options.suites:
        module = importlib.import_module(SUITES[suite])
        found = _cases(suite, module)
        found = found if on_gpu else list(dict.fromkeys(map(_Small(options.most), found)))
        cases = random.Random(options.seed).sample(found, min(options.count or len(found), len(found)))
        wrong = [case for case in cases if not _right(module, _whole(suite, module, case))]
        failed += len(wrong)
        print(f"{suite}: {len(cases) - len(wrong)} of {len(cases)} right", *wrong, sep="\n  ")
    sys.exit(failed > 0)


def _cases(suite: str, module) -> list[tuple]:
    """Of each case its fields, but for those that are timed."""
    if suite == "sparse":
        found = [case for case in module.gen_testcase() if not case.num_runs]
    else:  # its list is made where it is run
        found, run = [], module.test_flash_mla
        module.test_flash_mla = found.append
        module.main(torch.bfloat16)
        module.test_flash_mla = run
        found = [case for case in found if not case.test_performance]
    return [tuple(dataclasses.asdict(case).items()) for case in found]


class _Small:
    """A case that a CPU computes in a second."""

    def __init__(self, most: int):
        self.bounds = {"b": BATCH} | dict.fromkeys(("s_k", "s_kv", "extra_s_k", "topk", "extra_topk"), most)

    def __call__(self, case: tuple) -> tuple:
        return tuple((name, min(value, self.bounds[name]) if name in self.bounds and value is not None else value) for name, value in case)


def _whole(suite: str, module, case: tuple):
    return module.RawTestParam(**dict(case)).to_test_param() if suite == "sparse" else module.TestParam(**dict(case))


def _right(module, case) -> bool:
    try:
        result = module.test_flash_mla(case)
    except AssertionError:
        return False
    return result is None or result.is_correct


if __name__ == "__main__":
    main()
