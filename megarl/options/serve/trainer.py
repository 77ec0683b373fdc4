"""The training side of the server: the protocol's calls as passes and questions of a session's policy. One thread calls it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.checkpoint.dist_writer import join_shards
from megarl.checkpoint.format.dist_format import COMMON, METADATA
from megarl.checkpoint.format.safe_pickle import check_pickles
from megarl.core.session import Session
from megarl.data.stream import SCORED_IDS
from megarl.errors import CheckpointError
from megarl.models.registry import architecture_for, load_hf_config
from megarl.observe.expert_load import EXPERTS
from megarl.observe.record_lines import object_line
from megarl.options.serve.adapter_kinds import is_chosen
from megarl.options.serve.custom_graph import LossGraph
from megarl.options.serve.datums import TARGETS, DatumLimits, Laid, flat, lay, parameters_of
from megarl.options.serve.expert_metrics import expert_metrics
from megarl.options.serve.losses import FORMS, LOSS, Given, ServedLoss, token_losses
from megarl.options.serve.rank_questions import Begin, ModelCall
from megarl.options.serve.served_pictures import ServedPictures
from megarl.options.serve.values import AdamParams, AdapterChoice, Array, Datum, Loss, Passed, RequestError
from megarl.runs.training_side import POLICY
from megarl.runs.update_metrics import LOG_PROBS

LIVE_MODELS = 64
"""Models that are held in memory unless the config says otherwise."""
_HEADER, _TENSORS = "model.json", "policy"
_FORWARD = ("log_probs", "entropy")
_TARGET_LOG_PROBS = "target_log_probs"


class SessionTrainer:
    """The protocol `Trainer` by the policy of a session, which nobody else trains meanwhile."""

    def __init__(
        self, session: Session, folder: Path, *, live: int = LIVE_MODELS, pictures: ServedPictures | None = None
    ) -> None:
        """`folder`: for models that are moved out of memory, of which at most `live` are held there. `pictures`: takes those of
        data; None: the model sees none."""
        self.roles = session.roles
        config = session.config
        self.replicas = config.policy.layout.dp
        hf_config = load_hf_config(config.model.path)
        vocabulary = int(architecture_for(hf_config).gpt_kwargs(hf_config)["vocab_size"])
        self.limits = DatumLimits(vocabulary, _positions_in(hf_config), pictures)
        facts = self.roles.ask(POLICY, Begin(live, str(folder)))
        self.largest_rank = facts[0].largest_rank
        self.kinds = frozenset[str]().union(*(fact.kinds for fact in facts))
        self._choices: dict[str, AdapterChoice | None] = {}
        self._current: str | None = None

    # models ---------------------------------------------------------------------------------------------------------

    def create(self, model: str, choice: AdapterChoice | None) -> None:
        """Make a model that computes what the base does. None: all weights are trained, which one model alone may.

        Raises:
            RequestError: the role cannot have such a model.
        """
        if model in self._choices:
            raise RequestError(f"model '{model}' exists already")
        self._check(choice)
        self.roles.ask(POLICY, ModelCall("create", (model, choice)))
        self._choices[model], self._current = choice, model

    def _check(self, choice: AdapterChoice | None) -> None:
        if choice is None:
            if self.largest_rank is not None:
                raise RequestError("lora_config is missing, and this server trains adapters; it must have a rank")
            if self._choices:
                raise RequestError(
                    "lora_config is missing, and another model trains all weights already; unload that one first"
                )
            return
        if self.largest_rank is None:
            raise RequestError("lora_config is given, and this server trains all weights; it must be left out")
        if not 0 < choice.rank <= self.largest_rank:
            raise RequestError(f"lora_config.rank is {choice.rank}; it must be 1 to {self.largest_rank}")
        if not 0 <= choice.seed < 2**31:
            raise RequestError(f"lora_config.seed is {choice.seed}; it must be 0 to {2**31 - 1}")
        if not any(is_chosen(kind, choice) for kind in self.kinds):
            raise RequestError("lora_config leaves no layer to train; train_attn, train_mlp or train_unembed must be true")

    def drop(self, model: str) -> None:
        """Forget a model."""
        self._known(model)
        del self._choices[model]
        self._current = None if self._current == model else self._current
        self.roles.ask(POLICY, ModelCall("drop", (model,)))

    def _known(self, model: str) -> None:
        if model not in self._choices:
            raise RequestError(f"model '{model}' does not exist", status=404)

    def _switch(self, model: str) -> None:
        if self._current != model:
            self.roles.ask(POLICY, ModelCall("switch", (model,)))
            self._current = model

    # passes ---------------------------------------------------------------------------------------------------------

    def run_pass(self, model: str, data: Sequence[Datum], loss: Loss, *, backward: bool) -> Passed:
        """Compute a loss, a sum over all tokens of `data`; `backward` adds its gradients to those since the last step.

        Raises:
            RequestError: there is no such model or loss, or a datum is not what the loss reads; nothing was computed then.
        """
        self._known(model)
        if loss.name == "custom":
            return self._run_custom(model, data, loss, backward=backward)
        parameters = parameters_of(loss)
        laid = lay(data, loss.name, self.limits, replicas=self.replicas)
        self._switch(model)
        if backward:
            return self._backward(laid, loss.name, parameters)
        return self._forward(laid, loss.name, parameters)

    def _backward(self, laid: Laid, name: str, parameters: dict[str, float]) -> Passed:
        objective = ServedLoss(name, parameters, laid.rows, laid.targets)
        batch = laid.batch
        update = self.roles.start_update(POLICY, batch, range(len(batch)), laid.columns, objective, applies=False)
        (metrics,) = self.roles.finish_updates([update])
        shown = metrics[LOG_PROBS]
        outputs = [{"logprobs": laid.answer(row, shown[row].astype(np.float32))} for row in range(laid.rows)]
        return Passed(outputs, {LOSS: float(metrics[LOSS])} | expert_metrics(metrics.get(EXPERTS, {})))

    def _forward(self, laid: Laid, name: str, parameters: dict[str, float]) -> Passed:
        batch, wide = laid.batch, {_TARGET_LOG_PROBS: laid.targets} if laid.targets else {}
        asked = [SCORED_IDS] if laid.targets else []
        self.roles.forward(POLICY, batch, _FORWARD, columns=asked, wide=wide)
        scored = _TARGET_LOG_PROBS if laid.targets else _FORWARD[0]
        columns = batch.columns[scored]
        values = columns.numpy()
        lengths = batch.lengths.tolist()
        outputs = [{"logprobs": laid.answer(row, values[row, : lengths[row]])} for row in range(laid.rows)]
        read = [column for column in laid.columns if column in (*FORMS[name].required, *FORMS[name].optional)]
        given, response = flat(laid, {"": scored, **{column: column for column in read}})
        log_probs = given.pop("")
        log_probs = log_probs[:, 0] if laid.targets == 1 else log_probs
        total = token_losses(name, log_probs, Given(given, parameters, response, laid.rows)).double().sum()
        return Passed(outputs, {LOSS: float(total)})

    def _run_custom(self, model: str, data: Sequence[Datum], loss: Loss, *, backward: bool) -> Passed:
        """Two passes, as the client makes them: log-probs, and cross-entropy weighted by the derivative, computed here."""
        if not isinstance(loss.graph, LossGraph):
            raise RequestError("loss_fn is 'custom', and loss_fn_config.loss_id names no loss that was created in this session")
        plain = [_unweighted(number, datum) for number, datum in enumerate(data)]
        seen = self.run_pass(model, plain, Loss("cross_entropy"), backward=False)
        log_probs = [torch.from_numpy(np.array(output["logprobs"])) for output in seen.outputs]
        inputs = [{name: torch.from_numpy(np.array(values)) for name, values in datum.inputs.items()} for datum in data]
        total, weights, metrics = loss.graph.derivative(log_probs, inputs)
        if backward:
            weighted = [_weighted(datum, weight.numpy()) for datum, weight in zip(plain, weights, strict=True)]
            seen = self.run_pass(model, weighted, Loss("cross_entropy"), backward=True)
        return Passed(seen.outputs, {**seen.metrics, LOSS: total, **metrics})

    def optimizer_step(self, model: str, adam: AdamParams) -> dict[str, float]:
        """Apply the gradients since the last step, without any as if they were 0.

        Returns `grad_norm`, `lr`, `non_finite` and `skipped`, 1 where loss or gradients were not finite, which are gone then.

        Raises:
            RequestError: there is no such model, or a parameter is none.
        """
        self._known(model)
        _check_adam(adam)
        answers = self.roles.ask(POLICY, ModelCall("optimizer_step", (adam,), model))
        self._current = model
        return {name: float(value) for name, value in answers[0].items() if name != EXPERTS and name != "tokens"}

    def forget_gradients(self, model: str) -> None:
        """Drop the gradients since the last step.

        Raises:
            RequestError: there is no such model.
        """
        self._known(model)
        self.roles.ask(POLICY, ModelCall("forget_gradients", (), model))
        self._current = model

    # checkpoints ----------------------------------------------------------------------------------------------------

    def save(self, model: str, folder: Path) -> None:
        """Write weights and optimizer, whole or not at all; gradients since the last step are left out.

        Raises:
            RequestError: there is no such model.
            CheckpointError: it could not be written.
        """
        self._known(model)
        partial = folder.resolve().with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            (partial / _TENSORS).mkdir(parents=True)
            parts = self.roles.ask(POLICY, ModelCall("save", (str(partial / _TENSORS),), model))
            self._current = model
            join_shards(partial / _TENSORS, parts)
            choice = self._choices[model]
            (partial / _HEADER).write_text(json.dumps({"adapters": None if choice is None else asdict(choice)}))
            partial.rename(folder)
        except OSError as error:
            raise CheckpointError(f"'{folder}' could not be written ({error.strerror})") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def load(self, model: str, folder: Path, *, with_optimizer: bool) -> None:
        """Take the weights of a `save` over, and the optimizer's state, or begin it anew.

        Raises:
            RequestError: there is no such model, or the folder is none of such a model; the model is as it was then.
        """
        self._known(model)
        self._check_header(self._choices[model], folder)
        try:
            check_pickles(folder / _TENSORS)
        except CheckpointError as error:
            raise RequestError(f"the checkpoint cannot be loaded: {error}") from None
        loaded = False
        try:
            self.roles.ask(
                POLICY,
                ModelCall("load", (str((folder / _TENSORS).resolve()), "taken" if with_optimizer else "restarted"), model),
            )
            loaded = True
        except CheckpointError as error:
            raise RequestError(f"the checkpoint cannot be loaded: {error}") from None
        finally:
            self._current = model
            if not loaded:
                self.roles.ask(POLICY, ModelCall("put_back"))

    def _check_header(self, choice: AdapterChoice | None, folder: Path) -> None:
        try:
            header = object_line((folder / _HEADER).read_bytes())
            adapters = None if header["adapters"] is None else AdapterChoice(**header["adapters"])
            if not all((folder / _TENSORS / name).is_file() for name in (METADATA, COMMON)):
                raise ValueError
        except (OSError, ValueError, TypeError, LookupError):
            raise RequestError("the checkpoint has no whole state of training; save_state must have written it") from None
        if _shape_of(adapters) != _shape_of(choice):
            raise RequestError(
                f"the checkpoint is of {_called(adapters)}, and the model has {_called(choice)}; both must be alike"
            )

    def export(self, model: str, folder: Path) -> None:
        """Write the adapters as a PEFT folder, or all weights as a model folder, whole or not at all."""
        self._known(model)
        self.roles.ask(POLICY, ModelCall("export", (str(folder.resolve()),), model))
        self._current = model


def _positions_in(hf_config: Mapping[str, Any]) -> int:
    """Most tokens of a sequence, as the model's config says, or that of its decoder."""
    known = hf_config.get("max_position_embeddings") or hf_config.get("text_config", {}).get("max_position_embeddings")
    return int(known or 2**20)


def _unweighted(number: int, datum: Datum) -> Datum:
    if TARGETS not in datum.inputs:
        raise RequestError(f"datum {number} has no loss_fn_inputs['{TARGETS}'], which custom reads")
    return _weighted(datum, np.zeros(datum.inputs[TARGETS].shape, np.float32))


def _weighted(datum: Datum, weights: Array) -> Datum:
    return replace(datum, inputs={TARGETS: datum.inputs[TARGETS], "weights": weights})


def _check_adam(adam: AdamParams) -> None:
    for name, value in asdict(adam).items():
        below_one = name in ("beta1", "beta2")
        if not np.isfinite(value) or value < 0 or (below_one and value >= 1):
            allowed = "at least 0 and below 1" if below_one else "a number that is not negative"
            raise RequestError(f"adam_params.{name} is {value}; it must be {allowed}")


def _shape_of(choice: AdapterChoice | None) -> AdapterChoice | None:
    return None if choice is None else replace(choice, seed=0)


def _called(choice: AdapterChoice | None) -> str:
    if choice is None:
        return "all weights"
    parts = [name for name in ("attn", "mlp", "unembed") if getattr(choice, f"train_{name}")]
    return f"adapters of rank {choice.rank} ({', '.join(parts)})"
