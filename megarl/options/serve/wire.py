"""Bodies of requests and answers: protobuf (zstd or plain) and JSON from the client, and to values of `values.py` and back.

Every length is checked before anything of that length is made. Arrays come from bytes by numpy, without a loop over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from typing import Any, TypeVar

import msgspec
import numpy as np
import zstandard
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from megarl.options.serve.values import Array, Datum, Loss, Passed, Picture, RequestError, Sampled, SampleRequest
from megarl.options.serve.wire_fields import first_fields, read_fields
from megarl.system.http_server import check_values

PROTOBUF = "application/x-protobuf"
MOST_DATUMS = 1024
"""Datums in a request; the client is told to cut larger batches."""
MOST_FIELDS = 1 << 18
"""Fields of a protobuf body at all depths."""
MOST_WINDOW = 1 << 27
"""Bytes of zstd's window."""
HEAD_BYTES = 1 << 18
"""Of a body that is refused for its size, from which its model and number are read: more than one block of zstd."""
FLOAT32, INT64, INT32 = (np.dtype(kind) for kind in ("<f4", "<i8", "<i4"))
LARGE_BYTES = 1 << 20
M = TypeVar("M", bound=BaseModel)


@dataclass
class Room:
    """Bytes that a request may still make arrays of, beyond those that it was sent in."""

    left: int

    def take(self, number: int, what: str) -> None:
        """Take `number` bytes for `what`.

        Raises:
            RequestError: there are fewer left.
        """
        if number < 0 or number > self.left:
            raise RequestError(f"{what} needs {number} bytes, which is more than a request may have; send smaller requests")
        self.left -= number


@dataclass(frozen=True)
class TrainingCall:
    """A request for a pass. `digest` is the same for the same content, however it was packed."""

    model: str
    seq: int
    loss: Loss
    data: Sequence[Datum]
    backward: bool
    digest: bytes
    loss_id: str = ""
    """Of a loss that the client has defined."""


@dataclass(frozen=True)
class AskedSamples:
    """A request for samples; `layout` are row pointers and columns of its targets, where these came as CSR."""

    request: SampleRequest
    layout: tuple[Array, Array] | None = None


# bodies ---------------------------------------------------------------------------------------------------------------


def unpacked(body: bytes, encoding: str, most: int) -> bytes:
    """The body without its compression, at most `most` bytes of it.

    Raises:
        RequestError: it has more, or is none of that encoding.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise RequestError(f"Content-Encoding is {encoding!r:.40}; it must be zstd, or left out", status=415)
    try:
        size = zstandard.frame_content_size(body)
        if size > most:
            raise RequestError(_too_large(size, most), status=413)
        with zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW).stream_reader(BytesIO(body)) as reader:
            content = reader.read(most + 1)
    except zstandard.ZstdError:
        raise RequestError("the body is no zstd frame, which its Content-Encoding says") from None
    if len(content) > most:
        raise RequestError(_too_large(len(content), most), status=413)
    return content


def too_large(size: int | None, most: int) -> str:
    """The sentence for a body of `size` bytes (None: unknown, and more than `most`)."""
    shown = f"{size} bytes" if size is not None else f"more than {most} bytes"
    return f"the body has {shown}; it must have at most {most}, so send fewer datums in a request"


def _too_large(size: int, most: int) -> str:
    return f"the body is packed and has {size} bytes or more unpacked; it must have at most {most}, so send fewer datums"


def read_json(kind: type[M], body: bytes) -> M:
    """A JSON body as one of the client's types.

    Raises:
        RequestError: names the first field that is not what it must be.
    """
    try:
        check_values(body)
        _check_fields(kind, body)
        return kind.model_validate_json(body)
    except HTTPException as error:
        raise RequestError(error.detail, status=error.status_code) from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the body"
        raise RequestError(f"{place:.200}: {first['msg']:.200}", status=422) from None


def _check_fields(kind: type[BaseModel], body: bytes) -> None:
    """Refuse a large body without a field that it needs: pydantic would make objects of the whole body for each of them."""
    if len(body) < LARGE_BYTES:
        return
    try:
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return  # pydantic says why
    for name, field in kind.model_fields.items():
        if field.is_required() and not {name, field.alias} & given.keys():
            raise RequestError(f"{name}: Field required", status=422)


def digest_of_json(asked: BaseModel, but: set[str] | None = None) -> bytes:
    """The digest of a JSON request; of all its fields `but` those."""
    return blake2b(asked.model_dump_json(exclude=but).encode(), digest_size=16).digest()


# passes ---------------------------------------------------------------------------------------------------------------


def read_address(head: bytes, encoding: str) -> tuple[str, int] | None:
    """The model and the number of a pass, from the start of its body; None where they cannot be read."""
    try:
        if encoding == "zstd":
            with zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW).stream_reader(BytesIO(head)) as reader:
                head = reader.read(4096)
        found = first_fields(head[:4096], (1, 2))
    except (zstandard.ZstdError, ValueError):
        return None
    model, seq = found.get(1), found.get(2)
    if not isinstance(model, bytes) or not isinstance(seq, int):
        return None
    return model.decode(errors="replace"), seq


def read_call(body: bytes, encoding: str, most: int) -> TrainingCall:
    """The body of `forward_backward`, of at most `most` bytes, packed or not.

    Raises:
        RequestError: it is no such request, or larger than it may be.
    """
    content = unpacked(body, encoding, most)
    try:
        counts = read_fields(content, pb.ForwardBackwardRequest.DESCRIPTOR, MOST_FIELDS)
        if counts.get("data", 0) > MOST_DATUMS:
            raise RequestError(f"data has {counts['data']} datums; a request must have at most {MOST_DATUMS}")
        message = pb.ForwardBackwardRequest.FromString(content)
    except (DecodeError, ValueError):
        raise RequestError("the body is no ForwardBackwardRequest of the protocol") from None
    del content
    room = Room(most)
    data = [_datum(number, datum, room) for number, datum in enumerate(message.data)]
    values = {name: float(value) for name, value in message.loss_fn_config.items()} | {
        name: value.text if value.WhichOneof("value") == "text" else value.number
        for name, value in message.loss_fn_config_v2.items()
    }
    loss_id = values.pop("loss_id", "") if message.loss_fn == "custom" else ""
    loss = Loss(message.loss_fn, values)
    digest = _digest(message.loss_fn, values, data, forward_only=message.forward_only)
    return TrainingCall(message.model_id, message.seq_id, loss, data, not message.forward_only, digest, str(loss_id))


def _datum(number: int, message: Any, room: Room) -> Datum:
    pieces, pictures, length = [], [], 0
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind == "encoded_text":
            piece = _array(chunk.encoded_text.tokens, INT32, f"datum {number}: tokens")
        elif kind == "image":
            picture = _picture(f"datum {number}", length, chunk.image, room)
            piece = np.zeros(picture.length, np.int32)
            pictures.append(picture)
        else:
            raise RequestError(f"datum {number} has a chunk of kind {kind or 'none'}; it must be encoded_text or image")
        pieces.append(piece)
        length += len(piece)
    tokens = pieces[0] if len(pieces) == 1 else np.concatenate([np.zeros(0, np.int32), *pieces])
    inputs = {name: _tensor(f"datum {number}: {name:.80}", tensor, room) for name, tensor in message.loss_fn_inputs.items()}
    spans = {
        name: [_span(span) for span in getattr(message, f"{name}_spans")]
        for name in ("model_input", "loss_fn_input")
        if len(getattr(message, f"{name}_spans"))
    }
    return Datum(tokens, inputs, tuple(pictures), spans)


def _picture(what: str, place: int, image: Any, room: Room) -> Picture:
    if not image.HasField("expected_tokens") or image.expected_tokens < 1:
        raise RequestError(f"{what} has a picture without expected_tokens; it must say how many tokens it is")
    if image.format not in ("png", "jpeg"):
        raise RequestError(f"{what} has a picture of format {image.format!r:.40}; it must be png or jpeg")
    room.take(4 * image.expected_tokens, f"{what}: a picture of {image.expected_tokens} tokens")
    return Picture(place, image.expected_tokens, image.format, image.data)


def _span(message: Any) -> dict[str, Any]:
    kind = message.WhichOneof("span")
    arm = getattr(message, kind) if kind else message.prompt_tokens
    return {"kind": kind, "sequence_id": arm.sequence_id, "offset": arm.offset, "length": arm.length}


def _array(content: bytes, kind: np.dtype[Any], what: str) -> Array:
    if len(content) % kind.itemsize:
        raise RequestError(f"{what} have {len(content)} bytes, which is no multiple of {kind.itemsize}")
    return np.frombuffer(content, kind)


def _tensor(what: str, message: Any, room: Room) -> Array:
    """A tensor `[N]` or `[N, K]`; of CSR the dense one, 0 where it has nothing."""
    kind = {pb.DTYPE_FLOAT32: FLOAT32, pb.DTYPE_INT64: INT64}.get(message.dtype)
    if kind is None:
        raise RequestError(f"{what} has a dtype that is neither float32 nor int64")
    shape = tuple(message.shape)
    if len(shape) > 2 or any(size < 0 for size in shape):
        raise RequestError(f"{what} has the shape {[*shape]}; it must be [N] or [N, K]")
    if not message.HasField("sparse_csr"):
        values = _array(message.dense, kind, what)
        shape = shape or values.shape
        if math.prod(shape) != values.size:
            raise RequestError(f"{what} has the shape {[*shape]} and {values.size} values")
        return values.reshape(shape)
    csr = message.sparse_csr
    rows = (_array(csr.crow_indices, INT64, what), _array(csr.col_indices, INT64, what))
    return densified(what, shape, _array(csr.values, kind, what), *rows, room)


def densified(
    what: str, shape: tuple[int, ...], values: Array, row_ends: Array, columns: Array, room: Room, fill: int = 0
) -> Array:
    """The dense `[N, K]` of a CSR tensor, with `fill` where it has nothing.

    Raises:
        RequestError: its parts contradict each other, or it is larger than `room` has left.
    """
    if len(shape) != 2 or min(shape, default=-1) < 0:
        raise RequestError(f"{what} is CSR with the shape {[*shape]}; it must be [N, K]")
    steps = np.diff(row_ends)
    if len(row_ends) != shape[0] + 1 or row_ends[0] != 0 or row_ends[-1] != len(values) or (steps < 0).any():
        raise RequestError(f"{what} is CSR whose row pointers do not fit {len(values)} values in {shape[0]} rows")
    if len(columns) != len(values) or (len(columns) and not (columns.min() >= 0 and columns.max() < shape[1])):
        raise RequestError(f"{what} is CSR whose columns do not fit {len(values)} values in {shape[1]} columns")
    room.take(math.prod(shape) * values.itemsize, f"{what} of the shape {[*shape]}")
    dense = np.full(shape, fill, values.dtype)
    dense[np.repeat(np.arange(shape[0]), steps), columns] = values
    return dense


def _digest(loss: str, values: Mapping[str, Any], data: Sequence[Datum], *, forward_only: bool) -> bytes:
    found = blake2b(repr((loss, sorted(values.items()), forward_only, len(data))).encode(), digest_size=16)
    for datum in data:
        found.update(repr((len(datum.tokens), sorted(datum.provenance.items()))).encode())
        found.update(np.ascontiguousarray(datum.tokens).data)
        for picture in datum.pictures:
            found.update(repr((picture.place, picture.length, picture.format, len(picture.content))).encode())
            found.update(picture.content)
        for name in sorted(datum.inputs):
            values_of = datum.inputs[name]
            found.update(repr((name, values_of.dtype.str, values_of.shape)).encode())
            found.update(np.ascontiguousarray(values_of).data)
    return found.digest()


def passed_bytes(passed: Passed) -> bytes:
    """The answer of a pass as protobuf: a record for each run of datums whose arrays have the same names, types and widths."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type=passed.output_type)
    for name, value in passed.metrics.items():
        message.metrics[name] = float(value)
    start, outputs = 0, passed.outputs
    while start < len(outputs):
        form = _form(outputs[start])
        end = start + 1
        while end < len(outputs) and _form(outputs[end]) == form:
            end += 1
        record = message.loss_fn_outputs.add(type_tag=passed.output_type, num_datums=end - start)
        for name, kind, trailing in form:
            arrays = [np.ascontiguousarray(outputs[i][name], kind) for i in range(start, end)]
            tensor = record.fields[name]
            tensor.data = b"".join(array.tobytes() for array in arrays)
            tensor.offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype(INT64).tobytes()
            tensor.dtype = pb.DTYPE_FLOAT32 if kind == FLOAT32 else pb.DTYPE_INT64
            tensor.trailing_shape.extend(trailing)
        start = end
    return message.SerializeToString()


def _form(output: Mapping[str, Array]) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
    return [(name, FLOAT32 if array.dtype.kind == "f" else INT64, array.shape[1:]) for name, array in sorted(output.items())]


# samples --------------------------------------------------------------------------------------------------------------


def read_sample(asked: types.SampleRequest, most: int, *, tenant: str) -> AskedSamples:
    """A request for samples; its adapter is set by whoever knows it.

    Raises:
        RequestError: names the field.
    """
    room = Room(most)
    pieces, pictures, length = [np.zeros(0, np.int32)], [], 0
    for chunk in asked.prompt.chunks:
        if isinstance(chunk, types.EncodedTextChunk):
            if chunk.tokens and not (min(chunk.tokens) >= 0 and max(chunk.tokens) < 2**31):
                raise RequestError("prompt has a token id that is below 0 or above 2147483647")
            piece = np.asarray(chunk.tokens, np.int32)
        elif isinstance(chunk, types.ImageChunk):
            image = pb.ImageChunk(data=chunk.data, format=chunk.format, expected_tokens=_int32(chunk.expected_tokens))
            pictures.append(_picture("prompt", length, image, room))
            piece = np.zeros(pictures[-1].length, np.int32)
        else:
            raise RequestError(f"prompt has a chunk of kind {chunk.type}; it must be encoded_text or image")
        pieces.append(piece)
        length += len(piece)
    if asked.record_stability_info:
        raise RequestError("record_stability_info is set, but this server has no stable_reinforce; leave it out")
    targets, layout = _targets(asked.target_prompt_logprobs, room)
    sampling = asked.sampling_params
    stop = sampling.stop
    request = SampleRequest(
        np.concatenate(pieces),
        pictures=tuple(pictures),
        num_samples=asked.num_samples,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop=None if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),  # type: ignore[arg-type]
        prompt_logprobs=bool(asked.prompt_logprobs),
        prompt_logprobs_last_n=asked.prompt_logprobs_last_n,
        topk_prompt_logprobs=asked.topk_prompt_logprobs,
        topk_sample_logprobs=asked.topk_sample_logprobs,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=asked.prompt_alt_tokens_k,
        tenant=tenant,
    )
    return AskedSamples(request, layout)


def _int32(number: int | None) -> int | None:
    if number is not None and not 0 <= number < 2**31:
        raise RequestError(f"expected_tokens is {number:.3g}; it must be from 1 to 2147483647")
    return number


def _targets(tensor: Any, room: Room) -> tuple[Array | None, tuple[Array, Array] | None]:
    """Ids whose log-probs are asked for, `[N - 1, K]` with -1 for none, and how they came."""
    if tensor is None:
        return None, None
    what = "target_prompt_logprobs"
    if tensor.dtype != "int64":
        raise RequestError(f"{what} has the dtype {tensor.dtype}; it must be int64")
    try:
        values = np.asarray(tensor.data, np.int64)
        shape = tuple(tensor.shape if tensor.shape is not None else values.shape)
        if tensor.sparse_crow_indices is None:
            if len(shape) != 2 or min(shape) < 0 or math.prod(shape) != values.size:
                raise RequestError(f"{what} has the shape {[*shape]} and {values.size} values; it must be [N - 1, K]")
            return values.reshape(shape), None
        layout = (np.asarray(tensor.sparse_crow_indices, np.int64), np.asarray(tensor.sparse_col_indices or [], np.int64))
    except (OverflowError, ValueError, TypeError):
        raise RequestError(f"{what} has values that are no int64") from None
    return densified(what, shape, values, *layout, room, fill=-1), layout


def sampled_bytes(sampled: Sampled, layout: tuple[Array, Array] | None = None) -> bytes:
    """The answers to a request as protobuf; `layout` as in `AskedSamples`."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=sampled.cache_hit_tokens)
    for answer in sampled.sequences:
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if answer.stop_reason == "stop" else pb.STOP_REASON_LENGTH,
            tokens=_bytes(answer.tokens, INT32),
            logprobs=_bytes(answer.logprobs, FLOAT32),
        )
        if answer.topk is not None:
            _write_topk(sequence.topk_sampled_logprobs, answer.topk)
    if sampled.prompt_logprobs is not None:
        message.prompt_logprobs = _bytes(sampled.prompt_logprobs, FLOAT32)
    if sampled.topk_prompt is not None:
        _write_topk(message.topk_prompt_logprobs, sampled.topk_prompt)
    if sampled.target_prompt_logprobs is not None:
        _write_targets(message.target_prompt_logprobs, sampled.target_prompt_logprobs, layout)
    if sampled.prompt_alt_tokens is not None:
        tokens, logprobs = sampled.prompt_alt_tokens
        _write_dense(message.prompt_alt_tokens.tokens, tokens, INT32, pb.DTYPE_INT32)
        _write_dense(message.prompt_alt_tokens.logprobs, logprobs, FLOAT32, pb.DTYPE_FLOAT32)
    return message.SerializeToString()


def _bytes(array: Array, kind: np.dtype[Any]) -> bytes:
    return np.ascontiguousarray(array, kind).tobytes()


def _write_topk(message: Any, topk: tuple[Array, Array]) -> None:
    ids, logprobs = topk
    message.token_ids, message.logprobs = _bytes(ids, INT32), _bytes(logprobs, FLOAT32)
    message.length, message.k = ids.shape


def _write_dense(message: Any, array: Array, kind: np.dtype[Any], named: Any) -> None:
    message.dense, message.dtype = _bytes(array, kind), named
    message.shape.extend(array.shape)


def _write_targets(message: Any, dense: Array, layout: tuple[Array, Array] | None) -> None:
    dense = np.nan_to_num(dense, nan=0.0)
    if layout is None:
        _write_dense(message, dense, FLOAT32, pb.DTYPE_FLOAT32)
        return
    row_ends, columns = layout
    rows = np.repeat(np.arange(dense.shape[0]), np.diff(row_ends))
    message.sparse_csr.values = _bytes(dense[rows, columns], FLOAT32)
    message.sparse_csr.crow_indices, message.sparse_csr.col_indices = _bytes(row_ends, INT64), _bytes(columns, INT64)
    message.dtype = pb.DTYPE_FLOAT32
    message.shape.extend(dense.shape)
