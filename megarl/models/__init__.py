"""Architectures: Hugging Face config to Megatron arguments, and the one weight map; no megatron, no torch.distributed."""
