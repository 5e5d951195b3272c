"""Serving a trained model by Transformers' server."""
