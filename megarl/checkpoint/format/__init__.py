"""The `torch_dist` format on disk: names, headers and bytes of megatron-core's checkpoints, for runs and for conversion."""
