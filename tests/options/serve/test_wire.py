"""Bodies: what the client packs is what is read, and nothing is made that is larger than a request may be."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from tinker import types
from tinker.proto import request_conv, response_conv
from tinker.proto import tinker_public_pb2 as pb

from megarl.options.serve import wire
from megarl.options.serve.values import Passed, RequestError
from megarl.options.serve.wire import MOST_DATUMS, Room, densified, passed_bytes, read_address, read_call, unpacked

MOST = 1 << 24


def packed(data: list[types.Datum], loss: str = "ppo", config: Any = None, seq: int = 3) -> bytes:
    """A body as the client makes it."""
    given = types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config)  # type: ignore[arg-type]
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id="s:train:0", seq_id=seq)
    return request_conv.forward_backward_request_to_proto(request).SerializeToString()


def datum(length: int = 6, seed: int = 0) -> types.Datum:
    random = np.random.default_rng(seed)
    return types.Datum(
        model_input=types.ModelInput.from_ints(random.integers(0, 99, length).tolist()),
        loss_fn_inputs={
            "target_tokens": random.integers(0, 99, length),
            "logprobs": random.random(length).astype(np.float32),
            "advantages": random.random(length).astype(np.float32),
        },
    )


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_pass_is_read_as_the_client_meant_it(*, is_packed: bool) -> None:
    data = [datum(4, 1), datum(9, 2)]
    body = packed(data, config={"clip_low_threshold": 0.9, "kind": "text"})
    encoding = "zstd" if is_packed else ""
    call = read_call(zstandard.ZstdCompressor().compress(body) if is_packed else body, encoding, MOST)
    assert (call.model, call.seq, call.loss.name, call.backward) == ("s:train:0", 3, "ppo", True)
    assert dict(call.loss.parameters) == {"clip_low_threshold": 0.9, "kind": "text"}
    for found, sent in zip(call.data, data, strict=True):
        assert found.tokens.tolist() == sent.model_input.to_ints()
        assert found.tokens.dtype == np.int32
        assert {*found.inputs} == {*sent.loss_fn_inputs}
        for name, values in found.inputs.items():
            np.testing.assert_array_equal(values, sent.loss_fn_inputs[name].to_numpy())
            assert values.dtype == sent.loss_fn_inputs[name]._numpy.dtype


def test_provenance_pictures_and_mixed_chunks_are_kept() -> None:
    chunks = [types.EncodedTextChunk(tokens=[1, 2]), types.ImageChunk(data=b"png!", format="png", expected_tokens=3)]
    given = types.ModelInput(chunks=[*chunks, types.EncodedTextChunk(tokens=[5])])
    spans = [types.SampledProvenanceSpan(sequence_id="s:sample:0:1:0", offset=2, length=6)]
    sent = types.Datum(model_input=given, loss_fn_inputs={"target_tokens": list(range(6))}).with_provenance(spans, spans)
    (found,) = read_call(packed([sent]), "", MOST).data
    assert found.tokens.tolist() == [1, 2, 0, 0, 0, 5]
    assert [(p.place, p.length, p.format, p.content) for p in found.pictures] == [(2, 3, "png", b"png!")]
    span = {"kind": "sampled_tokens", "sequence_id": "s:sample:0:1:0", "offset": 2, "length": 6}
    assert found.provenance == {"model_input": [span], "loss_fn_input": [span]}


def test_sparse_tensors_become_the_dense_ones_that_torch_makes() -> None:
    torch.manual_seed(0)
    dense = torch.randint(1, 9, (7, 5)) * (torch.rand(7, 5) < 0.15)
    tensor = types.TensorData.from_torch_sparse(dense)
    assert tensor.sparse_crow_indices is not None
    sent = types.Datum(model_input=types.ModelInput.from_ints([1] * 7), loss_fn_inputs={"target_tokens": tensor})
    np.testing.assert_array_equal(read_call(packed([sent]), "", MOST).data[0].inputs["target_tokens"], dense.numpy())


def test_the_digest_is_that_of_the_content() -> None:
    data = [datum(4, 1), datum(9, 2)]
    again = zstandard.ZstdCompressor(level=19).compress(packed(data))
    assert read_call(packed(data), "", MOST).digest == read_call(again, "zstd", MOST).digest
    others = [packed(data[:1]), packed(data[::-1]), packed(data, "cispo"), packed(data, config={"clip_low_threshold": 0.5})]
    digests = {read_call(body, "", MOST).digest for body in (packed(data), *others)}
    assert len(digests) == 5
    message = pb.ForwardBackwardRequest.FromString(packed(data))
    message.forward_only = True
    assert read_call(message.SerializeToString(), "", MOST).digest not in digests


def broken(change: Any) -> bytes:
    message = pb.ForwardBackwardRequest.FromString(packed([datum()]))
    change(message)
    return message.SerializeToString()


def _shape(message: Any) -> None:
    tensor = message.data[0].loss_fn_inputs["advantages"]
    del tensor.shape[:]
    tensor.shape.extend([1 << 40])


def _sparse(crow: list[int], columns: list[int], shape: list[int]) -> Any:
    def change(message: Any) -> None:
        tensor = message.data[0].loss_fn_inputs["advantages"]
        tensor.Clear()
        tensor.dtype = pb.DTYPE_FLOAT32
        tensor.shape.extend(shape)
        tensor.sparse_csr.values = np.ones(len(columns), np.float32).tobytes()
        tensor.sparse_csr.crow_indices = np.array(crow, np.int64).tobytes()
        tensor.sparse_csr.col_indices = np.array(columns, np.int64).tobytes()

    return change


def _audio(message: Any) -> None:
    message.data[0].model_input.add().dmel.dmel = b"x"


def _picture(message: Any) -> None:
    message.data[0].model_input.add().image.expected_tokens = 2**31 - 1
    message.data[0].model_input[-1].image.format = "png"


def _kind(message: Any) -> None:
    message.data[0].loss_fn_inputs["advantages"].dtype = pb.DTYPE_BFLOAT16


def _cut(message: Any) -> None:
    message.data[0].model_input[0].encoded_text.tokens = b"12345"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"\xff" * 20, "no ForwardBackwardRequest"),
        (broken(_shape), r"datum 0: advantages has the shape \[1099511627776\] and 6 values"),
        (broken(_sparse([0, 1], [0], [6, 2])), "row pointers do not fit"),
        (broken(_sparse([0, 1, 0, 1, 1, 1, 1], [0], [6, 2])), "row pointers do not fit"),
        (broken(_sparse([0, 1, 1, 1, 1, 1, 1], [2], [6, 2])), "columns do not fit"),
        (broken(_sparse([0, 1, 1, 1, 1, 1, 1], [-1], [6, 2])), "columns do not fit"),
        (broken(_sparse([0, 1, 1, 1, 1, 1, 1], [0], [6, 1 << 40])), "more than a request may have"),
        (broken(_sparse([0], [], [6])), r"CSR with the shape \[6\]"),
        (broken(_audio), "chunk of kind dmel"),
        (broken(_picture), "picture of 2147483647 tokens needs 8589934588 bytes"),
        (broken(_kind), "neither float32 nor int64"),
        (broken(_cut), "no multiple of 4"),
        (packed([datum(1)] * (MOST_DATUMS + 1)), "1025 datums; a request must have at most 1024"),
        (b"\x1a\x00" * 30_000, "no ForwardBackwardRequest"),
        (b"\x1a\xe0\xd4\x03" + b"\x0a\x00" * 30_000, "no ForwardBackwardRequest"),
    ],
)
def test_what_is_no_pass_is_refused_before_it_costs_memory(monkeypatch: pytest.MonkeyPatch, body: bytes, sentence: str) -> None:
    monkeypatch.setattr(wire, "MOST_FIELDS", 29_000)
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=sentence):
            read_call(body, "", MOST)
        assert tracemalloc.get_traced_memory()[1] < 2e6
    finally:
        tracemalloc.stop()


def test_a_bomb_of_zstd_is_never_unpacked_beyond_the_limit() -> None:
    known = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    unknown = compressor.compress(bytes(1 << 26)) + compressor.flush()
    assert len(known) + len(unknown) < 1 << 16
    for bomb in (known, unknown):
        tracemalloc.start()
        try:
            with pytest.raises(RequestError, match="unpacked; it must have at most 1048576") as refused:
                unpacked(bomb, "zstd", 1 << 20)
            assert refused.value.status == 413
            assert tracemalloc.get_traced_memory()[1] < 8e6
        finally:
            tracemalloc.stop()
    with pytest.raises(RequestError, match="no zstd frame"):
        unpacked(b"nothing", "zstd", 100)
    with pytest.raises(RequestError, match="Content-Encoding is 'gzip'"):
        unpacked(b"nothing", "gzip", 100)


def test_the_model_and_number_of_a_body_that_is_too_large_are_read_from_its_start() -> None:
    body = packed([datum(400, n) for n in range(500)], seq=300)
    assert read_address(body[:1000], "") == ("s:train:0", 300)
    assert read_address(zstandard.ZstdCompressor().compress(body)[: 1 << 18], "zstd") == ("s:train:0", 300)
    for head, encoding in ((b"", ""), (b"\xff" * 100, ""), (b"{}", ""), (b"x", "zstd"), (body[:5], "")):
        assert read_address(head, encoding) is None


def test_dense_values_of_csr_need_room() -> None:
    room = Room(100)
    values, ends, columns = np.ones(1, np.float32), np.array([0, 1, 1]), np.array([3])
    dense = densified("x", (2, 5), values, ends, columns, room)
    assert dense.tolist() == [[0, 0, 0, 1, 0], [0] * 5]
    assert room.left == 60
    with pytest.raises(RequestError, match="x of the shape"):
        densified("x", (2, 8), values, ends, columns, room)


def test_answers_of_a_pass_are_read_by_the_client_as_they_were() -> None:
    random = np.random.default_rng(0)
    outputs = [
        {"logprobs": random.random(shape).astype(np.float32), "ids": random.integers(0, 9, shape)}
        for shape in ((4,), (7,), (3, 2), (5, 2), (2, 4), (6,), (0,))
    ]
    answer = response_conv.deserialize_forward_backward_output(passed_bytes(Passed(outputs, {"loss:sum": 0.1, "x:max": 2.0})))
    assert answer.metrics == {"loss:sum": 0.1, "x:max": 2.0}
    for found, sent in zip(answer.loss_fn_outputs, outputs, strict=True):
        for name, values in sent.items():
            assert found[name].shape == [*values.shape]
            np.testing.assert_array_equal(found[name].to_numpy().reshape(values.shape), values)


def test_a_million_tokens_are_read_without_a_loop_over_them() -> None:
    def seconds(length: int) -> float:
        body = packed([datum(length, n) for n in range(64)])
        read_call(body, "", 1 << 28)
        return min(_timed(body) for _ in range(3))

    assert seconds(4096) < 0.05 + 20 * seconds(16)  # 256 times the tokens


def _timed(body: bytes) -> float:
    start = time.thread_time()
    read_call(body, "", 1 << 28)
    return time.thread_time() - start
