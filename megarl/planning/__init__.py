"""Needs of a run before anything is started: memory per rank, seconds per phase, and which layouts would do.

Pure functions of the config, the models' `config.json` and a table of GPUs; neither torch.distributed nor megatron is asked.
"""
