"""The counters of a server, in Prometheus' text format at ``/metrics``."""

from __future__ import annotations

from typing import Any

from latte.serve.prefix_cache import StateStore
from latte.serve.state_folder import StateFolder

# In seconds, from a step of a small model to the time for reading a book.
TIMES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Counters:
    """The counters of one server, in a registry of its own."""

    def __init__(self, store: StateStore | None = None, folder: StateFolder | None = None) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        self._requests = Counter(
            "latte_requests", "Requests by endpoint and status", ["endpoint", "status"], **own
        )
        self._prompt = Counter("latte_prompt_tokens", "Tokens of prompts", **own)
        self._reused = Counter(
            "latte_reused_tokens", "Tokens of prompts that a kept state had read", **own
        )
        self._read = Counter(
            "latte_read_tokens", "Tokens read, answers read for their next turn included", **own
        )
        self._written = Counter("latte_written_tokens", "Tokens of answers", **own)
        self._in_use = Gauge("latte_slots_in_use", "Requests that are read or decoded", **own)
        self._waiting = Gauge("latte_requests_waiting", "Requests that wait for a slot", **own)
        self._first = Histogram(
            "latte_time_to_first_token_seconds",
            "From a request to its first token",
            buckets=TIMES,
            **own,
        )
        self._next = Histogram(
            "latte_time_per_token_seconds", "From a token to the next", buckets=TIMES, **own
        )
        if store is not None:
            gauge = Gauge("latte_state_bytes", "Bytes of kept states, in memory", **own)
            gauge.set_function(lambda: store.nbytes)
            gauge = Gauge("latte_states", "Kept states, in memory", **own)
            gauge.set_function(lambda: len(store))
        if folder is not None:
            gauge = Gauge("latte_state_disk_bytes", "Bytes of kept states, on disk", **own)
            gauge.set_function(lambda: folder.nbytes)

    def request(self, endpoint: str, status: int) -> None:
        self._requests.labels(endpoint, str(status)).inc()

    def prompt(self, tokens: int, reused: int) -> None:
        self._prompt.inc(tokens)
        self._reused.inc(reused)

    def read(self, tokens: int) -> None:
        self._read.inc(tokens)

    def wrote(self, seconds: float, *, first: bool) -> None:
        """Count a token, and the time since the token before it or since its request."""
        self._written.inc()
        (self._first if first else self._next).observe(seconds)

    def slots(self, in_use: int, waiting: int) -> None:
        self._in_use.set(in_use)
        self._waiting.set(waiting)

    def text(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest(self.registry)
