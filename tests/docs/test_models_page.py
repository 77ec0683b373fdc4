"""The page on models says of every family what the program answers, and of SGLang what its tests have seen."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megarl.models.registry import ARCHITECTURES, OPTION_OF_FAMILY, architecture_for
from megarl.option_list import OPTIONS
from tests import seeing
from tests.docs.pages import DOCS, ROOT
from tests.families import VARIANTS
from tests.families.family import SIZES

COMMAND = "python tools/docs/generate.py"
WHOLE = {*OPTION_OF_FAMILY.values(), "few_bits", "lora", "prediction"} <= {*OPTIONS}
pytestmark = pytest.mark.skipif(not WHOLE, reason="an option was deleted, and its families with it")


@pytest.fixture(scope="module")
def families() -> ModuleType:
    spec = importlib.util.spec_from_file_location("families_of_docs", ROOT / "tools/docs/families.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_table_is_what_the_program_answers(families: ModuleType) -> None:
    page = (DOCS / "models.md").read_text()
    assert page == families.with_families(DOCS)["models.md"], f"docs/models.md is out of date: run `{COMMAND}`"
    assert all(page.count(f"\n| `{family.name}`") == 1 for family in ARCHITECTURES)


def of_parameters(test: Callable[..., None]) -> Iterator[str]:
    """The families that a test is run with."""
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names = mark.args[0] if isinstance(mark.args[0], tuple) else (mark.args[0],)
            for entry in mark.args[1]:
                values = entry.values if hasattr(entry, "values") and hasattr(entry, "marks") else entry
                values = values if isinstance(values, tuple | list) else (values,)
                yield from (value for name, value in zip(names, values, strict=True) if name == "family")


def registered_name(family: str) -> str:
    """What config.json calls the family of a tiny model of the tests."""
    import transformers

    if family in seeing.SEEING:
        config = seeing.hf_config(family).to_dict()
        return architecture_for(config | {"architectures": None}).name
    entry = VARIANTS[family]
    config = getattr(transformers, entry.config_class)(**(SIZES | {"pad_token_id": None} | entry.settings)).to_dict()
    return architecture_for(config | {"architectures": [f"{entry.class_prefix}ForCausalLM"]}).name


def test_families_that_sglang_was_seen_with_are_those_of_its_tests(families: ModuleType) -> None:
    from tests.options.lora import test_sglang_adapters
    from tests.rollout import test_sglang_experts, test_sglang_families, test_sglang_mixtures, test_sglang_seeing

    tests: dict[Any, str] = {
        test_sglang_adapters: "test_after_each_update_log_probs_are_those_of_the_model_with_these_adapters",
        test_sglang_experts: "test_after_an_update_every_expert_is_the_one_that_was_sent",
        test_sglang_families: "test_after_an_update_log_probs_are_those_of_transformers_with_these_weights",
        test_sglang_mixtures: "test_after_an_update_log_probs_are_those_of_transformers_with_these_weights",
        test_sglang_seeing: "test_answers_are_transformers_also_after_updates_and_for_pictures_asked_before",
    }
    seen: dict[str, set[str]] = {}
    for module, name in tests.items():
        file = str(Path(module.__file__).relative_to(ROOT))
        for family in {*of_parameters(getattr(module, name))}:
            seen.setdefault(registered_name(family), set()).add(file)
    assert families.SEEN_IN_SGLANG.keys() == seen.keys()
    assert all(file in seen[name] for name, file in families.SEEN_IN_SGLANG.items())


def test_published_counts_are_those_that_the_folder_of_configs_says(families: ModuleType) -> None:
    """By its README, whose figures are those of the hub."""
    said = (ROOT / "examples/models/README.md").read_text()
    stated = [line.split("|") for line in said.splitlines() if line.startswith("| `") and "as above" not in line]
    assert len(stated) > 20
    for _, folder, _, parameters, _ in stated:
        config = json.loads((ROOT / "examples/models" / folder.strip(" `") / "config.json").read_text())
        counted = families.count({name: value for name, value in config.items() if name != "quantization_config"})
        assert counted == int(parameters.replace(",", "")), folder
