"""Retrieval, copying and continuation at chosen lengths: `python -m experiments.probes RUN`."""
