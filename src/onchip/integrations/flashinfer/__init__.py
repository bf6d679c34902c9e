"""FlashInfer's attention on onchip's kernels, and FlashMLA's two functions: by their names, arguments, shapes and results.

>>> from onchip.integrations import flashinfer
>>> flashinfer.install()            # from now on `import flashinfer` and `import flash_mla` give these
>>> wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace)

LSE is in base 2 and `[tokens, heads]`, for FlashMLA natural and `[batch, heads, len_q]`. A row that sees no key gives 0, and LSE -inf (FlashMLA: +inf).
`plan` may wait for the device, where indices lie on it; `run` does not. What only steers FlashInfer's kernels is accepted and changes nothing: `backend`,
`use_tensor_cores`, `use_fp16_qk_reduction`, `fixed_split_size`, `disable_split_kv`, `enable_pdl`, the workspaces (`workspace_size` is 0).

Refused: kernels from C++ text (`jit_args`), keys in nvfp4 (`kv_cache_sf`), profiles, and what leaves weights out.
Wider than the original: any head dimension, float32, several options at once, a CPU; what pages hold past a sequence's keys is never read, NaN included.
Keys in float8 beside wider queries, and `pos_encoding_mode="ROPE_LLAMA"` over pages, read a copy of the pages that the page table
may name: for CUDA graphs the whole pool's.
"""

from onchip.integrations.flashinfer.functions import *  # noqa: F403
from onchip.integrations.flashinfer.functions import __all__ as _functions
from onchip.integrations.flashinfer.modules import install, installed, uninstall

__all__ = [*_functions, "install", "installed", "uninstall"]
