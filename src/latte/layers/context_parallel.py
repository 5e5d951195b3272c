"""Context parallelism: an op on the tokens of one process, where others hold the earlier ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol


class ShardedOps(Protocol):
    """Runs an op on this process's tokens, which follow the tokens of the processes before it."""

    def run(self, op: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Any, Any]:
        """Output and final state of the op, whose ``initial_state`` comes from elsewhere."""


def across(op: Callable[..., Any], shards: ShardedOps) -> Callable[..., Any]:
    """The op across shards (:mod:`latte.parallel`)."""
    return functools.partial(shards.run, op)
