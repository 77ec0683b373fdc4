"""Seconds of generation by engines that prefill and engines that decode, and of the keys and values between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from megarl.options.disaggregation.questions import without_training
from megarl.options.disaggregation.section import disaggregation_of
from megarl.planning.plan import CapacityPlan, make_plan
from megarl.planning.times import PhaseTime, TimePlan, plan_times

OF_PREFILL = ("prefill", "tower")
"""Parts of generation that are done by the engines that prefill."""


@dataclass(frozen=True)
class DisaggregationPlan:
    """A step's generation with `prefill` and `decode` engines: seconds in which each kind does its part, beside the other.

    `prompt_bytes`: keys and values of a prompt of mean length, and states of a response, on all ranks of an engine, which pass
    a rank's link at `link_bytes_per_s`; a prompt passes once for its group. `together_s`: of as many engines that do both.
    """

    prefill: int
    decode: int
    prefill_s: float
    decode_s: float
    transfer_s: float
    prompt_bytes: float
    prompt_s: float
    link_bytes_per_s: float
    together_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    decode_parts: Mapping[str, float]

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by part."""
        return {"prefill": self.prefill_s, "decoding": self.decode_s, "transfer": self.transfer_s}

    @property
    def balanced(self) -> int:
        """Engines, of all, that should prefill for both kinds to take as long, if seconds fall as engines are more."""
        work = self.prefill_s * self.prefill, self.decode_s * self.decode
        engines = self.prefill + self.decode
        return min(engines - 1, max(1, round(engines * work[0] / sum(work)))) if sum(work) else self.prefill


def disaggregation_plan(plan: CapacityPlan) -> DisaggregationPlan | None:
    """Plan the two kinds of engines; None of a run whose engines do both."""
    engines, sampling, lengths = plan.run.engines, plan.run.config.sampling, plan.lengths
    parted = disaggregation_of(sampling) if sampling is not None else None
    if parted is None or engines is None or sampling is None:
        return None
    config = without_training(plan.run.config)  # type: ignore[arg-type]  # it samples
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engines": parted.decode})})
    decoding = make_plan(config, plan.gpu, lengths=lengths, calibration=plan.calibration)
    by_all, by_decode = _generation(plan), _generation(decoding)
    sequences, target = float(plan.run.config.sequences_per_step), engines.target
    groups = sequences / sampling.samples_per_prompt
    of_prompt, of_response = lengths.prompt * engines.kv_bytes_per_token, engines.state_bytes_per_sequence
    rate = plan.gpu.link_gb_per_s(parted.engines * target.ranks) * plan.gpu.efficiencies.links * 1e9
    fewest = min(parted.prefill, parted.decode)  # whose links have most to carry
    prefill_s = sum(by_all.get(part, 0.0) for part in OF_PREFILL) * parted.engines / parted.prefill
    decode_parts = {part: seconds for part, seconds in by_decode.items() if part not in OF_PREFILL}
    decode_s = sum(decode_parts.values())
    return DisaggregationPlan(
        parted.prefill,
        parted.decode,
        prefill_s,
        decode_s,
        transfer_s=(groups * of_prompt + sequences * of_response) / fewest / rate,
        prompt_bytes=(of_prompt + of_response) * target.ranks,
        prompt_s=(of_prompt + of_response) / rate,
        link_bytes_per_s=rate,
        together_s=sum(by_all.values()),
        prefill_tokens_per_s=groups * lengths.prompt / prefill_s if prefill_s else 0.0,
        decode_tokens_per_s=sequences * lengths.response / decode_s if decode_s else 0.0,
        decode_parts=decode_parts,
    )


def _generation(plan: CapacityPlan) -> dict[str, float]:
    """Seconds of generation by what they are spent on, by engines that do all of it."""
    times = plan_times(plan.run, plan.gpu, plan.memory, plan.lengths, plan.calibration, sync=False)
    [generate] = [phase for phase in times.phases if phase.name == "generate"]
    return dict(generate.parts)


def shortened(plan: CapacityPlan, times: TimePlan) -> TimePlan:
    """The times of a run whose engines are disaggregated: both kinds work side by side, and the slower one is waited for."""
    parted = disaggregation_plan(plan)
    if parted is None:
        return times
    is_decoding = parted.bound == "decoding"
    generate = PhaseTime("generate", parted.decode_parts if is_decoding else {parted.bound: parted.seconds[parted.bound]})
    return replace(times, phases=tuple(generate if phase.name == "generate" else phase for phase in times.phases))


def times_as_json(plan: CapacityPlan) -> dict[str, Any]:
    """Figures that stand beside the phases of a step."""
    parted = disaggregation_plan(plan)
    return {} if parted is None else {"disaggregation": asdict(parted) | {"balanced_prefill": parted.balanced}}


def stated(plan: CapacityPlan) -> list[str]:
    """The lines on both kinds of engines; none where every engine does both."""
    parted = disaggregation_plan(plan)
    if parted is None:
        return []
    engines = parted.prefill + parted.decode
    better = f"; with {parted.balanced} of {engines} for prompts both would take about as long"
    return [
        f"Prefill takes {parted.prefill_s:,.3g} s of a step on {parted.prefill} engines "
        f"({parted.prefill_tokens_per_s:,.0f} tokens/s), decoding {parted.decode_s:,.3g} s on {parted.decode} "
        f"({parted.decode_tokens_per_s:,.0f} tokens/s), side by side: {parted.bound} is waited for"
        f"{better if parted.balanced != parted.prefill else ''}",
        f"A prompt's keys and values are {parted.prompt_bytes / 1e6:,.3g} MB: {parted.prompt_s * 1e3:,.3g} ms on the links of "
        f"an engine at {parted.link_bytes_per_s / 1e9:,.3g} GB/s each, {parted.transfer_s:,.3g} s of a step on the busiest",
        f"{engines} engines that do both would generate in {parted.together_s:,.3g} s, with prompts between the tokens of "
        "others, which is not counted",
    ]
