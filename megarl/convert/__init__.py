"""Conversion between Hugging Face folders and megatron-core checkpoints, block by block, resumable and verified."""
