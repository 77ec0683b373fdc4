"""The pages name config fields that there are, with settings that the config takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config import Config, SupervisedConfig, config_fields, parse_config
from megarl.config.presets import PRESETS
from megarl.config.yaml_tree import read_yaml
from tests.docs.pages import ROOT, blocks, pages

FIELDS = {re.sub(r"\[\]", "", field.name) for root in (Config, SupervisedConfig) for field in config_fields(root)}
SECTIONS = {name for root in (Config, SupervisedConfig) for name in root.model_fields}
LAYOUTS = {f"{role}.layout" for role in ("policy", "critic", "reference", "teacher", "reward_model")}
NAME = re.compile(rf"`((?:{'|'.join(sorted(SECTIONS))})(?:\.\w+)+)(?![\w(/])")
FREE = (
    "rewards.args", "data.train.args", "data.eval.args", "rollout.engine_args", "data.train.columns", "policy.megatron",
    "reference.megatron", "algorithm.advantage_args", "algorithm.policy_loss_args",
    "data.template_args", "rollout.episode.mcp", "rollout.episode.agent.verifiers.arguments", "trackers.args",
)  # fmt: skip
OTHERWISE = {"rollout.engines.min": "rollout.engines", "rollout.engines.max": "rollout.max_engines"}
"""Names in a form of YAML that is read as other fields."""
MODULE, FILE = "package.module:", ".py:"
"""The two forms in which a function or class of the user's own is named; every field takes both."""
FILES = (".yaml", ".md", ".py", ".sh", ".jsonl", ".json")
FOREIGN = {"reward_model.ground_truth", "reward_model.enable", "reward_model.model.path", "data.train_batch_size"}
"""Names of other trainers, which docs/migrating.md and docs/data.md mention."""


def known(name: str) -> bool:
    """Whether `name` is a field, a section, or lies in a free mapping."""
    parts = name.split(".")
    heads = {".".join(parts[: place + 1]) for place in range(len(parts))}
    layout = next((head for head in heads & LAYOUTS), None)
    name = name.replace(layout, "policy.layout") if layout else name
    name = re.sub(r"^(data|ptx)\.(train|eval|data)\.", "data.train.", name)
    name = name.replace("critic.optimizer", "policy.optimizer")
    name = OTHERWISE.get(name, name)
    return name in FIELDS or any(field.startswith(f"{name}.") for field in FIELDS) or bool(heads & set(FREE))


def wrong_names(text: str) -> Iterator[str]:
    """The names in backticks that look like config fields and are none."""
    for name in NAME.findall(text):
        if not known(name) and name not in FOREIGN and not name.endswith(FILES):
            yield name


def test_a_name_that_is_no_field_is_found() -> None:
    text = (
        "`policy.layout.tp`, `critic.layout.pp=2`, `run.yaml`, `policy.layout.tpp`, `rollout.n`, `rewards.args`, `run.steps: 3`"
    )
    assert list(wrong_names(text)) == ["policy.layout.tpp", "rollout.n"]


TODAY = [page for page in pages() if page.name != "history.md"]  # which names fields as they were called


@pytest.mark.parametrize("page", [*TODAY, ROOT / "README.md"], ids=lambda page: page.name)
def test_a_page_names_fields_that_there_are(page: Path) -> None:
    text = page.read_text()
    if page.name == "migrating.md":  # the first column is of other trainers
        text = "\n".join(
            line.partition("|")[2].partition("|")[2] if line.startswith("| ") else line for line in text.splitlines()
        )
    assert sorted(set(wrong_names(text))) == []


def passages(text: str) -> Iterator[str]:
    """The paragraphs of `text`; a row of a table is one."""
    for paragraph in text.split("\n\n"):
        yield from paragraph.splitlines() if paragraph.startswith("|") else [paragraph]


def test_a_field_that_takes_a_function_of_ones_own_says_that_it_may_be_in_a_file() -> None:
    fields = [field for root in (Config, SupervisedConfig) for field in config_fields(root)]
    told = {field.name: field.description for field in fields if MODULE in field.description}
    assert {"data.train.name", "rollout.episode.kind", "rollout.episode.tools", "evaluations[].rewards.name"} <= set(told)
    assert [name for name, meaning in told.items() if FILE not in meaning] == []


@pytest.mark.parametrize("page", [*pages(), ROOT / "README.md"], ids=lambda page: page.name)
def test_a_page_that_names_a_function_by_its_module_names_it_by_its_file_too(page: Path) -> None:
    assert [text for text in passages(page.read_text()) if MODULE in text and FILE not in text] == []


def test_the_first_pages_say_alike_what_has_run_on_a_gpu() -> None:
    texts = {page.name: page.read_text() for page in (ROOT / "README.md", ROOT / "docs/index.md", ROOT / "docs/limits.md")}
    assert [name for name, text in texts.items() if "one H100" not in text or "Nothing has been run on a GPU" in text] == []


def test_the_report_s_page_names_every_box_of_the_charts() -> None:
    script = (ROOT / "megarl/observe/page/overview.js").read_text().partition("function chartOptions()")[2].partition("\n}")[0]
    boxes = re.findall(r'"([a-z ]+)"(?:, [a-z]+)?\)', script.rpartition("return ")[2])
    assert [box.strip() for box in boxes] == ["axis", "smoothing", "log scale"]
    told = (ROOT / "docs/watching.md").read_text()
    assert [box for box in boxes if box.strip() not in told] == []


def test_environment_variables_of_trackers_have_the_same_value_wherever_they_are_named() -> None:
    fields = " ".join(field.description for field in config_fields(Config))
    said = re.findall(r"((?:WANDB|SWANLAB)_MODE)=(\w+)", " ".join([fields, *(page.read_text() for page in pages())]))
    assert set(said) == {("WANDB_MODE", "online"), ("SWANLAB_MODE", "online")}


def overrides(tree: object, prefix: str = "") -> Iterator[str]:
    """The dotted names of what `tree` sets; lists are not looked into."""
    if not isinstance(tree, dict):
        yield prefix
        return
    for key, inner in tree.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        yield from [name] if name in FREE or not inner else overrides(inner, name)


@pytest.mark.parametrize("page", [*pages(), ROOT / "README.md"], ids=lambda page: page.name)
def test_the_yaml_of_a_page_sets_fields_that_there_are(page: Path) -> None:
    for block in blocks(page):
        tree = yaml.safe_load(block.text) if block.language == "yaml" else None
        if isinstance(tree, dict) and set(tree) <= SECTIONS:
            assert [name for name in overrides(tree) if not known(name)] == []


def table(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table under `heading`, without backticks, links and the line of dashes."""
    section = page.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [[re.sub(r"\[?`([^`]*)`\]?(\([^)]*\))?", r"\1", cell) for cell in row] for row in rows]


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"kl.coef": 0.04}` for `{"kl": {"coef": 0.04}}`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def test_the_table_of_presets_is_that_of_the_program() -> None:
    (_, *fields), *rows = table(ROOT / "docs/algorithms.md", "Start from a preset")
    shown = {name: dict(zip(fields, map(yaml.safe_load, cells), strict=True)) for name, *cells in rows}
    for name, preset in PRESETS.items():
        cells = shown[name]
        usual = {"gae_lambda": 1.0, "shaping.clip": None, "kl.estimator": "k1" if cells["kl.apply_to"] == "reward" else "k3"}
        found = usual | cells | (cells["further"] or {})
        assert {field: found.get(field) for field in flat(preset)} == flat(preset)
        assert set(cells["further"] or {}) <= set(flat(preset))
    assert list(shown) == list(PRESETS)


ROWS = {"source": "reasoning_gym", "name": "chain_sum"}
BASE = {"model": {"path": "models/any"}, "data": {"train": ROWS, "eval": ROWS}, "rewards": [{"name": "exact_number"}]}


def merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid over `under`, section by section; a source of rows replaces the other."""
    if "source" in over:
        return over
    both = dict(under)
    for key, value in over.items():
        both[key] = merged(both[key], value) if isinstance(value, dict) and isinstance(both.get(key), dict) else value
    return both


@pytest.mark.parametrize("page", [*pages(), ROOT / "README.md"], ids=lambda page: page.name)
def test_the_yaml_of_a_page_is_a_config(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        if block.title.endswith(".py"):  # functions that a config names are looked at when it is read
            (tmp_path / block.title).write_text(block.text)
        if block.language == "yaml":
            (tmp_path / "run.yaml").write_text(block.text)
            tree = read_yaml(tmp_path / "run.yaml")
            if set(tree) <= set(Config.model_fields):
                base = {"model": BASE["model"]} if "serve" in tree else BASE  # a server has neither rows nor rewards
                parse_config(merged(base, tree))
