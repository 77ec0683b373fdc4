"""Attention by segments in the place of the layers' own core attention."""

from __future__ import annotations

from megarl.options.shared_prefixes import attention_choice
from megarl.options.shared_prefixes.segment_attention import SegmentAttention, segment_attention
from megarl.options.shared_prefixes.segment_check import check_kernels

NAME, MODULE = attention_choice.NAME, SegmentAttention
attention_of, check = segment_attention, check_kernels
