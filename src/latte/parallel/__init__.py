"""One sequence over several processes, exactly: each holds a part of its tokens.

with context_parallel(model, group):
    loss = model(**shard_batch(batch, group)).loss
    loss.backward()
"""

from latte.parallel.batch import shard_batch
from latte.parallel.context import context_parallel

__all__ = ["context_parallel", "shard_batch"]
