"""What tokens need of other tokens in global order, on a sharded sequence: neighbours, windows, selected keys.

Called inside a `shard_map` body with this rank's tokens and the sharder; with cp = 1 anywhere. Nothing here holds a
value for every pair of tokens, or the keys of the whole sequence.
"""

from cpjax.sequence.halo import halo, shift

__all__ = ["halo", "shift"]
