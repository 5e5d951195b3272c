"""A trained model behind somebody else's engine: Transformers' server, and vLLM."""
