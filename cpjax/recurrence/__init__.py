"""Recurrences over a sharded sequence: causal convolution, gated delta rule and Mamba2.

Called inside a `shard_map` body with this rank's tokens and the sharder. Ranks exchange only the tokens around the
edges of their runs and one state per run; full sequences are never gathered.
"""

from cpjax.recurrence.conv import causal_conv
from cpjax.recurrence.delta import continue_gated_delta_rule, gated_delta_rule
from cpjax.recurrence.ssd import ssd

__all__ = ["causal_conv", "continue_gated_delta_rule", "gated_delta_rule", "ssd"]
