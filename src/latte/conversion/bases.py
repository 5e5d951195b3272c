"""The decoders that can be converted."""

# By model type, with the prefix of their classes in Transformers.
BASES = {
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}
