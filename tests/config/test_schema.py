"""The schema keeps its promises: small, documented, strict, and a resolved config reads back to itself."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter

import pytest

from megarl.config import Layout, config_fields, load_config, parse_config, save_resolved, to_yaml
from megarl.config.presets import PRESETS
from megarl.config.yaml_tree import apply_overrides
from megarl.options.tools.section import McpServerConfig
from tests.config.smallest import RL


def test_sections_of_the_config_stay_small() -> None:
    sections = Counter(field.name.rpartition(".")[0] for field in config_fields())
    assert max(sections.values()) < 25, sections.most_common(1)


def test_every_field_has_a_one_line_description() -> None:
    for field in config_fields():
        assert field.description.endswith("."), field.name
        assert 8 <= len(field.description) <= 200, field.name


def test_a_resolved_config_reads_back_equal_and_shows_every_leaf(tmp_path) -> None:
    tree = apply_overrides(
        RL,
        [
            "algorithm.name=ppo",
            "policy.layout={tp: 2, sequence_parallel: true}",
            "reference.layout={dp: 2}",
            "run.guards=[{metric: kl/reference, above: 1, action: stop}]",
            "evaluations=[{name: sums, rows: {name: basic_arithmetic}, source_key: task}]",
            "algorithm.distillation.coef=0.5",
            "teacher.named=[{name: math, path: elsewhere, layout: {tp: 2}}]",
            "data.curriculum={key: difficulty, stages: [{}]}",
            "policy.optimizer.groups=[{match: ['*']}]",
            "rollout.episode={kind: tools, tools: ['mcp:files'], mcp: {files: {url: 'http://host/mcp'}}}",
        ],
    )
    config = parse_config(tree)
    save_resolved(config, tmp_path / "run" / "config.yaml")
    assert load_config(tmp_path / "run" / "config.yaml") == config
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["config.yaml"]
    text = to_yaml(config)
    for field in config_fields():
        if not field.name.startswith(("serve.", "rollout.disaggregation.")):  # null here: it is no server, and colocated
            assert f"{field.name.rpartition('.')[2]}:" in text


def test_sections_that_users_name_are_listed_with_their_fields() -> None:
    listed = {field.name for field in config_fields()}
    assert {f"rollout.episode.mcp.NAME.{name}" for name in McpServerConfig.model_fields} <= listed


def test_yaml_numbers_without_a_point_are_numbers() -> None:
    config = parse_config(
        apply_overrides(RL, ["policy.optimizer.lr=3e-5", "algorithm.advantage_eps=1E-8", "critic.optimizer.lr=2e+0"])
    )
    assert config.policy.optimizer.lr == 3e-5
    assert config.algorithm.advantage_eps == 1e-8
    assert config.critic.optimizer.lr == 2.0


def test_a_section_layout_is_a_layout() -> None:
    config = parse_config(apply_overrides(RL, ["policy.layout={tp: 2, pp: 2, dp: 2}"]))
    layout = config.policy.layout
    assert isinstance(layout, Layout)
    assert layout.world_size == 8
    assert layout.coords(5) == Layout(tp=2, pp=2, dp=2).coords(5)
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_fills_only_what_the_user_left_out(name: str) -> None:
    preset = PRESETS[name]
    named = [f"algorithm.name={name}", *(["teacher.path=wise"] if "distillation" in preset else [])]
    plain = parse_config(apply_overrides(RL, named)).algorithm
    assert plain.advantage == preset["advantage"]
    assert plain.aggregation == preset["aggregation"]
    assert plain.gae_lambda == preset["gae_lambda"]
    assert plain.kl.model_dump().items() >= preset["kl"].items()
    mended = parse_config(
        apply_overrides(RL, [*named, "algorithm.kl.coef=0.5", "algorithm.aggregation=seq_mean_token_sum"])
    ).algorithm
    assert mended.kl.model_dump().items() >= {**preset["kl"], "coef": 0.5}.items()
    assert mended.aggregation == "seq_mean_token_sum"
    assert mended.advantage == preset["advantage"]


@pytest.mark.parametrize(("override", "uses"), [("algorithm.name=ppo", True), ("algorithm.name=grpo", False)])
def test_the_critic_is_used_only_where_the_advantage_needs_values(override: str, uses: bool) -> None:
    assert parse_config(apply_overrides(RL, [override])).uses_critic is uses


def test_no_reference_without_a_kl_term() -> None:
    assert parse_config(RL).uses_reference
    assert not parse_config(apply_overrides(RL, ["algorithm.kl.coef=0.0"])).uses_reference


def test_held_out_rows_keep_clear_of_the_training_rows() -> None:
    tree = apply_overrides(RL, ["data.eval={name: basic_arithmetic}"])
    config = parse_config(tree)
    assert config.data.eval is not None
    assert config.data.eval.seed >= config.data.train.seed + 1000
    assert (config.data.eval.limit, config.data.train.limit) == (200, None)
    everything = apply_overrides(RL, ["data.eval={name: basic_arithmetic, limit: null}"])
    assert parse_config(everything).data.eval.limit is None  # type: ignore[union-attr]
    other_task = apply_overrides(RL, ["data.eval={name: gsm_symbolic, seed: 0}"])
    assert parse_config(other_task).data.eval.seed == 0  # type: ignore[union-attr]


def test_importing_the_config_imports_no_torch() -> None:
    code = "import sys, megarl.config; print(sorted({'torch', 'megatron', 'ray', 'sglang', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
