"""megarl: reinforcement learning of large language models on megatron-core, SGLang and Ray.

Importing the package imports neither torch nor any of the three; each room imports what it needs.
"""

__version__ = "0.2.0"
