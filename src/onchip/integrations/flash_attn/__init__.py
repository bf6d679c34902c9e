"""flash-attn's functions on onchip's kernels: versions 2, 3 and 4, each with its own argument order and its own meanings.

>>> from onchip.integrations.flash_attn import flash_attn_func          # flash-attn 2
>>> from onchip.integrations.flash_attn.fa3 import flash_attn_func      # FlashAttention-3
>>> from onchip.integrations.flash_attn.fa4 import flash_attn_func      # FlashAttention-4

`install()` puts them under the names that other libraries import: `flash_attn`, `flash_attn_interface`, `flash_attn.cute`.

                      2               3                  4
argument 4            dropout_p       softmax_scale      qv
window without limit  -1              -1                 None
window (-1, 0)        causal          causal             full attention
LSE of an empty row   +inf            -inf               -inf, or the sink
results               out             out                (out, LSE or None)
with LSE              (out, LSE, S)   (out, LSE)         (out, LSE)
"""

from onchip.integrations.flash_attn.fa2 import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from onchip.integrations.flash_attn.modules import install, installed, uninstall

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "installed",
    "uninstall",
]
