"""The search for layouts: all that the sizes allow are planned, those that fit are ranked by the time of a step.

All roles with layouts of their own take the layout that is tried, the engines the GPUs that there are for them. What is
recomputed and sizes of engines are tried of each layout, virtual stages and micro-batches of the best ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import log2
from typing import Any

from megarl.config import AnyConfig, parse_any
from megarl.config.layout import Layout
from megarl.errors import ConfigError, LayoutError
from megarl.models.check_layouts import check_models
from megarl.models.shape import ModelShape
from megarl.planning.choices import (
    RECOMPUTED,
    SIZES,
    Choice,
    engine_sizes,
    layouts,
    own_choice,
    powers,
    splits,
    token_sizes,
    with_chunks,
    with_stages,
)
from megarl.planning.memory import plan_memory
from megarl.planning.optimizer_bytes import state_bytes
from megarl.planning.parameters import stage_parameters
from megarl.planning.plan import CapacityPlan, make_plan
from megarl.planning.roles import role_shape, run_shape
from megarl.planning.times import TimePlan
from megarl.weights.run_plan import ITEMSIZE

MORE = 8
"""Times as many GPUs at most, where nothing fits on those that the user has."""
MOST_GPUS = 16_384
"""GPUs at most, where the user has not said how many there are."""
SHOWN = 10
"""Layouts of a search that are shown, and whose seconds have the weight update in them."""
REFINED = 48
"""Number of the best layouts that are tried with virtual stages and other micro-batches."""


@dataclass(frozen=True)
class Ranked:
    """A layout that fits, in the best of the ways in which it was tried."""

    choice: Choice
    overrides: tuple[str, ...]
    plan: CapacityPlan
    times: TimePlan

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, the weight update in it."""
        return self.times.step_seconds


@dataclass(frozen=True)
class Refusals:
    """Layouts that cannot be, or fit in none of the ways in which they were tried: how many by reason, and one of them."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, layout: Layout) -> None:
        """One more."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.examples.setdefault(reason, stated(layout))

    @property
    def most(self) -> str:
        """The reason that most were refused for, and one of these."""
        if not self.counts:
            return "nothing can be tried"
        reason = max(self.counts, key=lambda reason: self.counts[reason])
        return f"{reason} (so {self.examples[reason]})"


@dataclass(frozen=True)
class Found:
    """What a search has found: the `best` layouts, fastest first, how many fit, and why others were refused.

    `own`: the config itself, whether or not it fits, and its `place` among the layouts that fit (0: it does not).
    """

    best: tuple[Ranked, ...]
    fitting: int
    refused: Refusals
    own: Ranked
    place: int

    @property
    def tried(self) -> int:
        """Number of layouts."""
        return self.fitting + sum(self.refused.counts.values())


@dataclass(frozen=True)
class _Candidate:
    choice: Choice
    config: AnyConfig
    plan: CapacityPlan
    seconds: float
    """Seconds of a step without the weight update, whose plan takes long to make."""


def stated(layout: Layout) -> str:
    """A layout in few words."""
    sizes = {name: getattr(layout, name) or 1 for name in SIZES}
    text = ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "dp=1"
    ends = (layout.first_stage_layers, layout.last_stage_layers)
    return text + (f",first={ends[0]},last={ends[1]}" if any(ends) else "")


class Search:
    """Plans the choices of one config on GPUs of one kind; `plan` is that of the config itself."""

    def __init__(self, config: AnyConfig, plan: CapacityPlan) -> None:
        self.config, self.plan = config, plan
        self.gpu, self.lengths, self.calibration = plan.gpu, plan.lengths, plan.calibration
        self.layers = ModelShape.read(config.model.path).layers

    def ranked(self) -> Found:
        """All layouts on the GPUs that there are, the best of them refined and with their weight updates."""
        gpus = self.plan.available
        candidates, refused = self.candidates(gpus)
        for index, one in enumerate(candidates[:REFINED]):
            candidates[index] = self._refined(one, gpus)
        candidates.sort(key=lambda one: one.seconds)
        best: list[Ranked] = []
        for one in candidates:
            # a step is no shorter than without its weight update, and the candidates come by that
            if len(best) >= SHOWN and one.seconds >= sorted(entry.step_seconds for entry in best)[SHOWN - 1]:
                break
            if (entry := self._priced(one, gpus)) is not None:
                best.append(entry)
        best.sort(key=lambda entry: entry.step_seconds)
        current = Ranked(own_choice(self.config), (), self.plan, self.plan.times)
        return Found(tuple(best[:SHOWN]), len(candidates), refused, current, self._place(current, best, candidates))

    def candidates(self, gpus: int) -> tuple[list[_Candidate], Refusals]:
        """The best of each layout that fits, with its engines, fastest first without weight updates; and the others."""
        candidates, refused = [], Refusals()
        for ranks, engine_gpus in splits(self.config, gpus):
            for layout in layouts(self.config, ranks):
                try:
                    best = self._best_of(layout, engine_gpus, gpus)
                except (ConfigError, LayoutError) as error:
                    refused.add(error.kind, layout)
                    continue
                if isinstance(best, str):
                    refused.add(best, layout)
                else:
                    candidates.append(best)
        return sorted(candidates, key=lambda one: one.seconds), refused

    def _best_of(self, layout: Layout, engine_gpus: int, gpus: int) -> _Candidate | str:
        """The layout with the sizes of engines that are fastest, and as little recomputed as fits; or why none fits."""
        staged = with_stages(layout, self.layers) or layout
        if self._least_bytes(staged) > self.gpu.usable_bytes:
            return "a GPU is too small for the policy's parameters and gradients alone"
        sizes = engine_sizes(self.config, engine_gpus)
        if not sizes:
            return "there are no GPUs for engines"
        first = Choice(staged, self.config.model.recompute, self.config.policy.max_tokens_per_micro_batch, *sizes[0])
        checked = _checked(self.config, first)
        best: _Candidate | None = None
        why: str | ConfigError | LayoutError = ""
        for recompute in RECOMPUTED:
            if not self._trainer_fits(_changed(checked, replace(first, recompute=recompute))):
                why = f"a GPU is too small for the trainer alone, recompute {recompute}"
                continue
            for engine_tp, engines, arguments in sizes:
                choice = replace(first, recompute=recompute, engine_tp=engine_tp, engines=engines, engine_args=arguments)
                tried = self._planned(checked, choice, gpus)
                if isinstance(tried, _Candidate):
                    best = min(best or tried, tried, key=lambda one: one.seconds)
                else:
                    why = tried
            if best is not None:
                return best
        if isinstance(why, str):
            return why
        raise why

    def _planned(self, checked: AnyConfig, choice: Choice, gpus: int) -> _Candidate | str | ConfigError | LayoutError:
        """A choice, planned; or why it cannot be or does not fit."""
        config = _changed(checked, choice)
        try:
            plan = make_plan(config, self.gpu, available=gpus, lengths=self.lengths, calibration=self.calibration)
        except (ConfigError, LayoutError) as error:
            return error
        return _Candidate(choice, config, plan, plan.times_without_sync) if plan.fits else _over(plan)

    def _refined(self, one: _Candidate, gpus: int) -> _Candidate:
        """The best of a layout with virtual stages and micro-batches of other sizes."""
        best = one
        for layout in [one.choice.layout, *with_chunks(one.choice.layout, self.layers)]:
            for tokens in token_sizes(self.config):
                for recompute in RECOMPUTED:
                    choice = replace(one.choice, layout=layout, max_tokens=tokens, recompute=recompute)
                    changed = _changed(one.config, choice)
                    if not self._trainer_fits(changed) or isinstance(tried := self._planned(changed, choice, gpus), str):
                        continue  # it may fit where more is recomputed
                    if isinstance(tried, _Candidate) and tried.seconds < best.seconds:
                        best = tried
                    break
        return best

    def _priced(self, one: _Candidate, gpus: int) -> Ranked | None:
        """A candidate as the config would be with its overrides, checked as any config is; None: it is refused so."""
        try:
            config = _checked(self.config, one.choice)
        except (ConfigError, LayoutError):
            return None
        plan = make_plan(config, self.gpu, available=gpus, lengths=self.lengths, calibration=self.calibration)
        return Ranked(one.choice, one.choice.overrides(self.config), plan, plan.times) if plan.fits else None

    def _place(self, own: Ranked, best: list[Ranked], candidates: list[_Candidate]) -> int:
        """1: no layout is faster. Layouts that are slower than the shown ones are compared without weight updates."""
        if not own.plan.fits:
            return 0
        ahead = sum(entry.step_seconds < own.step_seconds for entry in best)
        if ahead < len(best):
            return ahead + 1
        priced, without = {entry.choice for entry in best}, own.plan.times_without_sync
        return ahead + 1 + sum(candidate.seconds < without for candidate in candidates if candidate.choice not in priced)

    def enough(self, *, is_given: bool) -> tuple[int, list[_Candidate]] | Refusals:
        """The first number of GPUs, of at most `most_gpus`, on which a layout fits, and those that do; or why none fits."""
        refused, least = Refusals(), self._least_bytes(Layout()) / self.gpu.usable_bytes
        numbers = list(_numbers(self.plan, most_gpus(self.plan, is_given=is_given)))
        for gpus in numbers:
            if gpus < least and gpus != numbers[0]:  # not even the policy, spread over all of them
                continue
            candidates, refused_here = self.candidates(gpus)
            if candidates:
                return gpus, candidates
            refused = refused if refused.counts else refused_here
        return refused

    def _trainer_fits(self, config: AnyConfig) -> bool:
        """Return whether there is room for the trainer, if engines took nothing."""
        return plan_memory(replace(run_shape(config), engines=None), self.gpu, self.lengths).fits

    def _least_bytes(self, layout: Layout) -> float:
        """What the policy alone keeps on a GPU, whatever else is chosen: to refuse most of what is hopeless at once."""
        config, itemsize = self.config, ITEMSIZE[self.config.model.dtype]
        gradient = state_bytes(config.policy.megatron, itemsize).gradient
        stages = stage_parameters(role_shape(config.roles[0]), layout, freeze=config.policy.freeze)
        return max((stage.dense + stage.expert) * itemsize + stage.trained * gradient for stage in stages)


def what_fits(config: AnyConfig, plan: CapacityPlan, *, is_given: bool) -> str:
    """The rest of the sentence about a plan that does not fit: the nearest that does, on these GPUs or on more.

    `is_given`: the user has said how many GPUs there are.
    """
    itself = f"the config itself fits on {plan.run.gpus:,}; " if plan.memory.fits else ""
    enough = Search(config, plan).enough(is_given=is_given)
    if isinstance(enough, Refusals):
        most = most_gpus(plan, is_given=is_given)
        tried = f"no layout that was tried fits on up to {most:,} {plan.gpu.name}"
        return f"{itself}{tried}; most often: {enough.most}"
    gpus, candidates = enough
    nearest = min(candidates, key=lambda one: _distance(config, one.choice))
    changes = " ".join(nearest.choice.overrides(config)) or "the config as it is"
    uses = "" if gpus == plan.available else f" {'needs' if gpus > plan.available else 'takes'} {gpus:,} GPUs"
    ranked_by = "" if is_given or not uses else f" (--gpus {gpus} --search ranks what fits on them)"
    return f"{itself}the nearest that fits{uses}{ranked_by}: {changes}"


def gains(entry: Ranked, own: Ranked) -> list[tuple[str, float, float, list[tuple[str, float]]]]:
    """By phase that differs by a hundredth of the step: (name, own seconds, its seconds, the parts that differ most)."""
    least, rows = 0.01 * own.step_seconds, []
    parts_of = [{phase.name: phase for phase in ranked.times.phases} for ranked in (own, entry)]
    for name in dict.fromkeys(name for phases in parts_of for name in phases):
        before, after = (phases[name].parts if name in phases else dict[str, float]() for phases in parts_of)
        seconds = sum(before.values()), sum(after.values())
        if abs(seconds[1] - seconds[0]) < least:
            continue
        differences = {part: after.get(part, 0.0) - before.get(part, 0.0) for part in dict.fromkeys((*before, *after))}
        ordered = sorted(differences.items(), key=lambda item: -abs(item[1]))
        rows.append((name, *seconds, [item for item in ordered[:2] if abs(item[1]) >= least / 2]))
    return rows


def most_gpus(plan: CapacityPlan, *, is_given: bool) -> int:
    """GPUs at most, where nothing fits on those of `plan`; `is_given`: the user has said how many there are."""
    return max(plan.available * MORE, 0 if is_given else MOST_GPUS)


def _numbers(plan: CapacityPlan, most: int) -> Iterator[int]:
    """Numbers of GPUs to try: those that there are, a power of two of them, those of the config, and more up to `most`."""
    fewer = [size for size in powers(plan.available) if size != plan.available][-1:]
    more = {plan.run.gpus, *powers(most), *(plan.available * factor for factor in powers(MORE))}
    yield from (plan.available, *fewer, *sorted(size for size in more if plan.available < size <= most))


def _distance(config: AnyConfig, choice: Choice) -> float:
    current = own_choice(config)
    sizes = [(getattr(choice.layout, name) or 1, getattr(current.layout, name) or 1) for name in SIZES]
    changes = sum(abs(log2(size / before)) for size, before in sizes)
    of_engines = abs(log2(choice.engine_tp / current.engine_tp)) if choice.engine_tp and current.engine_tp else 0.0
    return changes + of_engines + (choice.recompute != current.recompute)


def _checked(config: AnyConfig, choice: Choice) -> AnyConfig:
    """`config` as it would be with a choice, checked as any config is.

    Raises:
        ConfigError, LayoutError: it may not be.
    """
    tree = config.model_dump()
    for name, value in choice.changes(config).items():
        section, _, leaf = name.partition(".")
        tree[section][leaf] = value
    tried = parse_any(tree)
    check_models(tried)
    return tried


def _changed(config: AnyConfig, choice: Choice) -> AnyConfig:
    """The same without checks, which take longer than a plan: for what differs in more than the layout that was checked."""
    of_sections: dict[str, dict[str, Any]] = {}
    for name, value in choice.changes(config).items():
        section, _, leaf = name.partition(".")
        of_sections.setdefault(section, {})[leaf] = Layout(**value) if leaf == "layout" else value
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in of_sections.items()}
    return config.model_copy(update=sections)


def _over(plan: CapacityPlan) -> str:
    if plan.run.gpus > plan.available:
        return "takes more GPUs than there are"
    owner, part = max(plan.memory.worst.parts, key=lambda key: plan.memory.worst.parts[key])
    return f"a GPU is too small: most is {part} of the {owner}"
