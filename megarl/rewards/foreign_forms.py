"""Reward functions as other trainers call them, told from megarl's own by the names of their parameters.

verl: `compute_score(data_source, solution_str, ground_truth, extra_info)`, one response per call, and its batch form with the
plural names. TRL: `f(prompts, completions, **columns)`. OpenRLHF: `reward_func(queries, prompts, labels)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.data.rows import find_value
from megarl.data.sample import Sample

Foreign = Callable[[Callable[..., Any], Sequence[Sample], "RowKeys", Mapping[str, Any]], Any]
"""Calls a function for samples with further arguments: a list of answers or what can be awaited for one, or either at once."""


@dataclass(frozen=True)
class RowKeys:
    """The keys of a row's prompt and gold answer: `data.prompt_key` and `data.answer_key`."""

    prompt: str = "prompt"
    answer: str = "answer"


def foreign_form(function: Callable[..., Any]) -> Foreign | None:
    """The form in which `function` is called if it has another trainer's parameters; None if it has megarl's own."""
    names = _parameters(function)
    return next((call for needed, call in _FORMS.items() if needed <= names.keys()), None)


def asks_apart(form: Foreign) -> bool:
    """Return whether each call is about one response."""
    return form is _verl


def columns_missing(function: Callable[..., Any], row: Mapping[str, Any], keys: RowKeys, args: Mapping[str, Any]) -> list[str]:
    """The keys that `row` lacks and that the function, of another trainer, has parameters without a default for."""
    form, parameters = foreign_form(function), _signature(function)
    needed = [name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    if form is _trl:
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        given = {"prompts", "completions", "completion_ids", *args}
        return [name for name in needed if parameters[name].kind not in kinds and name not in given and name not in row]
    truths = {"ground_truth", "ground_truths"} & {*needed} if form in (_verl, _verl_batch) else set()
    return [keys.answer] if truths - args.keys() and find_value(row, keys.answer) is None else []


def numbers_of(answer: Any) -> Any:
    """The rewards in what another trainer takes beside numbers: verl's `{"score": …}`, OpenRLHF's `{"rewards": …}`."""
    if isinstance(answer, Mapping):
        return next((answer[key] for key in ("rewards", "score", "scores") if key in answer), answer)
    if isinstance(answer, list | tuple):
        return [numbers_of(entry) for entry in answer]
    return answer


def _verl(function: Callable[..., Any], samples: Sequence[Sample], keys: RowKeys, args: Mapping[str, Any]) -> Any:
    return [
        function(
            **_taken(
                function,
                data_source=sample.row.get("data_source"),
                solution_str=sample.response_text,
                ground_truth=find_value(sample.row, keys.answer),
                extra_info=sample.row.get("extra_info"),
            ),
            **args,
        )
        for sample in samples
    ]


def _verl_batch(function: Callable[..., Any], samples: Sequence[Sample], keys: RowKeys, args: Mapping[str, Any]) -> Any:
    columns = {
        "data_sources": [sample.row.get("data_source") for sample in samples],
        "solution_strs": [sample.response_text for sample in samples],
        "ground_truths": [find_value(sample.row, keys.answer) for sample in samples],
        "extra_infos": [sample.row.get("extra_info") for sample in samples],
    }
    return function(**_taken(function, **columns), **args)


def _trl(function: Callable[..., Any], samples: Sequence[Sample], keys: RowKeys, args: Mapping[str, Any]) -> Any:
    prompts = [find_value(sample.row, keys.prompt) for sample in samples]
    completions = [
        [{"role": "assistant", "content": sample.response_text}] if isinstance(prompt, list) else sample.response_text
        for prompt, sample in zip(prompts, samples, strict=True)
    ]
    names = {name: None for sample in samples for name in sample.row if name not in ("prompt", "prompts", "completions")}
    columns = {name: [sample.row.get(name) for sample in samples] for name in names if name not in args}
    ids = [sample.response_ids for sample in samples]
    return function(
        **_taken(function, **{"completion_ids": ids, **columns, "prompts": prompts, "completions": completions}), **args
    )


def _openrlhf(function: Callable[..., Any], samples: Sequence[Sample], keys: RowKeys, args: Mapping[str, Any]) -> Any:
    return function(
        queries=[sample.prompt_text + sample.response_text for sample in samples],
        prompts=[sample.prompt_text for sample in samples],
        labels=[find_value(sample.row, keys.answer) for sample in samples],
        **args,
    )


_FORMS: dict[frozenset[str], Foreign] = {
    frozenset({"solution_str", "ground_truth"}): _verl,
    frozenset({"solution_strs", "ground_truths"}): _verl_batch,
    frozenset({"queries", "prompts", "labels"}): _openrlhf,
    frozenset({"completions"}): _trl,
}
"""Parameters that only this form has -> how it is called."""


def _taken(function: Callable[..., Any], **columns: Any) -> dict[str, Any]:
    """The `columns` that the function has parameters for; all of them if it takes any."""
    names = _parameters(function)
    takes_any = any(kind is inspect.Parameter.VAR_KEYWORD for kind in names.values())
    return {name: value for name, value in columns.items() if takes_any or name in names}


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: parameter.kind for name, parameter in _signature(function).items()}


def _signature(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:
        return {}
