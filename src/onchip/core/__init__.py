"""The nouns: plain Python and torch, no kernels."""
