"""What users get wrong, as cases: configs, data files, model folders, HTTP answers and command lines, written and fuzzed.

A case fills its own folder and says what is called there. Everything follows from the seed.
"""

from __future__ import annotations

import json
import random
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megarl.config import config_fields
from megarl.config.renamed import RENAMED

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "tiny-arithmetic"

BASE: dict[str, Any] = {
    "run": {"folder": "runs", "name": "bad", "steps": 2},
    "model": {"path": str(MODEL), "dtype": "float32"},
    "policy": {"max_tokens_per_micro_batch": 512},
    "data": {"train": {"name": "basic_arithmetic", "limit": 8}, "max_prompt_tokens": 128},
    "rollout": {"engine": "embedded", "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6},
    "rewards": [{"name": "reasoning_gym"}],
}
SUPERVISED: dict[str, Any] = {key: BASE[key] for key in ("run", "model", "policy")} | {
    "data": {"train": {"source": "jsonl", "path": "rows.jsonl"}, "rows_per_step": 2, "max_tokens": 64}
}


@dataclass(frozen=True)
class Case:
    """`prepare(folder)` fills an empty folder and returns argv, or what to call instead of the command line."""

    kind: str
    name: str
    prepare: Callable[[Path], list[str] | Callable[[], int]]


def all_cases(seed: int) -> list[Case]:
    """Every case, in an order that a prefix of samples all kinds of."""
    by_kind = [list(make(random.Random(f"{seed}-{make.__name__}"))) for make in (_configs, _data, _models, _http, _cli)]
    longest = max(map(len, by_kind))
    return [cases[place] for place in range(longest) for cases in by_kind if place < len(cases)]


# configs --------------------------------------------------------------------------------------------------------------

_FILES: dict[str, bytes | None] = {
    "missing file": None,
    "empty file": b"",
    "only a comment": b"# nothing\n",
    "a list": b"- model\n",
    "a number": b"3\n",
    "binary": bytes(range(256)),
    "utf-16": "model: {path: x}\n".encode("utf-16"),
    "nul bytes": b"model: {path: 'a\0b'}\n",
    "tab indent": b"model:\n\tpath: x\n",
    "unclosed quote": b"model: {path: 'x}\n",
    "unclosed brace": b"model: {path: x\n",
    "key twice": b"model: {path: x}\nmodel: {path: y}\n",
    "unknown alias": b"model: *nowhere\n",
    "alias of itself": b"model: &m {path: *m}\n",
    "deep nesting": b"model: " + b"[" * 3000 + b"]" * 3000 + b"\n",
    "python tag": b"model: !!python/object/apply:os.getcwd []\n",
    "own tag": b"model: !thing {path: x}\n",
    "number as key": b"3: {path: x}\n",
    "list as key": b"? [a, b]\n: 3\n",
    "mapping as key": b"? {a: b}\n: 3\n",
    "date as value": b"model: {path: 2024-01-01}\n",
    "two documents": b"model: {path: x}\n---\nmodel: {path: y}\n",
    "merge of no mapping": b"a: &a [1]\nmodel: {<<: *a}\n",
    "aliases of aliases": b"a: &a [x, x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (n, n, b", ".join([b"*%c" % (n - 1)] * 9)) for n in range(98, 112)),
    "huge integer": b"model: {path: x}\nrun: {steps: 1" + b"0" * 5000 + b"}\n",
    "long key": b"a" * 100_000 + b": 1\n",
    "json cut off": b'{"model": {"path": "x"',
    "html": b"<html><body>404</body></html>\n",
}
_OVERRIDES = [
    "algorithm.clip_low=1.5", "algorithm.mini_batches=3", "algorithm.truncated_responses=bootstrap",
    "algorithm.kl={apply_to: reward, estimator: k3}",
    "algorithm.kl.target=1", "algorithm.shaping.overlong_tokens=100", "algorithm.rollout_correction={mode: mis_token, low: 3}",
    "algorithm.advantage=nowhere:function", "algorithm.advantage=grpo_process", "critic.warmup_steps=2", "run.eval_every=1",
    "run.guards=[stop kl]", "run.guards=[rollback if kl/reference above 1]",
    "run.guards=[{metric: kl/reference, action: stop}]",
    "run.guards=[{metric: kl/reference, above: 1, action: rollback}]",
    "run.guards=[{metric: a, above: 1, below: 2, action: stop}]", "run.keep_best=accuracy",
    "run.name=a/b/../../..", "run.resume=nowhere", "policy.layout={tp: 3}", "policy.layout={pp: 3}", "policy.layout={ep: 2}",
    "policy.layout={tp: 2, vpp: 2}", "policy.layout={dp: 3}", "policy.max_tokens_per_micro_batch=8", "rollout.tp=3",
    "rollout.engine=replay", "rollout.samples_per_prompt=1", "reference.reset_every=x", "ptx.coef=0.5", "rewards=[]",
    "data.train.name=no_such_task", "data.train.args={no_such: 1}", "data.train.weight=2", "data.train.source=mixture",
    "data.train={source: python, name: nocolon}", "data.prompt_key=nothing", "data.chat_template=always",
    "data.max_prompt_tokens=1", "rewards=[{name: http}]", "rewards=[{name: http, args: {url: 'ftp://x'}}]",
    "rewards=[{name: exact_numbr}]", "rewards=[{name: exact_number, args: {x: 1}}]",
    "rewards=[{name: math_verify, args: {x: (hidden)}}]", "rollout.engine_args={no_such_argument: 1}",
    "rollout.episode.kind=tools", "model.fp8=hybrid", "policy.optimizer={lr: 1e-6, min_lr: 1}", "trackers.backends=[comet]",
]  # fmt: skip

_WRONG_SECTIONS = (
    "policy.lr", "rollout.lr", "run.eval", "run.temperature", "data.seeds", "algorithm.samples_per_prompt", "rollout.staleness",
    "rollout.guards", "critic.share_prompts", "policy.lam", "model.layout", "rollout.urls", "resources.engines", "data.rewards",
)  # fmt: skip


def _configs(chance: random.Random) -> Iterator[Case]:
    for name, content in _FILES.items():
        yield Case("config", name, lambda folder, content=content: _config_file(folder, content))
    for override in _OVERRIDES:
        yield Case("config", override, lambda folder, override=override: [*_train(folder), override])
    for name in [*RENAMED, *_WRONG_SECTIONS]:
        text = f"{name.replace('[]', '.0')}=1"
        yield Case("config", text, lambda folder, text=text: [*_train(folder), text])
    for leaf in chance.sample(config_fields(), 50):
        value = chance.choice(_wrong_values(leaf.allowed_values))
        name = leaf.name.replace("[]", ".0")
        yield Case("config", f"{name}={value}"[:80], lambda folder, text=f"{name}={value}": [*_train(folder), text])
    for leaf in chance.sample(config_fields(), 15):
        name = _misspelled(leaf.name.replace("[]", ".0"), chance)
        yield Case("config", f"{name}=1", lambda folder, name=name: [*_train(folder), f"{name}=1"])


def _wrong_values(allowed_values: str) -> list[str]:
    """YAML that a leaf of this kind cannot take."""
    if allowed_values.startswith(("a whole number", "a number")):
        return ["much", "[1]", "{a: 1}", ".nan", "true", "-1e999", "'3'"]
    if allowed_values.startswith("true or false"):
        return ["3", "perhaps", "[]", "null"]
    if allowed_values.startswith("text"):
        return ["3", "[a]", "{a: b}", "true"]
    if allowed_values.startswith("a mapping"):
        return ["3", "text", "[1]", "null"]
    if allowed_values.startswith(("a list", "a section")):
        return ["3", "text", "{no_such_key: 1}", "[[1, 2], {}]"]
    return ["3", "no-such-name", "[]", "{}"]


def _misspelled(name: str, chance: random.Random) -> str:
    head, _, last = name.rpartition(".")
    place = chance.randrange(len(last))
    return f"{head}.{last[:place]}{chance.choice('xqz')}{last[place:]}"


def _config_file(folder: Path, content: bytes | None) -> list[str]:
    if content is not None:
        (folder / "run.yaml").write_bytes(content)
    return ["train", "run.yaml"]


def _train(folder: Path, tree: dict[str, Any] = BASE, command: str = "train") -> list[str]:
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return [command, "run.yaml"]


# data -----------------------------------------------------------------------------------------------------------------

_ROW = {"question": "1+1=", "answer": "2"}
_ROWS: dict[str, bytes] = {
    "no JSON": b"hello\n",
    "cut off": json.dumps(_ROW).encode()[:-4],
    "a list": b"[1, 2]\n",
    "a number": b"3\n",
    "null": b"null\n",
    "nothing": b"",
    "blank lines": b"\n\n\n",
    "binary": bytes(range(128, 256)),
    "nul bytes": b'{"question": "a"}\0\n',
    "utf-16": (json.dumps(_ROW) + "\n").encode("utf-16"),
    "deep": b'{"question": ' + b"[" * 5000 + b"]" * 5000 + b"}\n",
    "no prompt": b'{"q": "x", "answer": "1"}\n',
    "no answer": b'{"question": "x"}\n',
    "prompt a number": b'{"question": 3, "answer": "1"}\n',
    "prompt null": b'{"question": null, "answer": "1"}\n',
    "prompt empty": b'{"question": "", "answer": "1"}\n',
    "prompt a mapping": b'{"question": {"a": 1}, "answer": "1"}\n',
    "no messages": b'{"question": [], "answer": "1"}\n',
    "message without role": b'{"question": [{"content": "x"}], "answer": "1"}\n',
    "message with a number": b'{"question": [{"role": "user", "content": 3}], "answer": "1"}\n',
    "prompt too long": json.dumps({"question": "1+" * 5000, "answer": "2"}).encode(),
    "good row, then none": json.dumps(_ROW).encode() + b"\n{broken\n",
}
_SUPERVISED_ROWS: dict[str, tuple[str, Any]] = {
    "sft without response": ("sft", {"prompt": "1"}),
    "sft with a number": ("sft", {"prompt": "1", "response": 3}),
    "sft empty response": ("sft", {"prompt": "1", "response": ""}),
    "sft too long": ("sft", {"prompt": "1" * 50, "response": "2" * 50}),
    "pair without rejected": ("dpo", {"prompt": "1", "chosen": "2"}),
    "pair of equals": ("dpo", {"prompt": "1", "chosen": "2", "rejected": "2"}),
    "kto label text": ("kto", {"prompt": "1", "response": "2", "label": "good"}),
    "steps without labels": ("process_reward_model", {"prompt": "1", "steps": ["2"]}),
    "steps and labels differ": ("process_reward_model", {"prompt": "1", "steps": ["2", "3"], "label": [1]}),
}
_PYTHON = {
    "raises": "def rows():\n    raise ValueError('no')\n",
    "exits": "raise SystemExit(3)\n",
    "syntax error": "def rows(:\n",
    "no function": "x = 1\n",
    "not callable": "rows = 3\n",
    "a number": "def rows():\n    return 3\n",
    "numbers": "def rows():\n    return [1, 2]\n",
    "nothing": "def rows():\n    return []\n",
}


def _data(chance: random.Random) -> Iterator[Case]:
    for name, content in _ROWS.items():
        yield Case("data", f"rows: {name}", lambda folder, content=content: _with_rows(folder, content))
    for name, (objective, row) in _SUPERVISED_ROWS.items():
        yield Case("data", name, lambda folder, o=objective, row=row: _with_supervised_row(folder, o, row))
    for name, code in _PYTHON.items():
        yield Case("data", f"python source: {name}", lambda folder, code=code: _with_python(folder, code))
    for place in range(8):
        start = chance.randrange(len(_PARQUET_LIKE))
        yield Case("data", f"parquet {place}", lambda folder, start=start: _with_parquet(folder, _PARQUET_LIKE[start:] * 3))
    for number in range(12):
        line = bytearray(json.dumps(_ROW).encode())
        line[chance.randrange(len(line) - 24)] = chance.choice(b'{}[]"\\\0\xff')
        line[0:1] = chance.choice([b"", b"{", b"["]) + bytes([chance.randrange(128, 256)])
        yield Case("data", f"fuzzed row {number}", lambda folder, line=bytes(line): _with_rows(folder, line + b"\n"))


_PARQUET_LIKE = b"PAR1\x15\x04\x15\x10\x15\x14L\x15\x02\x15\x00\x12\x00\x00PAR1"


def _with_rows(folder: Path, content: bytes) -> list[str]:
    (folder / "rows.jsonl").write_bytes(content)
    tree = BASE | {"data": BASE["data"] | {"train": {"source": "jsonl", "path": "rows.jsonl"}}}
    return _train(folder, tree | {"rewards": [{"name": "exact_number"}]})


def _with_supervised_row(folder: Path, objective: str, row: Any) -> list[str]:
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    command = {"sft": "sft", "process_reward_model": "reward-model"}.get(objective, "preference")
    return _train(folder, SUPERVISED | {"objective": {"name": objective}}, command)


def _with_python(folder: Path, code: str) -> list[str]:
    (folder / "own_rows.py").write_text(code)
    return _train(folder, BASE | {"data": {"train": {"source": "python", "name": "own_rows:rows"}}})


def _with_parquet(folder: Path, content: bytes) -> list[str]:
    (folder / "rows.parquet").write_bytes(content)
    return _train(folder, BASE | {"data": {"train": {"source": "parquet", "path": "rows.parquet"}}})


# models ---------------------------------------------------------------------------------------------------------------

_MODEL_CHANGES: list[tuple[str, Any]] = [
    ("num_attention_heads", 0), ("num_attention_heads", -4), ("num_attention_heads", "four"), ("num_attention_heads", None),
    ("num_hidden_layers", 0), ("num_hidden_layers", "x"), ("num_hidden_layers", []), ("hidden_size", None),
    ("hidden_size", "x"), ("intermediate_size", None), ("intermediate_size", {}), ("model_type", "no-such-model"),
    ("model_type", 3), ("model_type", None), ("vocab_size", "many"), ("num_key_value_heads", 3),
    ("architectures", ["NoSuchForCausalLM"]),
]  # fmt: skip
_MODEL_FILES: dict[str, dict[str, bytes | None]] = {
    "no config.json": {"config.json": None},
    "empty config.json": {"config.json": b""},
    "config.json a list": {"config.json": b"[]"},
    "config.json a number": {"config.json": b"3"},
    "config.json binary": {"config.json": bytes(range(256))},
    "config.json cut": {"config.json": b'{"model_type": "llama", "num_att'},
    "config.json deep": {"config.json": b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"},
    "no tokenizer": {"tokenizer.json": None, "tokenizer_config.json": None},
    "tokenizer.json empty": {"tokenizer.json": b""},
    "tokenizer.json cut": {"tokenizer.json": b'{"version": "1.0", "model": {'},
    "tokenizer.json binary": {"tokenizer.json": bytes(range(256))},
    "tokenizer.json of another kind": {"tokenizer.json": b'{"model": {"type": "NoSuch"}}'},
}
_WEIGHTS = ("missing", "empty", "header of garbage", "cut", "header too long", "other file")


def _models(chance: random.Random) -> Iterator[Case]:
    for name, value in _MODEL_CHANGES:
        yield Case("model", f"{name}={value}", lambda folder, n=name, v=value: _with_model(folder, {}, {n: v}))
    for what, files in _MODEL_FILES.items():
        yield Case("model", what, lambda folder, files=files: _with_model(folder, files, {}))
    for what in _WEIGHTS:
        yield Case("model", f"weights: {what}", lambda folder, what=what: _with_weights(folder, what))
    yield Case("model", "a file", lambda folder: [*_train(folder), "model.path=run.yaml"])
    yield Case("model", "empty folder", lambda folder: [*_train(folder), f"model.path={_made(folder / 'm')}"])
    whole = (MODEL / "config.json").read_bytes()
    for number in range(8):
        cut = whole[: chance.randrange(1, len(whole) - 2)]
        yield Case("model", f"fuzzed config.json {number}", lambda f, cut=cut: _with_model(f, {"config.json": cut}, {}))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _copied(folder: Path) -> Path:
    return Path(shutil.copytree(MODEL, folder / "model"))


def _with_model(folder: Path, files: dict[str, bytes | None], changes: dict[str, Any]) -> list[str]:
    model = _copied(folder)
    if changes:
        tree = json.loads((model / "config.json").read_text()) | changes
        (model / "config.json").write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))
    for name, content in files.items():
        (model / name).unlink()
        if content is not None:
            (model / name).write_bytes(content)
    return [*_train(folder), "model.path=model"]


def _with_weights(folder: Path, what: str) -> list[str]:
    """Weights are read by whoever needs them first; here that is the conversion."""
    weights = _copied(folder) / "model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    content = {
        "empty": b"",
        "header of garbage": (40).to_bytes(8, "little") + b"x" * 100,
        "cut": whole[: len(whole) // 2],
        "header too long": (2**60).to_bytes(8, "little") + b"{}",
        "other file": json.dumps({"a": 1}).encode(),
    }.get(what)
    if content is not None:
        weights.write_bytes(content)
    return ["convert", "import", "model", "out"]


# HTTP -----------------------------------------------------------------------------------------------------------------

_ANSWERS: dict[str, bytes] = {
    "no JSON": b"hello",
    "empty": b"",
    "html": b"<html>500</html>",
    "a list": b"[1, 2]",
    "null": b"null",
    "no rewards": b'{"scores": [1, 2]}',
    "too few": b'{"rewards": [1]}',
    "too many": b'{"rewards": [1, 2, 3]}',
    "a text": b'{"rewards": ["1", "2"]}',
    "a boolean": b'{"rewards": [true, false]}',
    "null reward": b'{"rewards": [null, 1]}',
    "NaN": b'{"rewards": [NaN, 1]}',
    "Infinity": b'{"rewards": [Infinity, 1]}',
    "a huge number": b'{"rewards": [1e999, 1]}',
    "a huge integer": b'{"rewards": [1' + b"0" * 400 + b", 1]}",
    "nested": b'{"rewards": [[1], [2]]}',
    "deep": b'{"rewards": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "cut": b'{"rewards": [1, ',
    "binary": bytes(range(256)),
    "utf-16": '{"rewards": [1, 2]}'.encode("utf-16"),
}
_RAW: dict[str, bytes] = {
    "closes at once": b"",
    "no HTTP": b"hello\r\n\r\n",
    "status only": b"HTTP/1.1 200 OK\r\n",
    "shorter than said": b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{}",
    "length no number": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n{}",
    "chunks of garbage": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "gzip that is none": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n{}{}",
    "404": b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}",
    "500": b"HTTP/1.1 500 Oops\r\nContent-Length: 2\r\n\r\n{}",
    "401": b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\n{}",
    "redirect to itself": b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",
    "redirect to a file": b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n",
    "endless header": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n{}",
    "never answers": b"...",
}
_JUDGE: dict[str, bytes] = {
    "judge: no choices": b"{}",
    "judge: empty choices": b'{"choices": []}',
    "judge: message null": b'{"choices": [{"message": null}]}',
    "judge: choices a number": b'{"choices": 3}',
}


def _http(chance: random.Random) -> Iterator[Case]:
    for name, body in _ANSWERS.items():
        yield Case("http", name, lambda folder, body=body: _scoring(_answer(body)))
    for name, raw in _RAW.items():
        yield Case("http", name, lambda folder, raw=raw: _scoring(raw))
    for name, body in _JUDGE.items():
        args = {"model": "judge"}
        yield Case("http", name, lambda folder, body=body, args=args: _scoring(_answer(body), "llm_judge", args))
    whole = b'{"rewards": [0.5, 1.5], "scores": [1]}'
    for number in range(10):
        body = whole[: chance.randrange(1, len(whole) - 1)] + bytes(chance.choices(range(256), k=3))
        yield Case("http", f"fuzzed answer {number}", lambda folder, body=body: _scoring(_answer(body)))


def _answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def _scoring(raw: bytes, reward: str = "http", args: dict[str, Any] | None = None) -> Callable[[], int]:
    """Scores two samples by a server on loopback that answers `raw`, as a run does."""

    def score() -> int:
        from megarl.config.sections import DataConfig, RewardConfig
        from megarl.config.sources import SourceConfig
        from megarl.data.sample import Sample
        from megarl.rewards import build_rewards

        url = f"http://127.0.0.1:{_serving(raw)}"
        patience = {"timeout_s": 0.3, "retries": 1, "backoff_s": 0.01}
        settings = [RewardConfig(name=reward, args={"url": url, **patience, **(args or {})})]
        samples = [Sample(f"s{n}", "g", "r", [1], [], [], [], [], "stop", "Q ", "it is 3", row={"answer": 3}) for n in range(2)]
        build_rewards(settings, DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"))).score(samples, 10.0)
        return 0

    return score


def _serving(raw: bytes) -> int:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            connection, _ = server.accept()
            if raw == b"...":  # keeps the connection and says nothing
                _KEPT.append(connection)
                continue
            with connection:
                connection.settimeout(1.0)
                connection.recv(65536)
                connection.sendall(raw)

    threading.Thread(target=serve, daemon=True).start()
    return int(server.getsockname()[1])


_KEPT: list[socket.socket] = []

# command lines --------------------------------------------------------------------------------------------------------

_LINES = [
    [], ["trian"], ["train"], ["train", "run.yaml", "--speed"], ["train", "run.yaml", "run.steps"],
    ["train", "run.yaml", "=3"], ["train", "run.yaml", "run..steps=3"], ["train", "run.yaml", ".steps=3"],
    ["train", "run.yaml", "run.steps.x=3"], ["train", "run.yaml", "rewards.7.name=x"],
    ["train", "run.yaml", "rewards.name=x"], ["train", "run.yaml", "run.steps=[1"], ["train", "run.yaml", "run.steps=\0"],
    ["train", "run.yaml", "run.name=\ud800"], ["train", "."], ["train", "/dev/null"], ["sft", "run.yaml"],
    ["preference", "run.yaml"], ["reward-model", "run.yaml"], ["eval", "run.yaml"], ["eval", "run.yaml", "--checkpoint"],
    ["generate", "run.yaml"], ["generate", "run.yaml", "--out", "run.yaml"],
    ["generate", "run.yaml", "--out", "run.yaml/x"], ["generate", "run.yaml", "--out", "x", "--as", "pears"],
    ["generate", "run.yaml", "--out", "x", "--as", "pairs", "rollout.samples_per_prompt=1", "algorithm.advantage=reinforce"],
    ["serve-reward", "run.yaml", "--port", "many"], ["serve-reward", "run.yaml", "--port", "99999"],
    ["serve-reward", "run.yaml", "--host", "0.0.0.0"], ["serve-reward", "run.yaml", "--host", "no.such.host.invalid"],
    ["serve-reward", "run.yaml", "--token-file", "nothing"], ["serve-reward"], ["data"], ["data", "show"],
    ["data", "inspect"], ["data", "inspect", "x.jsonl"], ["data", "inspect", "x.jsonl", "--model", "nowhere"],
    ["data", "inspect", "run.yaml", "--model", str(MODEL)],
    ["data", "inspect", "x.jsonl", "--model", str(MODEL), "--rows", "x"], ["convert"], ["convert", "import"],
    ["convert", "import", "nowhere", "out"], ["convert", "export", "nowhere", "out"],
    ["convert", "verify", "nowhere", "nothing"], ["convert", "import", "run.yaml", "out"], ["config", "nowhere.yaml"],
    ["config", "run.yaml", "x=1"], ["doctor", "run.steps=3"], ["plan"], ["plan", "nowhere.yaml"], ["report"],
    ["report", "nowhere"], ["compare", "nowhere", "nothing"], ["samples", "nowhere"], ["samples", "."], ["chat", "nowhere"],
    ["submit"], ["submit", "slrum", "run.yaml"], ["--speed"], ["train", "run.yaml", "run.resume=run.yaml"],
    ["plan", "run.yaml", "--gpu", "x"],
]  # fmt: skip


def _cli(chance: random.Random) -> Iterator[Case]:
    for words in _LINES:
        yield Case(
            "cli", " ".join(words)[:80].encode(errors="replace").decode(), lambda folder, words=words: _line(folder, words)
        )


def _line(folder: Path, words: list[str]) -> list[str]:
    _train(folder)
    return list(words)


WARM_UP: list[Callable[[Path], list[str]]] = [
    lambda folder: _with_rows(folder, _ROWS["no answer"]),
    lambda folder: [*_train(folder), "rewards=[{name: exact_number, args: {x: 1}}]"],
    lambda folder: _with_supervised_row(folder, "sft", {"prompt": "1"}),
    lambda folder: ["data", "inspect", "run.yaml", "--model", str(MODEL)],
    lambda folder: ["convert", "import", "nowhere", "out"],
    lambda folder: ["report", "nowhere"],
    lambda folder: ["submit", "slrum", "run.yaml"],
]
"""Calls after which a child has nothing left to import."""
