"""Data of a request, checked and laid as rows of a batch: every position scored, targets the next tokens or any others.

A datum of N tokens becomes a prompt of its first one and a response of the other N − 1 and its last target: so each position
predicts one token of the response. Where targets are no shift of the tokens, the response is fed all the same, and the targets
are asked for by the column `SCORED_IDS`, and so are those of data with pictures, where a target is no placeholder. Data that
begin alike are one group, so that ranks may compute their beginning once. Arrays alone, in the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megarl.data.batch import Batch
from megarl.data.media import Media
from megarl.data.prefix_tree import LEAST_SHARED
from megarl.data.sample import Sample
from megarl.data.stream import FILLS, SCORED_IDS
from megarl.options.serve.losses import FORMS, THRESHOLDS, LossForm
from megarl.options.serve.served_pictures import ServedPictures
from megarl.options.serve.values import Array, Datum, Loss, RequestError

TARGETS = "target_tokens"


@dataclass(frozen=True)
class DatumLimits:
    """Limits of what a model can be asked for: token ids below `vocabulary`, and at most `max_tokens` of them in a datum.

    `pictures` takes those of data; None: the model sees none.
    """

    vocabulary: int
    max_tokens: int
    pictures: ServedPictures | None = None


@dataclass(frozen=True)
class Laid:
    """Data as a batch: the first `rows` rows are the client's, and others fill up, so that each replica has one.

    `columns` are those that ranks are sent. `targets`: as in `ServedLoss`. `shapes`: by datum that of its targets.
    """

    batch: Batch
    rows: int
    columns: tuple[str, ...]
    targets: int
    shapes: tuple[tuple[int, ...], ...]

    def answer(self, row: int, values: Array) -> Array:
        """Choose, of what was computed of a row, `[N]` or `[N, K]`, what its client asked for."""
        shape = self.shapes[row]
        if values.ndim == 2:  # other data may have more targets per position
            values = values[:, : shape[1] if len(shape) == 2 else 1]
        return np.ascontiguousarray(values).reshape(shape)


def parameters_of(loss: Loss) -> dict[str, float]:
    """A loss's parameters with the defaults of those that were not given.

    Raises:
        RequestError: there is no such loss or parameter, or a value is none.
    """
    form = _form(loss.name)
    found = dict(form.parameters)
    for name, value in loss.parameters.items():
        if name not in form.parameters:
            allowed = f"one of {', '.join(form.parameters)}" if form.parameters else "left out"
            raise RequestError(f"loss_fn_config has '{name}', which {loss.name} does not have; it must be {allowed}")
        if not isinstance(value, int | float) or isinstance(value, bool) or not np.isfinite(value) or value < 0:
            raise RequestError(f"loss_fn_config.{name} is {value!r}; it must be a number that is not negative")
        found[name] = float(value)
    low, high = (found.get(name) for name in THRESHOLDS)
    if low is not None and high is not None and low > high:
        raise RequestError(
            f"loss_fn_config.{THRESHOLDS[0]} is {low}, which is above {THRESHOLDS[1]}; it must be at most {high}"
        )
    return found


def _form(name: str) -> LossForm:
    if name not in FORMS:
        why = ", whose formula is not published" if name == "stable_reinforce" else ""
        raise RequestError(f"loss_fn is '{name}'{why}; it must be one of {', '.join(FORMS)} or custom")
    return FORMS[name]


def lay(data: Sequence[Datum], loss_name: str, limits: DatumLimits, *, replicas: int) -> Laid:
    """Check the data of a pass and lay them for the ranks, at least one row for each of `replicas`.

    Raises:
        RequestError: a datum is not what the loss reads.
    """
    form = _form(loss_name)
    if not data:
        raise RequestError("data is empty; it must have at least one datum")
    for number, datum in enumerate(data):
        _check_names(number, datum, form, loss_name)
        _check_shapes(number, datum, form, loss_name, limits)
    _check_values(data, limits)
    data, media = _seen(data, limits)
    shifts = all(_is_shift(datum) for datum in data)
    width = max(_width(datum.inputs[TARGETS]) for datum in data)
    filling = max(0, replicas - len(data))
    samples = [_sample(number, *shown) for number, shown in enumerate(zip(data, media, strict=True))]
    samples += [Sample(f"fills {number}", f"fills {number}", "", [0], [0], [1], [], [], "stop") for number in range(filling)]
    batch = Batch(samples)
    names = [name for name in (*form.required, *form.optional) if name in data[0].inputs]
    for name in names:
        _add(batch, name, data, width if name == "weights" else 1)
    if not shifts:
        _add(batch, SCORED_IDS, data, width, of=lambda datum: datum.inputs[TARGETS], is_wide=True)
        names.append(SCORED_IDS)
    if filling:
        fills = torch.zeros(batch.mask.shape)
        fills[len(data) :] = 1.0
        batch.columns[FILLS] = fills
        names.append(FILLS)
    shapes = tuple(datum.inputs[TARGETS].shape for datum in data)
    return Laid(batch, len(data), tuple(names), 0 if shifts else width, shapes)


def _check_names(number: int, datum: Datum, form: LossForm, loss: str) -> None:
    missing = [name for name in (TARGETS, *form.required) if name not in datum.inputs]
    if missing:
        raise RequestError(f"datum {number} has no loss_fn_inputs['{missing[0]}'], which {loss} reads")
    known = (TARGETS, *form.required, *form.optional)
    if unknown := [name for name in datum.inputs if name not in known]:
        which, allowed = f"loss_fn_inputs['{unknown[0]}']", ", ".join(known)
        raise RequestError(f"datum {number} has {which}, which {loss} does not read; its inputs must be {allowed}")


def _check_shapes(number: int, datum: Datum, form: LossForm, loss: str, limits: DatumLimits) -> None:
    length, targets = len(datum.tokens), datum.inputs[TARGETS]
    if not 0 < length <= limits.max_tokens:
        raise RequestError(f"datum {number} has {length} tokens; it must have 1 to {limits.max_tokens}")
    if targets.ndim not in (1, 2) or not targets.size:
        raise RequestError(f"datum {number} has target_tokens {[*targets.shape]}; they must be [{length}] or [{length}, K]")
    if targets.ndim == 2 and not form.wide:
        raise RequestError(
            f"datum {number} has several target_tokens per position, which cross_entropy alone takes, not {loss}"
        )
    for name, values in datum.inputs.items():
        expected = (length, *targets.shape[1:]) if name in (TARGETS, "weights") else (length,)
        if values.shape != expected:
            shapes = f"{[*values.shape]} for {length} tokens"
            raise RequestError(f"datum {number} has {name} {shapes}; it must be {[*expected]}, an entry for each token")


def _check_values(data: Sequence[Datum], limits: DatumLimits) -> None:
    """Look at all numbers at once, and only where something is wrong for its datum."""
    for what, of in (("tokens", lambda datum: datum.tokens), (TARGETS, lambda datum: datum.inputs[TARGETS])):
        joined = np.concatenate([of(datum).ravel() for datum in data])
        if joined.dtype.kind not in "iu":
            raise RequestError(f"{what} of datum 0 are no whole numbers; they must be token ids")
        if joined.min() < 0 or joined.max() >= limits.vocabulary:
            number = next(i for i, datum in enumerate(data) if of(datum).min() < 0 or of(datum).max() >= limits.vocabulary)
            raise RequestError(f"datum {number} has {what} out of range; ids must be 0 to {limits.vocabulary - 1}")
    for name in data[0].inputs.keys() - {TARGETS}:
        if any(name not in datum.inputs for datum in data):
            number = next(i for i, datum in enumerate(data) if name not in datum.inputs)
            raise RequestError(
                f"datum {number} has no loss_fn_inputs['{name}'], which others have; all data must have it, or none"
            )
        if not np.isfinite(np.concatenate([datum.inputs[name].ravel() for datum in data])).all():
            number = next(i for i, datum in enumerate(data) if not np.isfinite(datum.inputs[name]).all())
            raise RequestError(f"datum {number} has {name} that are not finite; they must be numbers")
    for number, datum in enumerate(data):
        if extra := datum.inputs.keys() - data[0].inputs.keys():
            raise RequestError(
                f"datum {number} has loss_fn_inputs['{min(extra)}'], which datum 0 has not; all must have it, or none"
            )


def _is_shift(datum: Datum) -> bool:
    targets = datum.inputs[TARGETS]
    return targets.ndim == 1 and np.array_equal(targets[:-1], datum.tokens[1:])


def _seen(data: Sequence[Datum], limits: DatumLimits) -> tuple[Sequence[Datum], Sequence[tuple[Media, ...]]]:
    """The data with the model's own ids where pictures are, and the pictures of each."""
    showing = next((number for number, datum in enumerate(data) if datum.pictures), None)
    if showing is None:
        return data, [()] * len(data)
    if limits.pictures is None:
        raise RequestError(f"datum {showing} has a picture, which this server's model does not see; its chunks must be tokens")
    for number, datum in enumerate(data):
        if any(picture.place == 0 for picture in datum.pictures):
            raise RequestError(f"datum {number} begins with a picture; a token must come before it, such as that of its start")
    shown = limits.pictures.of_data(data)
    return [datum for datum, _ in shown], [media for _, media in shown]


def _width(targets: Array) -> int:
    return targets.shape[1] if targets.ndim == 2 else 1


def _sample(number: int, datum: Datum, media: Sequence[Media]) -> Sample:
    tokens, last = datum.tokens, datum.inputs[TARGETS].ravel()[-1]
    response = np.append(tokens[1:], last)
    mask = np.ones(len(tokens), np.uint8)
    alike = min(len(tokens), LEAST_SHARED + 1)  # of fewer tokens nothing would be shared
    name, group = str(number), tokens[:alike].tobytes().hex()
    return Sample(
        name, group, name, [int(tokens[0])], response, mask, [], [], "stop", media=[*media]  # type: ignore[arg-type]
    )  # fmt: skip


def _add(
    batch: Batch,
    name: str,
    data: Sequence[Datum],
    width: int,
    *,
    of: Callable[[Datum], Array] | None = None,
    is_wide: bool = False,
) -> None:
    """Add a column `[B, T]`, `[B, T, width]` where it is more than one or `is_wide`, with zeros where a datum has nothing."""
    shape = (*batch.mask.shape, width) if width > 1 or is_wide else batch.mask.shape
    column = np.zeros(shape, np.float32)
    for row, datum in enumerate(data):
        values = datum.inputs[name] if of is None else of(datum)
        if column.ndim == 3:
            values = values.reshape(len(values), -1)
            column[row, : len(values), : values.shape[1]] = values
        else:
            column[row, : len(values)] = values.reshape(len(values))
    batch.columns[name] = torch.from_numpy(column)


def flat(laid: Laid, names: Mapping[str, str]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Columns of the client's rows, `[N]` or `[N, K]` by the names that `names` gives them, and whose each token is."""
    batch = laid.batch
    mask = batch.mask.clone()
    mask[laid.rows :] = False
    response = torch.arange(len(batch))[:, None].expand(mask.shape)[mask]
    return {name: batch.columns[column][mask] for name, column in names.items()}, response
