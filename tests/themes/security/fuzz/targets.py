"""What reads input of others, each as a function of bytes: only a `MegarlError` may come of them, in bounded time and memory.

`benchmarks/fuzz.py` runs these under atheris, guided by coverage; `test_fuzz.py` a few hundred inputs of each in the tests.
"""

from __future__ import annotations

import atexit
import functools
import json
import pickle
import shutil
import socket
import struct
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import MegarlError, written_out
from tests.config.smallest import WITHOUT_LIBRARIES
from tests.themes.security.fuzz import run_records


@dataclass(frozen=True)
class Target:
    """`run` reads an input; `seeds` are inputs to begin from, `words` what its formats are made of."""

    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...]


def run_quietly(target: Target, data: bytes) -> None:
    """One input. Raises whatever comes of it that is no `MegarlError`, and where its sentence cannot be written down."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            target.run(data)
        except MegarlError as error:
            written_out(str(error)).encode()


@functools.cache
def _folder() -> Path:
    """A folder in memory, where there is one, removed at the end of the process."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="megarl-fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# configs ---------------------------------------------------------------------------------------------------------------

_RL = WITHOUT_LIBRARIES.encode()
_SFT = b"""
run: {name: a}
model: {path: nowhere}
objective: {name: sft}
data: {train: {source: mixture, parts: [{source: jsonl, path: a}, {source: parquet, path: b}]}, rows_per_step: 8}
"""


def _config(data: bytes) -> None:
    from megarl.config import load_any
    from megarl.config.load import to_yaml

    path, _, override = data.partition(b"\0")
    file = _folder() / "config.yaml"
    file.write_bytes(path)
    overrides = [override.decode(errors="replace")] if override else []
    to_yaml(load_any(file, overrides))


# rows ------------------------------------------------------------------------------------------------------------------

_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@functools.cache
def tokenizer() -> Any:
    """A real one, of bytes, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    found = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", additional_special_tokens=special)
    found.chat_template = _CHATML
    return found


def _rows(data: bytes) -> None:
    from megarl.config.sections import DataConfig
    from megarl.config.sources import SourceConfig
    from megarl.data.prompts import rows_of
    from megarl.data.supervised import SupervisedBuilder, SupervisedSettings
    from megarl.data.tokenize import PromptBuilder

    kind, content = data[:1], data[1:]
    suffix = {b"a": "json", b"p": "parquet", b"w": "arrow"}.get(kind, "jsonl")
    folder = _folder() / "rows"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    file = folder / f"rows.{suffix}"
    file.write_bytes(content)
    if suffix in ("json", "arrow"):
        source = SourceConfig(source="dataset", path=str(folder))
    else:
        source = SourceConfig(source="parquet" if suffix == "parquet" else "jsonl", path=str(file))
    try:
        rows = list(rows_of(source))
    except MegarlError:
        return
    keys: dict[str, Any] = {"prompt_key": "p", "overlong_prompts": "drop", "max_prompt_tokens": 1 << 20}
    for template in ("auto", "never"):
        with suppress(MegarlError):
            PromptBuilder(tokenizer(), DataConfig(train=source, chat_template=template, **keys)).build(rows, prefix="train")
    for objective, named in (("sft", {}), ("sft", {"messages_key": "m"}), ("pairs", {}), ("kto", {}), ("steps", {})):
        with suppress(MegarlError):
            settings = SupervisedSettings(prompt_key="p", response_key="r", overlong="drop", max_tokens=1 << 20, **named)
            SupervisedBuilder(tokenizer(), objective, settings).build(rows, prefix="train")  # type: ignore[arg-type]


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue().to_pybytes())


def _arrow(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow

    table = pyarrow.Table.from_pylist(rows)
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


_ROWS: list[dict[str, Any]] = [
    {"p": "q", "r": "a", "chosen": "c", "rejected": "d", "label": True, "steps": [{"text": "s", "label": 1}]},
    {"p": [{"role": "user", "content": "hi"}], "m": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
    {"m": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}], "tools": [{"type": "function"}]},
]


# HTTP answers ----------------------------------------------------------------------------------------------------------


class _RawServer:
    """Answers every request with the bytes of `answer`, whatever was asked, and closes the connection."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.answer = b""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection, suppress(OSError):
                connection.settimeout(1)
                asked = b""
                while b"\r\n\r\n" not in asked:
                    asked += connection.recv(1 << 16) or b"\r\n\r\n"
                head, _, body = asked.partition(b"\r\n\r\n")
                lengths = [line[15:] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
                length = int(lengths[0]) if lengths else 0
                while len(body) < length and (more := connection.recv(1 << 16)):
                    body += more
                connection.sendall(self.answer)


_server = functools.cache(_RawServer)


def _http(data: bytes) -> None:
    import time

    from megarl.config.sections import DataConfig, RewardConfig
    from megarl.config.sources import SourceConfig
    from megarl.data.sample import Sample
    from megarl.rewards import build_rewards
    from megarl.rollout.engines.sglang.external import ExternalServer

    server, kind, body = _server(), data[:1], data[1:]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    if kind == b"z":
        head += b"Content-Encoding: gzip\r\n"
    server.answer = body if kind == b"r" else head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    source = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"))
    samples = [Sample("s", "g", "train-0", [1], [], [], [], [], "stop", "Q", "A", row={"answer": 3})]
    for name, given in (("http", {}), ("llm_judge", {"model": "judge"})):
        args = {"url": server.url, "retries": 0, "timeout_s": 3, **given}
        [(_, _, scorer)] = build_rewards([RewardConfig(name=name, args=args)], source).sources
        with suppress(MegarlError):
            for verdict in scorer(samples, time.monotonic() + 3):
                assert verdict is None or abs(verdict) < float("inf")
    with suppress(MegarlError):
        ExternalServer(server.url, None, 1.0).ask("server_info")


# checkpoints -----------------------------------------------------------------------------------------------------------


@functools.cache
def _checkpoint_seeds() -> tuple[bytes, ...]:
    """The files of a small checkpoint, each behind a letter that says which it is."""
    import torch

    from megarl.checkpoint.format.dist_format import StoredChunk, StoredKey, empty_object, write_metadata
    from megarl.runs.manifest import seal

    folder = _folder() / "made"
    folder.mkdir(exist_ok=True)
    key = StoredKey(torch.float32, (2, 2), (StoredChunk((0, 0), (2, 2), "__0_0.distcp", 0, 64),))
    (folder / "__0_0.distcp").write_bytes(bytes(64) + empty_object())
    write_metadata(folder, {"a": key}, {"b": ("__0_0.distcp", 64, len(empty_object()))})
    torch.save({"args": None, "a": [1, 2.5, {"b": torch.zeros(1)}]}, folder / "common.pt")
    (folder / "state.json").write_text(json.dumps({"step": 3, "sampler": {"epoch": 1}}))
    seal(folder, {"step": 3})
    names = {b"d": ".metadata", b"c": "common.pt", b"s": "state.json", b"m": "manifest.json"}
    tricks = [pickle.dumps([[]] * 3), b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b".", b"cos\nsystem\n."]
    return (*(letter + (folder / name).read_bytes() for letter, name in names.items()), *(b"d" + trick for trick in tricks))


def _checkpoint(data: bytes) -> None:
    from megarl.checkpoint.format.dist_format import DistFolder
    from megarl.checkpoint.format.safe_pickle import check_pickles
    from megarl.runs.manifest import check, made_by
    from megarl.runs.run_checkpoint import read_state

    _checkpoint_seeds()
    folder = _folder() / "made"
    names = {b"d": ".metadata", b"c": "common.pt", b"s": "state.json"}
    file = folder / names.get(data[:1], "manifest.json")
    whole = file.read_bytes()
    try:
        file.write_bytes(data[1:])
        readers = {".metadata": (check_pickles, _opened), "common.pt": (check_pickles,), "state.json": (read_state,)}
        for read in readers.get(file.name, (check, made_by)):
            with suppress(MegarlError):
                read(folder)
    finally:
        file.write_bytes(whole)
    assert DistFolder


def _opened(folder: Path) -> None:
    from megarl.checkpoint.format.dist_format import DistFolder

    opened = DistFolder(folder)
    for key, stored in opened.keys.items():
        for chunk in stored.chunks:
            opened.data_offset(key, chunk)


# safetensors -----------------------------------------------------------------------------------------------------------


def _safetensors(data: bytes) -> None:
    from megarl.models.hf_folder import HFFolder
    from megarl.models.registry import architecture_for

    folder = _folder() / "model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    kind, content = data[:1], data[1:]
    config = b'{"architectures": ["LlamaForCausalLM"]}'
    (folder / "config.json").write_bytes(content if kind == b"c" else config)
    if kind == b"i":
        (folder / "model.safetensors.index.json").write_bytes(content)
    header = content if kind != b"h" else struct.pack("<Q", len(content)) + content + bytes(16)
    (folder / "model.safetensors").write_bytes(header if kind in (b"h", b"f") else _tensors())
    opened = HFFolder(folder)
    with suppress(MegarlError):
        architecture_for(opened.config)
    with suppress(MegarlError):
        opened.entries()
    for name in opened.names:
        opened.shape(name), opened.dtype(name), opened.get_slice(name)[...]


def _tensors() -> bytes:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(16)


# tool calls ------------------------------------------------------------------------------------------------------------

_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]


def _tool_calls(data: bytes) -> None:
    from megarl.rollout.episodes.tool_calls import ToolCall, parse_turn

    turn = parse_turn(data.decode(errors="surrogateescape"), _TOOLS)
    for call in turn.calls:
        assert isinstance(call, ToolCall)
        assert isinstance(call.arguments, dict)
        assert call.name or call.problem
    assert isinstance(turn.text + turn.reasoning, str)


_CALLS = (
    '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
    "<tool_call><function=f><parameter=a>\n1\n</parameter></function></tool_call>",
    "<think>t</think>x<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>",
    '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>',
    '<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>commentary to=functions.f <|message|>{"a": 1}<|call|>',
    '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
    '[TOOL_CALLS]f[ARGS]{"a": 1}',
    '{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}',
)
_CALL_WORDS = (
    *("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|channel|>", "<|message|>", "<|start|>", "<|call|>", "to="),
    *("[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", '"name"', '"arguments"', '"parameters"', "```json", "functions."),
)


# chat templates --------------------------------------------------------------------------------------------------------

_CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]},
]


def _chat_template(data: bytes) -> None:
    from megarl.data.chat import ChatTemplate
    from megarl.data.rows import Origin, RowPlace
    from megarl.data.turn_spans import Conversation, TurnSpans

    tokenizer().chat_template = data.decode(errors="replace")
    try:
        with quick_templates():
            template = ChatTemplate(tokenizer(), "auto", None, _TOOLS)
            if not template.is_used:
                return
            place = RowPlace(Origin("data.train"), 0)
            with suppress(MegarlError):
                template.render(_CONVERSATION[:2], place, ask=True).encode(errors="replace")
            with suppress(MegarlError):
                template.fitted(_CONVERSATION, place, after=0)
            conversation = Conversation(_CONVERSATION, place)
            with suppress(MegarlError):
                TurnSpans(template, "it needs another template").each(conversation)
            TurnSpans(template, "it needs another template").together(conversation)
    finally:
        tokenizer().chat_template = _CHATML


@contextmanager
def quick_templates() -> Iterator[None]:
    """Templates have a second and 128 MiB, so that thousands can be tried."""
    from megarl.data import chat_rendering

    before = chat_rendering.LONGEST_S, chat_rendering.MOST_BYTES
    chat_rendering.LONGEST_S, chat_rendering.MOST_BYTES = 1.0, 128 << 20
    try:
        yield
    finally:
        chat_rendering.LONGEST_S, chat_rendering.MOST_BYTES = before


_TEMPLATES = (
    _CHATML,
    "{{ bos_token }}{% set ns = namespace(a=0) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{{ m.content | trim }}"
    "{% endfor %}",
    "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(messages[0]['content']) }}{{ tools | tojson(indent=2) }}",
    "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}{{ strftime_now('%Y') }}",
    "{%- for m in messages %}{% generation %}{{ m['content'].split('a')[-1].lstrip() }}{% endgeneration %}{%- endfor -%}",
)
_JINJA = (
    *("{% for ", "{% endfor %}", "{% if ", "{% endif %}", "{% set ", "{% macro f(x) %}", "{% endmacro %}", "{{ ", " }}"),
    *("{% ", " %}", " in ", "range(", "messages", "tools", "['content']", ".role", " | tojson", " | join", " * ", " ~ "),
    *("namespace(", "loop.index", "__class__", "__globals__", "__init__", ".format(", "f(", "| replace(", "| center("),
    *("cycler(", "lipsum(", "dict(", "| map("),
)

TARGETS = {
    "config": Target(
        _config,
        (_RL, _SFT, _RL + b"\0run.steps=4"),
        (b"&a ", b"*a", b"<<: ", b"!!", b"- ", b": ", b"{}", b"[]", b"1e9"),
    ),
    "rows": Target(
        _rows,
        (
            *(b"l" + json.dumps(row).encode() for row in _ROWS),
            b"a" + json.dumps(_ROWS).encode(),
            b"p" + _parquet(_ROWS[:1]),
            b"w" + _arrow(_ROWS[:1]),
        ),
        (b'"role"', b'"content"', b'"user"', b'"assistant"', b'"tool_calls"', b'"from"', b"null", b"\\ud800", b"\\u0000"),
    ),
    "http_answers": Target(
        _http,
        (
            b'j{"rewards": [0.5]}',
            b'j{"choices": [{"message": {"content": "Score: 3"}}]}',
            b"rHTTP/1.1 307 Other\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n",
            b"rHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
            b"z\x1f\x8b\x08\0\0\0\0\0\2\xff",
        ),
        (b'"rewards"', b'"choices"', b"Content-Encoding: ", b"chunked", b"deflate", b"Content-Length: ", b"1e999"),
    ),
    "checkpoints": Target(
        _checkpoint, _checkpoint_seeds(), (b"torch\n", b"c", b"R", b"\x8e", b"\x93", b'"files"', b'"xxh3_128"', b"../")
    ),
    "safetensors": Target(
        _safetensors,
        (
            b"f" + _tensors(),
            b"h" + json.dumps({"a": {"dtype": "BF16", "shape": [8], "data_offsets": [0, 16]}}).encode(),
            b'i{"weight_map": {"a": "model.safetensors"}}',
            b'i{"weight_map": {"a": "../model/model.safetensors"}}',
            b'c{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "auto_map": {"AutoConfig": "a.B"}}',
        ),
        (b'"dtype"', b'"F32"', b'"shape"', b'"data_offsets"', b'"weight_map"', b"model.safetensors", b"../", b"1e9", b"-1"),
    ),
    "tool_calls": Target(_tool_calls, tuple(call.encode() for call in _CALLS), tuple(word.encode() for word in _CALL_WORDS)),
    "chat_templates": Target(
        _chat_template, tuple(template.encode() for template in _TEMPLATES), tuple(word.encode() for word in _JINJA)
    ),
}
TARGETS |= {
    name: Target(run_records.reader(read, lambda: _folder()), run_records.seeds(_folder()), run_records.WORDS)
    for name, read in run_records.READERS.items()
}
