"""Runs a trained model in another project's engine: Transformers' server, or vLLM."""
