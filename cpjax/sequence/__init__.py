"""What tokens need of other tokens in global order, on a sharded sequence: neighbours, windows, selected keys.

Called inside a `shard_map` body with this rank's tokens and the sharder; with cp = 1 anywhere. Nothing here holds a
value for every pair of tokens, or the features of the whole sequence.
"""

from cpjax.sequence.attend import attend_blocks
from cpjax.sequence.halo import halo, shift
from cpjax.sequence.pools import Windows, pool, windows
from cpjax.sequence.select import take_keys, top_k_blocks, top_k_keys

__all__ = ["Windows", "attend_blocks", "halo", "pool", "shift", "take_keys", "top_k_blocks", "top_k_keys", "windows"]
