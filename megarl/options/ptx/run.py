"""Supervised examples in a run: a batch of them joins every update of the policy (docs/methods.md#supervised-mix-ptx)."""

from __future__ import annotations

from typing import Any

from megarl.algorithms import token_weights
from megarl.config import Config
from megarl.data.batch import Batch
from megarl.data.mixture import build_parts, build_sampler, mixture_weights
from megarl.data.row_media import open_media
from megarl.data.supervised import SupervisedBuilder, SupervisedSettings
from megarl.experience.step_parts import StepPart
from megarl.options.ptx.loss import PtxLoss
from megarl.options.ptx.section import ptx_of


class PtxExamples(StepPart):
    """Hands each update its share of examples, in an order that follows from the seed."""

    state_name = "ptx"

    def __init__(self, config: Config, tokenizer: Any) -> None:
        """Read and tokenise all of them.

        Raises:
            DataError: a row has no prompt or response, or is longer than a rollout may be.
        """
        ptx = ptx_of(config)
        source, self._loss = ptx.data, PtxLoss(ptx.coef)
        assert source is not None, "the config's checks see to it"
        settings = SupervisedSettings(
            prompt_key=config.data.prompt_key,
            system_key=config.data.system_key,
            system_prompt=config.data.system_prompt,
            turns=ptx.turns,
            chat_template=config.data.chat_template,
            template_args=config.data.template_args,
            ignore_fields=config.data.ignore_fields,
            max_tokens=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
            bad_pictures=config.data.bad_pictures,
        )
        media = open_media(config.data, config.model.path, tokenizer, config.run_folder)
        builder = SupervisedBuilder(tokenizer, "sft", settings, media, field="ptx.turns")
        parts = build_parts(builder, source, prefix="ptx", section="ptx.data")
        rows_per_step = ptx.samples_per_step * config.algorithm.epochs
        weights, seed = mixture_weights(source), config.run.seed
        self._sampler = build_sampler(parts, weights, seed, rows_per_step=rows_per_step, field="ptx.data")
        self._on_change = config.data.on_change
        self._per_update = ptx.samples_per_step // config.algorithm.mini_batches

    def mixed_in(self) -> tuple[Batch, list[str]]:
        """The next update's examples and the column that their loss reads; its denominator is their own tokens."""
        batch = Batch(self._sampler.next(self._per_update))
        batch.columns[PtxLoss.column] = token_weights(batch.mask, "token_mean")
        return batch, [PtxLoss.column]

    def mixed_loss(self) -> PtxLoss:
        """Cross-entropy, weighted as the config says."""
        return self._loss

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`'s answer."""
        self._sampler.load_state_dict(state, self._on_change)


SUMMED = ("ptx/loss",)
"""Metrics of updates whose sum is the value itself."""


def take_part(config: Config, tokenizer: Any) -> PtxExamples | None:
    """The examples that `ptx` asks for."""
    return PtxExamples(config, tokenizer) if ptx_of(config).coef else None
