"""What is exported from a run writes conversations as the run did: its template, and its options as defaults."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config.layout import Layout
from megarl.config.section import TEMPLATE_FILE
from megarl.config.sections import DataConfig
from megarl.config.sources import SourceConfig
from megarl.convert.plan import plan_dist, plan_hf
from megarl.convert.run import run_plan
from megarl.convert.sources import open_dist, open_hf
from megarl.data.tokenize import load_tokenizer
from megarl.models.hf_folder import copy_companions
from megarl.runs.run_template import keep_template
from tests.data.chat_tokenizers import CHATML, byte_tokenizer
from tests.data.family_templates import QWEN3

ASKED = [{"role": "user", "content": "hi"}]
OFF = {"enable_thinking": False}


def data(**more: Any) -> DataConfig:
    return DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"), **more)


def written(folder: Path, **args: Any) -> str:
    return str(load_tokenizer(str(folder)).apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False, **args))


def expected(template: str, **args: Any) -> str:
    return str(byte_tokenizer(template).apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False, **args))


def test_an_exported_checkpoint_has_the_run_s_template(families: Callable[[str], Path], tmp_path: Path) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(families("llama-tied"), model)
    byte_tokenizer(CHATML).save_pretrained(model)
    weights = run / "checkpoints" / "step_000001" / "policy"
    run_plan(plan_dist("import", open_hf(model), Layout(), None), weights)
    shutil.rmtree(weights / "hf")  # a run's checkpoint has none
    (run / "config.yaml").write_text(f"model: {{path: '{model}'}}\n")
    run_plan(plan_hf("export", open_dist(weights), None), tmp_path / "plain")
    assert written(tmp_path / "plain") == expected(CHATML)
    keep_template(run, byte_tokenizer(QWEN3), data(template_args=OFF))
    run_plan(plan_hf("export", open_dist(weights), None), tmp_path / "exported")
    assert written(tmp_path / "exported") == expected(QWEN3, **OFF) != expected(QWEN3)
    assert written(tmp_path / "exported", enable_thinking=True) == expected(QWEN3), "a caller may still say otherwise"


@pytest.mark.parametrize("inside", [True, False])
def test_every_place_of_a_folder_that_has_a_template_has_the_same_one(inside: bool, tmp_path: Path) -> None:
    model, target = tmp_path / "model", tmp_path / "target"
    byte_tokenizer(CHATML).save_pretrained(model)
    target.mkdir()
    if inside:  # as older versions of transformers write it, and processors
        (model / TEMPLATE_FILE).unlink()
        settings = json.loads((model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHATML}))
        (model / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    keep_template(tmp_path, byte_tokenizer(QWEN3), data(template_args=OFF))
    copy_companions(model, target, tmp_path / TEMPLATE_FILE)
    assert written(target) == expected(QWEN3, **OFF)
    kept = json.loads((target / "tokenizer_config.json").read_text())
    assert kept.get("chat_template") == ((target / TEMPLATE_FILE).read_text() if inside else None)
    assert not (target / "chat_template.json").exists()


def test_a_run_with_its_model_s_own_template_keeps_none(tmp_path: Path) -> None:
    (tmp_path / TEMPLATE_FILE).write_text("of an earlier start")
    keep_template(tmp_path, byte_tokenizer(QWEN3), data())
    assert not (tmp_path / TEMPLATE_FILE).exists()
    mine = tmp_path / "mine.jinja"
    mine.write_text(QWEN3)
    keep_template(tmp_path, byte_tokenizer(QWEN3), data(chat_template=str(mine)))
    assert (tmp_path / TEMPLATE_FILE).read_text() == QWEN3
