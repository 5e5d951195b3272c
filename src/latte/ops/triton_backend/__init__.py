"""Latte on a GPU, in Triton. Nothing here imports Triton until a kernel is launched."""
