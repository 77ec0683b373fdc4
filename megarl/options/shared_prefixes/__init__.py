"""Prefixes shared by layers whose own attention cannot: attention by segments, fused kernels (`policy.share_prefix`)."""
