"""Latte's models in vLLM: :mod:`latte_vllm.plugin` is the entry point that vLLM calls."""
