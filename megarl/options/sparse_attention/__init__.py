"""Attention to the keys that an indexer chooses for each query (DeepSeek-V3.2, GLM-5): layers and families."""
