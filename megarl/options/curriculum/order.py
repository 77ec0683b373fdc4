"""The order of training rows, where `data.curriculum` says one."""

from __future__ import annotations

from functools import partial

from megarl.config.section import Section
from megarl.data.sampler import OrderOf
from megarl.options.curriculum.curriculum import Curriculum
from megarl.options.curriculum.section import curriculum_of


def row_order(data: Section) -> OrderOf:
    """The order that `data.curriculum` describes."""
    return partial(Curriculum, curriculum_of(data))
