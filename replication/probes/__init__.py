"""Retrieval, copying and continuation at chosen lengths: `python -m replication.probes RUN`."""
