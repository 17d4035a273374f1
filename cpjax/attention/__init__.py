"""Attention over a sequence that is split across ranks."""

from cpjax.attention.api import attention
from cpjax.attention.mask import Mask
from cpjax.attention.reference import dense_attention

__all__ = ["Mask", "attention", "dense_attention"]
