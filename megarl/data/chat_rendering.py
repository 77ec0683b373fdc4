"""A model folder's chat template, which is a program of whoever made the folder, applied within bounds.

transformers runs it in Jinja's sandbox: it reaches nothing but what it is given. What it raises is one sentence here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megarl.system.bounded_work import BoundReachedError, bounded

LONGEST_S = 20.0
"""Given to the template for one conversation."""
MOST_BYTES = 1 << 30
"""By which this process may grow meanwhile."""


class TemplateError(Exception):
    """A template that does not render a conversation."""


class EndlessTemplateError(TemplateError):
    """A template that took too long, or too much memory, so that it is not tried again in another way."""


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


@dataclass(frozen=True)
class TemplateNames:
    """The names of a template: `read` are those that it reads and that its caller may give; `options` those among them that it
    does not set itself, or sets only where the caller has not."""

    read: frozenset[str]
    options: frozenset[str]


@lru_cache(maxsize=16)
def names_of(template: str) -> TemplateNames:
    """The names in a template's tree, in transformers' dialect of Jinja.

    Raises:
        TemplateError: it is no template, or is read for too long.
    """
    from jinja2 import meta, nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    def work() -> TemplateNames:
        environment = _compile_jinja_template(template).environment
        tree = environment.parse(template)
        read = frozenset(meta.find_undeclared_variables(tree) - environment.globals.keys())
        # a name that is set in one branch alone counts as read, though nothing that a caller gives may reach it
        is_set = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
        asked: list[Any] = [test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")]
        asked += [given.node for given in tree.find_all(nodes.Filter) if given.name in ("default", "d")]
        return TemplateNames(read, read - (is_set - {node.name for node in asked if isinstance(node, nodes.Name)}))

    found: TemplateNames = _within_bounds(work)
    return found


def _within_bounds(work: Callable[[], Any]) -> Any:
    try:
        return bounded(work, time_s=LONGEST_S, more_bytes=MOST_BYTES)
    except BoundReachedError as error:
        raise EndlessTemplateError(f"it {error}") from None
    except MemoryError:
        raise EndlessTemplateError("it took more memory than there is") from None
    except Exception as error:  # noqa: BLE001 - a program of somebody else may raise anything
        line = (str(error).splitlines() or [""])[0]
        raise TemplateError(f"{line:.300}" if line else type(error).__name__) from None
