"""Sequence sharding for context parallelism: layouts, the sharder, and the padded batch.

Imports jax and numpy only.

>>> layout = Zigzag(cp=2)
>>> layout.indices(8, rank=1)
array([2, 3, 4, 5], dtype=int32)
"""

from cpjax.shard.batch import IGNORE, Stream, make_batch
from cpjax.shard.convert import convert
from cpjax.shard.dispatch import Balance, SliceKind, dispatch
from cpjax.shard.layout import Contiguous, Dispatched, Identity, Layout, Packed, Striped, Zigzag, layout_from_name
from cpjax.shard.packing import pack
from cpjax.shard.sharder import Sharder, make_sharder

__all__ = [
    "IGNORE", "Balance", "Contiguous", "Dispatched", "Identity", "Layout", "Packed", "Sharder", "SliceKind", "Stream",
    "Striped", "Zigzag", "convert", "dispatch", "layout_from_name", "make_batch", "make_sharder", "pack",
]  # fmt: skip
