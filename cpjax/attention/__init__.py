"""Attention over a sequence that is split across ranks."""

from cpjax.attention.api import attention
from cpjax.attention.cached import cached_attention
from cpjax.attention.mask import Mask
from cpjax.attention.plan import Plan, plan_transport
from cpjax.attention.reference import dense_attention

__all__ = ["Mask", "Plan", "attention", "cached_attention", "dense_attention", "plan_transport"]
