"""A model folder's chat template, which is a program of whoever made the folder, applied within bounds.

transformers runs it in Jinja's sandbox: it reaches nothing but what it is given. What it raises is one sentence here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from megarl.system.bounded_work import BoundReachedError, bounded

LONGEST_S = 20.0
"""Given to the template for one conversation."""
MOST_BYTES = 1 << 30
"""By which this process may grow meanwhile."""


class TemplateError(Exception):
    """A template that does not render a conversation."""


def render(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    *,
    ask: bool,
    args: Mapping[str, Any] | None = None,
) -> str:
    """`messages` and `tools` under the tokenizer's template; with `ask` up to where the assistant's next turn begins.

    `args`: options of the template, such as `enable_thinking`.

    Raises:
        TemplateError: it refuses them, fails, or takes too long or too much memory.
    """

    def work() -> Any:
        return tokenizer.apply_chat_template(
            list(messages), tools=list(tools) if tools else None, add_generation_prompt=ask, tokenize=False, **(args or {})
        )

    return str(_within_bounds(work))


@lru_cache(maxsize=16)
def variables_of(template: str) -> frozenset[str]:
    """The names that a template reads and does not set itself, in transformers' dialect of Jinja.

    Raises:
        TemplateError: it is no template, or is read for too long.
    """
    from jinja2.meta import find_undeclared_variables
    from transformers.utils.chat_template_utils import _compile_jinja_template

    def work() -> frozenset[str]:
        environment = _compile_jinja_template(template).environment
        return frozenset(find_undeclared_variables(environment.parse(template)) - environment.globals.keys())

    found: frozenset[str] = _within_bounds(work)
    return found


def _within_bounds(work: Callable[[], Any]) -> Any:
    try:
        return bounded(work, time_s=LONGEST_S, more_bytes=MOST_BYTES)
    except BoundReachedError as error:
        raise TemplateError(f"it {error}") from None
    except MemoryError:
        raise TemplateError("it took more memory than there is") from None
    except Exception as error:  # noqa: BLE001 - a program of somebody else may raise anything
        line = (str(error).splitlines() or [""])[0]
        raise TemplateError(f"{line:.300}" if line else type(error).__name__) from None
