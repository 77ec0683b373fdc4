"""The tiny model of the engines' tests."""

from tests.rollout.conftest import _one_thread, tiny_path

__all__ = ["_one_thread", "tiny_path"]
