"""Attention to a window and to compressed keys, between hyper-connections (DeepSeek-V4): layers, order, the family."""
