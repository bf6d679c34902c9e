"""FlashInfer's own test files, unchanged, on onchip's functions.

    python tests/integrations/peers_flashinfer.py CHECKOUT decode prefill mla ... [--count 40] [--most 512] [-- pytest's arguments]

CHECKOUT is a work tree of github.com/flashinfer-ai/flashinfer. What its tests ask of FlashInfer's compiler is answered with nothing, their conftest, which
compiles, is not loaded. Samples and "cuda" on a CPU as in `peers.py`. Files for Blackwell alone, and for keys in four bits, are not here.
"""

import importlib.util
import sys
import types

import torch
from peers import Sampled, main

TESTS = "tests/attention/test_"
SUITES = {  # name -> (file, folders whose modules it imports)
    "alibi": (f"{TESTS}alibi.py", (".",)),
    "attention": (f"{TESTS}batch_attention.py", (".",)),
    "calibration": (f"{TESTS}decode_fp8_calibration_scale.py", (".",)),
    "cap": (f"{TESTS}logits_cap.py", (".",)),
    "decode": (f"{TESTS}batch_decode_kernels.py", (".",)),
    "fp8": (f"{TESTS}fp8_prefill.py", (".",)),
    "hopper": (f"{TESTS}hopper.py", (".",)),
    "hopper-fp8": (f"{TESTS}hopper_fp8_attention.py", (".",)),
    "hopper-fp8-window": (f"{TESTS}hopper_fp8_sliding_window.py", (".",)),
    "invariant": (f"{TESTS}batch_invariant_fa2.py", (".",)),
    "lse": (f"{TESTS}decode_prefill_lse.py", (".",)),
    "mla": (f"{TESTS}deepseek_mla.py", (".",)),
    "mla-page": (f"{TESTS}mla_page.py", (".",)),
    "page": (f"{TESTS}page.py", (".",)),
    "prefill": (f"{TESTS}batch_prefill_kernels.py", (".",)),
    "prefill-small": (f"{TESTS}batch_prefill.py", (".",)),
    "rope": (f"{TESTS}rope.py", (".",)),
    "shared-prefix": (f"{TESTS}shared_prefix_kernels.py", (".",)),
    "single": (f"{TESTS}single_prefill.py", (".",)),
    "strided-decode": (f"{TESTS}non_contiguous_decode.py", (".",)),
    "strided-prefill": (f"{TESTS}non_contiguous_prefill.py", (".",)),
    "tensor-cores": (f"{TESTS}tensor_cores_decode.py", (".",)),
    "window": (f"{TESTS}sliding_window.py", (".",)),
    "workspace": (f"{TESTS}workspace_size.py", (".",)),
    "activation": ("tests/utils/test_activation.py", (".",)),
    "norm": ("tests/utils/test_norm.py", (".",)),
    "quantization": ("tests/utils/test_quantization.py", (".",)),
}
MOST = {"batch_size": 17, "num_heads": 16, "num_qo_heads": 16, "head_dim": 128, "seed": 1 << 62}  # of a parameter whose name has the word, on a CPU
FOUR_BITS = "keys in nvfp4 are refused"
ROTATION = "rotation that quantises is not here"
NOT_OURS = {
    "test_single_decode_torch_compile_cuda_graph": "runs an installed FlashInfer in a process of its own",
    "test_fp8_kv_plan_rejects_fp16_q": "wants a pair of dtypes refused that onchip computes",
    "test_block_sparse_attention": "BlockSparseAttentionWrapper is not here",
    "test_generalized_rope_quantize": ROTATION,
    "test_generalized_rope_quantize_append_kv_cache": ROTATION,
    "test_mla_rope_quantize": ROTATION,
    "test_norm_compilation_without_fp8": "compiles FlashInfer",
    "test_rope_quantize_fp8_append_paged_kv_cache_decode": ROTATION,
    "test_rope_quantize_fp8_append_paged_kv_cache_padding": ROTATION,
    "test_rope_quantize_fp8_cutile_rejects_unsupported": ROTATION,
    "test_tensor_core_decode_rejects_mismatched_q_len": "wants several queries refused without use_tensor_cores, which onchip computes",
}
ONLY_GPU = {"test_merge_state_in_place_with_mask": "draws from a GPU's generator"}


class Flashinfer(Sampled):
    """onchip in FlashInfer's place."""

    not_ours, only_gpu = NOT_OURS, ONLY_GPU

    def install(self):
        from onchip.integrations import flashinfer

        flashinfer.install()

    def _helpers(self):
        """What the tests ask of FlashInfer's compiler, and of its keys in four bits."""
        for name in ("fp4_quantization", "gemm", "jit", "jit.attention", "jit.attention.variants", "jit.core", "jit.env", "jit.utils"):
            _stub(f"flashinfer.{name}")
        _stub("flashinfer.quantization.nvfp4_quantization_utils")
        if importlib.util.find_spec("scipy") is None:  # only tests of block-sparse matrices use it
            _stub("scipy"), _stub("scipy.sparse")
        sys.modules["flashinfer.quantization"].__path__ = []
        compiled = {"has_flashinfer_jit_cache": True, "is_fa3_backend_supported": True, "is_fa3_prefill_head_dim_supported": True}
        for name, value in compiled.items():
            setattr(sys.modules["flashinfer.utils"], name, lambda *_, value=value, **__: value)
        if not self.on_gpu:
            sys.modules["flashinfer.utils"].get_compute_capability = lambda _: (9, 0)
            sys.modules["flashinfer.utils"].is_sm90a_supported = lambda _: True

    def _kept(self, names, rows):
        kept = super()._kept(names, rows)
        return kept or [row for row in rows if True not in row][:1]  # the first where all are too large

    def _fits(self, names, row) -> bool:
        """On a CPU no CUDA graphs, and few and short sequences of few and narrow heads."""
        sizes = [(v, next((most for word, most in MOST.items() if word in n), self.options.most)) for n, v in zip(names, row, strict=True) if type(v) is int]
        graphs = any(v is True for n, v in zip(names, row, strict=True) if "cuda_graph" in n)
        return self.on_gpu or (all(value <= most for value, most in sizes) and not graphs)

    def pytest_collection_modifyitems(self, items):
        for item in items:
            if "fp4" in item.originalname:
                self.not_ours[item.originalname] = FOUR_BITS
            if item.originalname.startswith("test_layernorm") or item.originalname.endswith("_quant") or "norm_quant" in item.originalname:
                self.not_ours[item.originalname] = "LayerNorm, and norms that quantise, are not here"
            if item.originalname.endswith(("_overflow", "int64_stride")):
                self.only_gpu[item.originalname] = "tensors of more than 2 GiB"
            if "cuda_graph" in item.originalname:
                self.only_gpu[item.originalname] = "captures a CUDA graph"
        super().pytest_collection_modifyitems(items)


class _Stub(types.ModuleType):
    """A module whose every name is a function that does nothing, or a class."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {}) if name[0].isupper() else lambda *_, **__: None


def _stub(name: str) -> None:
    sys.modules[name] = _Stub(name)
    sys.modules[name].__path__ = []
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, sys.modules[name])


if __name__ == "__main__":
    torch.set_num_threads(2)
    sys.exit(main(SUITES, Flashinfer, __file__, __doc__, "--noconftest"))
