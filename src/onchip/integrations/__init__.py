"""Other libraries' functions on onchip's kernels: `from onchip.integrations import flash_attn, sdpa, ...`; each has `install()` and its undo.

Importing one loads no library but torch.
"""
