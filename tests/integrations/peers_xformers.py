"""xFormers' own test files, unchanged, on onchip's functions.

    python tests/integrations/peers_xformers.py CHECKOUT attention merge [--count 40] [--most 512] [-- pytest's arguments]

CHECKOUT is a work tree of github.com/facebookresearch/xformers whose fmha is its own (before 2026-04-21; mslk's since); its tests need scipy. Its Python
package runs without what is compiled. Each test is of one of its operators: here of one that declares all that onchip's functions take, and calls
that name it come to them. Samples and "cuda" on a CPU as in `peers.py`.
"""

import importlib.util
import sys

import pytest
import torch
from peers import Sampled, main

SUITES = {  # name -> (file, folders whose modules it imports)
    "attention": ("tests/test_mem_eff_attention.py", (".",)),
    "merge": ("tests/test_fmha_merge_attentions.py", (".",)),
}
PAGES = "biases over pages are refused: onchip.paged_attention takes them"
COMPILED = "calls a compiled operator of xFormers"
OPERATORS = "asks which of xFormers' operators is chosen"
NOT_OURS = {  # test -> why a drop-in cannot pass it
    "test_unsupported_cpu": "wants a CPU refused",
    "test_unsupported_stride_lastdim": "wants strides refused that onchip reads",
    "test_unsupported_stride_alignment": "wants strides refused that onchip reads",
    "test_flash_gqa_wrong_strides": "wants strides and one head for a group refused, which onchip reads",
    "test_f16_biasf32": "wants a bias of another dtype refused, which onchip adds",
    "test_f32_biasf16": "wants a bias of another dtype refused, which onchip adds",
    "test_unsupported_dropout_combine_flash_cutlass": OPERATORS,
    "test_dispatch_decoding_bmhk": OPERATORS,
    "test_dispatch_decoding_bmghk": OPERATORS,
    "test_attn_bias_padded": COMPILED,
    "test_dropout_ck": COMPILED,
    "test_dropout_backward_ck": COMPILED,
    "test_paged_attention": PAGES,
    "test_paged_attention_ck": PAGES,
    "test_paged_attention_flash": PAGES,
    "test_paged_attention_flash3": PAGES,
    "test_triton_splitk_rowwise_fp8": "keys in 8 bits are refused",
    "test_fp8_attention": "keys in 8 bits are refused",
    "test_merge_attentions_nobias": COMPILED,
}
MOST = 1 << 22  # weights of all heads of a case, on a CPU


class Xformers(Sampled):
    """onchip in xFormers' place."""

    not_ours, only_gpu = NOT_OURS, {}  # "cuda" is asked of `skipif`s before anything is patched

    def install(self):
        found = importlib.util.find_spec
        with pytest.MonkeyPatch.context() as patch:  # it checks the version of an installed flash-attn
            patch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "flash_attn" else found(name, *rest))
            from xformers.ops import fmha

        from onchip.integrations import xformers

        xformers.install()
        biases = [kind for kind in fmha.flash.FwOp.SUPPORTED_ATTN_BIAS_TYPES if not kind.__name__.startswith("Paged")]
        able = {
            "NAME": "onchip",
            "OPERATOR": True,
            "SUPPORTED_DEVICES": {"cuda" if self.on_gpu else "cpu"},  # where there is a GPU its biases are there
            "SUPPORTED_DTYPES": {torch.float32, torch.half} | ({torch.bfloat16} if self.on_gpu else set()),  # xFormers takes bfloat16 on a GPU alone
            "SUPPORTED_MAX_K": 512,
            "SUPPORTED_ATTN_BIAS_TYPES": [*biases, torch.Tensor, fmha.attn_bias.LowerTriangularMaskWithTensorBias],
            **dict.fromkeys(("SUPPORTS_DROPOUT", "SUPPORTS_CUSTOM_SCALE", "SUPPORTS_DIFFERENT_VALUE_EMBED", "SUPPORTS_OUTPUT_DTYPE"), True),
            **dict.fromkeys(("SUPPORTS_PARTIAL", "SUPPORTS_BMGHK"), True),
            "is_available": classmethod(lambda cls: True),
            "not_supported_reasons": classmethod(fmha.common.AttentionOpBase.not_supported_reasons.__func__),
            "_TEST_BATCH_SIZES": [1, 3],
        }
        fmha.ALL_FW_OPS[:] = [type("FwOp", (fmha.common.AttentionFwOpBase,), able)]
        fmha.ALL_BW_OPS[:] = [type("BwOp", (fmha.common.AttentionBwOpBase,), {**able, "SUPPORTED_ATTN_BIAS_TYPES": biases})]
        for name in xformers.FUNCTIONS:
            for module in (sys.modules["xformers.ops"], fmha):
                if name in vars(module):
                    setattr(module, name, _unnamed(getattr(module, name)))

    def _helpers(self):
        pass

    def _fits(self, names, row) -> bool:
        """On a CPU few rows; a case is one tuple that ends with batch, queries, keys, heads and two dimensions."""
        case = row[0] if len(row) == 1 and type(row[0]) is tuple else ()
        batch, len_q, len_k, heads = case[-6:-2] if len(case) == 10 else (1, 1, 1, 1)
        return self.on_gpu or (batch * len_q * len_k * heads <= MOST and super()._fits(names, row))


def _unnamed(function):
    """The function for callers that name the operator above."""
    return lambda *args, op=None, **keywords: function(*args, **keywords)


if __name__ == "__main__":
    sys.exit(main(SUITES, Xformers, __file__, __doc__, "--noconftest"))
