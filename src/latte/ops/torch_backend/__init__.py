"""Chunked, linear-time kernels in plain PyTorch, with closed-form backward passes."""
