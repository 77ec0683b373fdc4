"""What the server imports from which the ranks of tests.world are forked: everything that takes long, and starts no thread."""

import gc

from megarl import platform

platform.install()

import torch._dynamo  # noqa: E402, F401  (the first optimizer of a process imports it: two seconds of each rank)
import transformers  # noqa: E402, F401

import megarl.megatron.rank_model  # noqa: E402, F401
from tests.dispatchers import keep_track  # noqa: E402

keep_track()
gc.collect()
gc.freeze()  # what is shared with the ranks stays shared: their collections leave it alone
