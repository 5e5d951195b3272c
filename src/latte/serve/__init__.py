"""Serving a trained model by another project's engine: Transformers' server, or vLLM."""
