"""Models and data sets by their ids on the Hugging Face hub: the hub library's own download, from a hub of the test's own."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants

from megarl.config import load_any, parse_config
from megarl.config.sources import SourceConfig
from megarl.data.hub_dataset import choose_files, read_configurations
from megarl.data.prompts import load_rows
from megarl.errors import ConfigError, DataError, ModelError
from megarl.models.check_layouts import check_models
from megarl.models.from_hub import model_here, models_here
from megarl.system.hub import CachedModel, HubRepo
from tests.data.hub_server import Hub, commit_of, serving, write_repo

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 256,
}  # fmt: skip
MODEL = {
    "config.json": json.dumps(LLAMA).encode(),
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"the same weights",
    "original/params.json": b"{}",
    "modeling.py": b"raise SystemExit",
}


def parquet(*rows: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
    return file.getvalue()


GSM8K_CARD = b"""---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# Grade school math
"""
GSM8K = {
    "README.md": GSM8K_CARD,
    "main/train-00001-of-00002.parquet": parquet({"question": "2?", "answer": "#### 2"}),
    "main/train-00000-of-00002.parquet": parquet(
        {"question": "0?", "answer": "#### 0"}, {"question": "1?", "answer": "#### 1"}
    ),
    "main/test-00000-of-00001.parquet": parquet({"question": "9?", "answer": "#### 9"}),
    "socratic/train-00000-of-00001.parquet": parquet({"question": "s?", "answer": "#### 7"}),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    write_repo(tmp_path / "hub", "models", "Org/tiny", MODEL)
    write_repo(tmp_path / "hub", "models", "Org/tiny", MODEL | {"config.json": b'{"model_type": "other"}'}, "v2")
    write_repo(tmp_path / "hub", "datasets", "openai/gsm8k", GSM8K)
    with serving(tmp_path / "hub") as served:
        use(monkeypatch, served.url)
        yield served


def use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """As HF_ENDPOINT does before the library is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def rows_of(path: str, **fields: Any) -> list[dict[str, Any]]:
    return load_rows(SourceConfig(source="dataset", path=path, **fields))


def test_a_model_is_downloaded_once_without_what_is_not_read(hub: Hub) -> None:
    folder = Path(model_here("Org/tiny", "model.path"))
    assert folder.name == commit_of("main")
    there = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert there == {name: MODEL[name] for name in ("config.json", "tokenizer.json", "model.safetensors")}
    before = len(hub.downloads)
    assert model_here("Org/tiny", "model.path") == str(folder)
    assert len(hub.downloads) == before == 3


def test_a_revision_can_be_pinned(hub: Hub) -> None:
    for revision in ("v2", commit_of("v2")):
        folder = Path(model_here(f"Org/tiny@{revision}", "model.path"))
        assert folder.name == commit_of("v2")
        assert json.loads((folder / "config.json").read_text()) == {"model_type": "other"}


def test_a_local_folder_of_the_name_wins_unless_the_hub_is_named(hub: Hub) -> None:
    Path("Org/tiny").mkdir(parents=True)
    assert model_here("Org/tiny", "model.path") == "Org/tiny"
    assert model_here("Org/tinny", "model.path") == "Org/tinny"  # misspelled: a local folder Org is here
    assert not hub.asked
    assert Path(model_here("hf://Org/tiny", "model.path")).name == commit_of("main")


@pytest.mark.parametrize("path", ["models/a/b", "/abs/model", "./Org/tiny", "../Org/tiny", "~/tiny", "tiny", "Org/tiny/"])
def test_other_paths_are_local(path: str) -> None:
    assert HubRepo.meant_by("model", path) is None


def test_every_model_of_a_config_is_found_and_the_config_says_nothing_else(hub: Hub) -> None:
    config = parse_config(
        {
            "model": {"path": "Org/tiny"}, "data": {"train": {"name": "chain_sum"}}, "rewards": [{"name": "exact_number"}],
            "reference": {"path": "hf://Org/tiny@v2"}, "rollout": {"servers": {"model_path": "Org/tiny"}},
            "reward_model": {"path": "my/local/folder"},
            "algorithm": {"distillation": {"coef": 0.5}},
            "teacher": {"named": [{"name": "a", "path": "my/local/folder"}, {"name": "b", "path": "Org/tiny@v2"}]},
        }
    )  # fmt: skip
    found = models_here(config)
    main, v2 = (Path(model_here(f"Org/tiny@{revision}", "x")) for revision in ("main", "v2"))
    assert (found.model.path, found.reference.path, found.rollout.servers.model_path) == (str(main), str(v2), str(main))
    assert found.reward_model.path == "my/local/folder"
    assert [teacher.path for teacher in found.teacher.named] == ["my/local/folder", str(v2)]
    same = {"teacher": config.teacher, "model": config.model, "reference": config.reference, "rollout": config.rollout}
    assert found.model_copy(update=same) == config


def test_a_run_stands_for_the_model_that_it_exported(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    policy = run / "checkpoints" / "step_000002" / "policy"
    policy.mkdir(parents=True)
    (policy / ".metadata").touch()
    (policy.parent / "state.json").touch()
    for named in (run, run / "checkpoints", policy.parent, policy):
        with pytest.raises(ModelError) as caught:
            model_here(str(named), "reference.path")
        assert str(caught.value) == (
            f"reference.path is '{named}', a run or checkpoint without an exported model; `megarl convert export {named} "
            "FOLDER` writes one"
        )
    (run / "model").mkdir()
    (run / "model" / "adapter_config.json").touch()
    with pytest.raises(ModelError, match=f"exported adapters; `megarl convert merge --base MODEL --adapter {run}/model --out"):
        model_here(str(run), "model.path")
    (run / "model" / "config.json").touch()
    config = parse_config(
        {
            "model": {"path": str(run)}, "data": {"train": {"name": "chain_sum"}}, "rewards": [{"name": "exact_number"}],
            "reference": {"path": str(run)},
        }
    )  # fmt: skip
    found = models_here(config)
    assert (found.model.path, found.reference.path) == (str(run / "model"), str(run / "model"))
    assert model_here(str(run / "model"), "model.path") == str(run / "model")
    assert model_here(str(tmp_path / "gone"), "model.path") == str(tmp_path / "gone")  # said by what reads it


def test_offline_what_is_in_the_cache_is_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    online, rows = model_here("Org/tiny", "model.path"), rows_of("openai/gsm8k", name="main", split="train")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert model_here("Org/tiny", "model.path") == online
    assert rows_of("openai/gsm8k", name="main", split="train") == rows
    assert len(hub.asked) == asked
    with pytest.raises(
        ModelError, match=r"^model\.path is 'Org/other', .*; HF_HUB_OFFLINE is set, and no copy of the model is in"
    ):
        model_here("Org/other", "model.path")
    with pytest.raises(DataError, match=r"HF_HUB_OFFLINE is set, and not all of the data set is in|has no split 'test'"):
        rows_of("openai/gsm8k", name="main", split="test")


def test_offline_a_model_without_its_weights_is_not_taken_for_a_whole_one(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    model_here("Org/tiny", "model.path", weights=False)
    assert "model.safetensors" not in hub.downloads
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="not all of the model is in"):
        model_here("Org/tiny", "model.path")


def test_what_cannot_be_downloaded_is_one_sentence(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, sentence in {
        "Org/none": rf"^model\.path is 'Org/none', which is no local folder, and {hub.url} has no model of that name; it",
        "Org/tiny@v3": rf"^model\.path is 'Org/tiny@v3', but Org/tiny at {hub.url} has no branch, tag or commit 'v3'$",
    }.items():
        with pytest.raises(ModelError, match=sentence):
            model_here(name, "model.path")
    hub.gated.add("Org/tiny")
    with pytest.raises(ModelError, match=rf"must accept its terms: accept them at {hub.url}/Org/tiny, and set HF_TOKEN$"):
        model_here("Org/tiny", "model.path")
    with pytest.raises(DataError, match=rf"^the data set is 'a/b', which is no local folder, and {hub.url} has no data set of"):
        rows_of("a/b")
    use(monkeypatch, "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(
        ModelError, match=r"; http://127\.0\.0\.1:9 cannot be reached, and no copy of the model is in .*hf downl"
    ):
        model_here("Org/fresh", "model.path")
    with pytest.raises(ModelError, match=r"^model\.path is 'x', which is no folder; it must be .* or ORG/NAME of the hub"):
        check_models(
            parse_config(
                {"model": {"path": "x"}, "data": {"train": {"name": "chain_sum"}}, "rewards": [{"name": "exact_number"}]}
            )
        )


def test_another_node_gets_the_same_files_at_the_same_path(hub: Hub) -> None:
    folder = model_here("Org/tiny", "model.path")
    model = CachedModel.at(folder)
    assert model == CachedModel(folder, "Org/tiny", commit_of("main"), constants.HF_HUB_CACHE)
    shutil.rmtree(constants.HF_HUB_CACHE)
    model.download(hub.url, None)
    assert sorted(path.name for path in Path(folder).iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert CachedModel.at("/models/Org--tiny/snapshots") is None


@pytest.mark.slow
def test_plan_reads_only_the_description_of_a_model(hub: Hub, tmp_path: Path) -> None:
    """As a user has it: the environment alone says where the hub and the cache are."""
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: {path: Org/tiny}\ndata: {train: {source: dataset, path: openai/gsm8k, name: main, split: train}}\n"
        "rewards: [{name: exact_number}]\n"
    )
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "megarl", "plan", str(config)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Org/tiny" in done.stdout
    assert set(hub.downloads) == {"config.json", "tokenizer.json"}
    assert load_any(config).model.path == "Org/tiny"


def test_rows_of_a_data_set(hub: Hub) -> None:
    assert [row["question"] for row in rows_of("openai/gsm8k", name="main", split="train")] == ["0?", "1?", "2?"]
    assert [row["question"] for row in rows_of("openai/gsm8k@main", name="main", split="test")] == ["9?"]
    assert [row["question"] for row in rows_of("hf://datasets/openai/gsm8k", name="socratic")] == ["s?"]
    assert "socratic/train-00000-of-00001.parquet" in hub.downloads
    assert len(hub.downloads) == len(GSM8K)  # each file once


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, r"^'openai/gsm8k' has several configurations; set name to one of main, socratic$"),
        (
            {"name": "man"},
            r"^'openai/gsm8k' has no configuration 'man' \(did you mean 'main'\?\); set name to one of main, soc",
        ),
        ({"name": "main"}, r"^'openai/gsm8k' has the splits train, test; set split to one of them$"),
        (
            {"name": "main", "split": "tets"},
            r"^'openai/gsm8k' has no split 'tets' \(did you mean 'test'\?\); it has train, test$",
        ),
    ],
)
def test_a_configuration_or_split_that_is_not_there(hub: Hub, fields: dict[str, str], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        rows_of("openai/gsm8k", **fields)
    assert not [name for name in hub.downloads if name.endswith(".parquet")]


def test_rows_of_json_files_and_a_damaged_one(hub: Hub, tmp_path: Path) -> None:
    files = {"train.json": b'[{"q": 1}, {"q": 2}]', "test.jsonl": b'{"q": 3}\n\n{"q": 4}\n', "valid.json": b'[{"q": 5}, 6]'}
    write_repo(tmp_path / "hub", "datasets", "me/rows", files)
    assert [row["q"] for split in ("train", "test") for row in rows_of("me/rows", split=split)] == [1, 2, 3, 4]
    with pytest.raises(
        DataError, match=r"valid\.json' element 1 \(counted from 0\) is a JSON number, but every element must be"
    ):
        rows_of("me/rows", split="validation")


CARD = read_configurations("---\nconfigs:\n- config_name: default\n  data_dir: d\n  data_files: '**/*.parquet'\n---\n")

STARS = [{"config_name": "c", "data_files": [{"split": "s", "path": ["x-*"]}]}]


@pytest.mark.parametrize(
    ("files", "configurations", "name", "split", "chosen"),
    [
        (["data/train-0-of-1.parquet", "data/test-0-of-1.parquet"], [], None, "test", ["data/test-0-of-1.parquet"]),
        (["b.jsonl", "a.jsonl", "readme.md"], [], None, None, ["a.jsonl", "b.jsonl"]),
        (["dev.json", "train.json", "train.parquet"], [], None, "validation", ["dev.json"]),
        (["dev.json", "train.json", "train.parquet"], [], None, "train", ["train.parquet"]),
        (["a/train/0.parquet", "b/train/0.parquet"], [], "b", "train", ["b/train/0.parquet"]),
        (["contrained/x.json", "train/latest.json"], [], None, "train", ["contrained/x.json", "train/latest.json"]),
        (["d/x/1.parquet", "d/2.parquet", "e/3.parquet"], CARD, None, None, ["d/2.parquet", "d/x/1.parquet"]),
        (["d/train.json"], [{"config_name": "c", "data_dir": "d"}], None, None, ["d/train.json"]),
        (["x-1.json", "y/x-2.json"], STARS, "c", "s", ["x-1.json"]),
    ],
)  # fmt: skip
def test_which_files_are_a_split(
    files: list[str], configurations: Any, name: str | None, split: str | None, chosen: list[str]
) -> None:
    assert choose_files(files, configurations, name, split, named="'x'") == chosen


@pytest.mark.parametrize(
    ("files", "name", "sentence"),
    [
        (
            ["a.txt"],
            None,
            r"'x' has no files of rows \(\.parquet, .*; it has a\.txt, and the hub may have it as Parquet at @refs/co",
        ),
        (["a/train/0.parquet", "b/train/0.parquet"], None, "'x' has several configurations; set name to one of a, b"),
        (["a/train/0.parquet"], "c", "'x' has no configuration 'c'; its card names none, and its folders are a, train"),
    ],
)
def test_files_that_are_no_split(files: list[str], name: str | None, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        choose_files(files, [], name, None, named="'x'")


def test_split_is_for_data_sets() -> None:
    tree: dict[str, Any] = {"model": {"path": "x"}, "rewards": [{"name": "exact_number"}]}
    with pytest.raises(ConfigError, match=r"data\.train\.split is 'train', which only a source = 'dataset' has"):
        parse_config(tree | {"data": {"train": {"source": "jsonl", "path": "x", "split": "train"}}})
