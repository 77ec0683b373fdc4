"""An evaluation needs neither training rows nor rewards for these."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megarl.config import load_config
from megarl.config.evaluated import load_to_evaluate
from megarl.errors import ConfigError
from tests.config.smallest import RL

SET = {
    "name": "sums",
    "rows": {"source": "reasoning_gym", "name": "chain_sum", "limit": 4},
    "rewards": [{"name": "exact_number"}],
}


def test_evaluations_alone_are_enough_and_what_a_config_says_of_data_stays(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"model": {"path": "nowhere"}, "evaluations": [SET]}))
    config = load_to_evaluate(file, ["data.max_prompt_tokens=77"])
    assert config.evaluates
    assert config.data.max_prompt_tokens == 77
    assert [evaluation.name for evaluation in config.evaluations] == ["sums"]
    with pytest.raises(ConfigError, match=r"^data is missing"):
        load_config(file)


def test_a_config_of_a_run_is_read_as_a_run_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(RL | {"evaluations": [SET]}))
    assert load_to_evaluate(file) == load_config(file)


def test_without_any_rows_data_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"model": {"path": "nowhere"}}))
    with pytest.raises(ConfigError, match=r"^data is missing"):
        load_to_evaluate(file)
