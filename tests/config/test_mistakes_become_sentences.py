"""Every mistake in a config is one ConfigError sentence: the field, its value, why not, what it must be, the nearest name."""

from __future__ import annotations

import copy

import pytest

from megarl.config import load_config, parse_config, parse_supervised_config
from megarl.config.renamed import FOREIGN_VALUES
from megarl.config.yaml_tree import apply_overrides
from megarl.errors import ConfigError, MegarlError
from megarl.models.check_layouts import check_models
from megarl.system.user_code import CLASS_FORMS, FORMS
from tests.config.smallest import RL

BASE = RL | {"data": {"train": {"name": "basic_arithmetic"}, "eval": {"name": "basic_arithmetic"}}}
REPLAY = ("rollout.engine=replay", "rollout.replay_from=x.jsonl")


def sentence(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(apply_overrides(BASE, overrides))
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("polcy.x=1", ["polcy is not a config field", "did you mean 'policy'?"]),
        ("policy.optimiser.lr=1", ["policy.optimiser is not", "did you mean 'policy.optimizer'?"]),
        ("policy.lr=1", ["policy.lr is not", "did you mean 'policy.optimizer.lr'?"]),
        ("policy.layout.tq=2", ["policy.layout.tq is not", "'policy.layout.tp'"]),
        ("rewards.0.weigth=2", ["rewards[0].weigth is not", "'rewards[0].weight'"]),
        ("run.steps=0", ["run.steps is 0", "a whole number of at least 1"]),
        ("run.steps=ten", ["run.steps is 'ten'", "a whole number of at least 1"]),
        ("run.steps=1.5", ["run.steps is 1.5", "a whole number"]),
        ("run.steps=true", ["run.steps is true", "a whole number"]),
        ("run.name=7", ["run.name is 7", "text"]),
        ("run.steps.x=1", ["run.steps is a section (x)", "a whole number"]),
        ("run=", ["run is null", "a section with name, folder"]),
        ("policy=3", ["policy is 3", "a section with layout"]),
        ("rollout.port=1", ["rollout.port is not a config field"]),
        (
            "rollout.schedule.mode=asynch",
            ["rollout.schedule.mode is", "'sync', 'one_step_off_policy' or 'async'", "did you mean 'async'?"],
        ),
        ("rollout.schedule.max_staleness=0", ["rollout.schedule.max_staleness is 0", "at least 1"]),
        ("rollout.episode.tools=f", ["rollout.episode.tools is 'f'", "a list of texts"]),
        ("policy.optimizer.betas=[0.9]", ["policy.optimizer.betas is [0.9]", "a list of 2 numbers"]),
        ("algorithm.name=gropo", ["'grpo', 'ppo', 'reinforce_plus_plus', 'dapo'", "did you mean 'grpo'?"]),
        ("algorithm.kl={apply_to: reward, estimator: k3}", ["algorithm.kl.estimator is 'k3'", "it must be 'k1'"]),
        ("algorithm.kl.apply_to=both", ["algorithm.kl.apply_to is 'both'", "'loss' or 'reward'"]),
        ("policy.layout.tp=0", ["policy.layout.tp is 0", "at least 1"]),
        (
            "policy.layout.sequence_parallel=true",
            ["policy.layout.sequence_parallel needs a tp of at least 2: set tp, or remove"],
        ),
        ("reference.layout={vpp: 2}", ["reference.layout.vpp needs a pp of at least 2"]),
        ("policy.layout.ep=2", ["policy.layout.ep is 2", "times etp = 1 does not divide the 1 ranks", "it must be 1"]),
        ("model={}", ["model.path is missing", "text"]),
        ("policy.optimizer.lr=.nan", ["policy.optimizer.lr is nan", "a number"]),
        ("nonsense", ["'nonsense' is not of the form key=value"]),
        ("rewards.1.weight=1", ["rewards.1.weight", "rewards.1 must end in 0"]),
        ("data.train.name=[a", ["not valid YAML"]),
    ],
)
def test_a_wrong_field_is_named_with_what_it_may_be(override: str, parts: list[str]) -> None:
    text = sentence(override)
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["rollout.samples_per_prompt=1"], ["rollout.samples_per_prompt is 1", "'grpo'", "at least 2"]),
        (["data.eval.seed=5"], ["data.eval.seed is 5", "seeds 0 to 999", "at least 1000"]),
        (["data.train.source=jsonl"], ["data.train.source = 'jsonl' needs the file of rows", "set data.train.path"]),
        (["data.train.source=python", "data.train.name=nocolon"], ["'nocolon'", FORMS]),
        (["rollout.episode.kind=tools"], ["needs at least one function", f"to a list of {FORMS}"]),
        (["rollout.episode.kind=environment"], ["needs the class of an environment", f"one {CLASS_FORMS}"]),
        (["rollout.engine=replay"], ["rollout.engine = 'replay' needs recorded responses", "set rollout.replay_from"]),
        (["rollout.replay_from=x.jsonl"], ["rollout.replay_from needs rollout.engine = 'replay'"]),
        (["rollout.servers={port: 99999}"], ["rollout.servers.port is 99999", "a whole number from 1 to 65535"]),
        (["rollout.servers={port: 65535}", "rollout.engines=2"], ["from 1 to 65534"]),
        (["rollout.engine_args={max_total_tokens: 100}"], ["rollout.engine_args.max_total_tokens is 100", "at least 768"]),
        (["rollout.engine_args={tp_size: 2}"], ["tp_size", "set by rollout.tp"]),
        (["rollout.weight_transport=folder"], ["rollout.weight_transport = 'folder' needs servers that already run"]),
        (["rollout.servers={urls: [http://a:1]}"], ["rollout.servers.urls needs rollout.weight_transport = 'folder'"]),
        (
            ["rollout.weight_transport=folder", "rollout.servers={urls: [http://a:1]}", "rollout.engines=2"],
            ["a list of rollout.engines = 2 URLs"],
        ),
        (
            ["rollout.weight_transport=folder", "rollout.servers={urls: [a:1]}"],
            ["rollout.servers.urls is ['a:1']", "start with http:// or https://"],
        ),
        (
            ["rollout.weight_transport=folder", "rollout.servers={urls: [http://a:1], port: 1}"],
            ["rollout.servers.port is 1, which is for servers that megarl starts"],
        ),
        (
            ["rollout.weight_transport=folder", "rollout.servers={urls: [http://a:1]}", "rollout.delta_every=2"],
            ["delta_every is 2", "it must be 0"],
        ),
        (["rollout.engine_args={a: 2}", "rollout.engine=embedded"], ["rollout.engine_args needs rollout.engine = 'sglang'"]),
        (
            ["rollout.schedule.max_staleness=2"],
            ["rollout.schedule.max_staleness is 2", "'sync'", "only with rollout.schedule.mode = 'async'", "it must be 1"],
        ),
        (
            ["rollout.schedule={mode: one_step_off_policy, partial_responses: continue}"],
            ["partial_responses is 'continue'", "makes responses of several versions", "it must be 'restart'"],
        ),
        ([*REPLAY, "rollout.schedule.partial_responses=continue"], ["partial_responses is 'continue'", "'replay' cannot do"]),
        (
            ["rollout.schedule.partial_responses=continue", "rollout.speculative.algorithm=ngram"],
            ["partial_responses is 'continue'", "rollout.speculative.algorithm", "it must be 'restart'"],
        ),
        (
            ["rollout.schedule={over_sample: 4, partial_responses: restart}"],
            ["partial_responses is 'restart'", "longer with rollout.schedule.over_sample = 4", "must be 'continue' or null"],
        ),
        (
            ["rollout.schedule={mode: one_step_off_policy, over_sample: 4}"],
            ["over_sample is 4", "makes responses of several versions", "it must be 0"],
        ),
        (
            ["rollout.schedule.over_sample=4", "rollout.speculative.algorithm=ngram"],
            ["over_sample is 4", "rollout.speculative.algorithm", "it must be 0"],
        ),
        (
            ["rollout.schedule.mask_older_tokens=true"],
            ["mask_older_tokens needs rollout.schedule.partial_responses = 'continue': set", "or remove"],
        ),
        (
            ["rollout.schedule={mode: async, partial_responses: continue, mask_older_tokens: true}"],
            ["mask_older_tokens is true", "most of what rollout.schedule.mode = 'async' samples", "it must be false"],
        ),
        (
            ["rollout.schedule={partial_responses: continue, mask_older_tokens: true}", "algorithm.policy_loss=gspo"],
            ["mask_older_tokens is true", "'gspo' has a ratio of whole responses"],
        ),
        (["rollout.episode.turn_cache_bytes=7"], ["turn_cache_bytes is 7", "'sglang' has its own", "left out"]),
        (["rollout.schedule.over_sample=9"], ["over_sample is 9", "at most rollout.prompts_per_step = 8"]),
        ([*REPLAY, "rollout.schedule.mode=async"], ["rollout.schedule.mode is 'async'", "'replay'", "it must be 'sync'"]),
        ([*REPLAY, "rollout.schedule.over_sample=1"], ["over_sample is 1", "'replay'"]),
        ([*REPLAY, "rollout.episode={kind: tools, tools: ['a:b']}"], ["rollout.episode.kind is 'tools'", "'replay'"]),
        (
            ["algorithm.advantage=remax", "rollout.schedule.mode=one_step_off_policy"],
            ["'remax'", "rollout.schedule.mode is 'one_step_off_policy'", "it must be 'sync'"],
        ),
        (["algorithm.advantage=remax", "rollout.episode={kind: 'a:b'}"], ["rollout.episode.kind is 'a:b'", "'remax'"]),
        (["rollout.episode.tools=['a:b']"], ["rollout.episode.tools needs an episode that calls them"]),
        (
            ["rollout.episode.kind=tools"],
            ["rollout.episode.kind = 'tools' needs at least one function", "set rollout.episode.tools"],
        ),
        (["rollout.episode.kind=environment"], ["rollout.episode.kind = 'environment' needs the class of an environment"]),
        (["rollout.engine=embedded", "rollout.tp=2"], ["rollout.tp is 2", "it must be 1"]),
        (["policy.max_tokens_per_micro_batch=767"], ["is 767", "at least 768"]),
        (["critic.warmup_steps=3"], ["critic.warmup_steps is 3", "'gae'"]),
        (["rewards=[]"], ["needs a source of reward: set rewards, or set reward_model.path"]),
        (
            ["rewards=[{name: exact_number, max_error_share: 0.2}]"],
            ["rewards[0].max_error_share needs failures that do not stop the run: set rewards[0].on_error to zero or drop_"],
        ),
        (
            ["rewards=[{name: exact_number, strict_steps: 3}]"],
            ["rewards[0].strict_steps needs failures that do not stop the run"],
        ),
        (["rewards=[{name: exact_number, on_error: skip}]"], ["rewards[0].on_error", "'stop', 'zero' or 'drop_group'"]),
        (["rewards=[{name: exact_number, on_error: zero, max_error_share: 0}]"], ["rewards[0].max_error_share is 0"]),
        (
            [
                "evaluations=[{name: a, rows: {name: chain_sum}, "
                "rewards: [{name: exact_number, on_error: zero, strict_steps: 2}]}]"
            ],
            ["evaluations[0].rewards[0].strict_steps is 2, which an evaluation does not read; it must be 1"],
        ),
        (
            ["evaluations=[{name: a, rows: {name: chain_sum}, rewards: [{name: exact_number, ahead: true}]}]"],
            ["evaluations[0].rewards[0].ahead is true, which an evaluation does not read; it must be null"],
        ),
        (
            ["data.eval=null", "run.eval_every=2"],
            ["run.eval_every needs an evaluation set: set data.eval or evaluations, or remove run.eval_every"],
        ),
        (["data.eval=null", "run.keep_best=accuracy"], ["run.keep_best needs an evaluation set: set data.eval"]),
        (
            ["evaluations=[{name: sums, rows: {name: chain_sum}, samples_per_prompt: 8}]"],
            [
                "evaluations[0].temperature is 0.0",
                "the 8 responses to a prompt equal",
                "must be above 0, or evaluations[0].sam",
            ],
        ),
        (["evaluations=[{name: a/b, rows: {name: chain_sum}}]"], ["evaluations[0].name is 'a/b'", "letters, digits"]),
        (
            ["evaluations=[{name: a, rows: {name: chain_sum}}, {name: a, rows: {name: chain_sum}}]"],
            ["evaluations[1].name is 'a'", "names an earlier set"],
        ),
        (["evaluations=[{name: a, rows: {name: chain_sum}, rewards: []}]"], ["evaluations[0] needs functions that judge"]),
        (["evaluations=[{name: a, rows: {name: nothing, source: jsonl}}]"], ["evaluations[0].rows"]),
        (
            ["evaluations=[{name: a, rows: {name: basic_arithmetic, seed: 5}}]"],
            ["evaluations[0].rows.seed is 5", "gives rows that data.train trains on", "at least 1000"],
        ),
        (
            [
                "evaluations=[{name: a, rows: {name: chain_sum}, max_new_tokens: 9}]",
                "rollout.episode={kind: tools, tools: ['a:b']}",
            ],
            ["evaluations[0].max_new_tokens needs single turns"],
        ),
        (["run.name=../elsewhere"], ["run.name is '../elsewhere'", "no folder inside run.folder"]),
        (["run.guards=[stop when it hurts]"], ["run.guards[0] is 'stop when it hurts'", "a section such as {metric:"]),
        (
            ["run.guards=[{metric: kl/reference, above: 1, action: rollback}]"],
            ["the guard 'rollback if kl/reference above 1' needs checkpoints: set run.save_every"],
        ),
        (["run.guards=[{metric: kl/reference, action: stop}]"], ["run.guards[0] needs a bound"]),
        (["algorithm.truncated_responses=bootstrap"], ["algorithm.truncated_responses is 'bootstrap'", "'gae'"]),
        (["policy.optimizer.min_lr=1"], ["policy.optimizer.min_lr is 1", "at most policy.optimizer.lr = 1e-06"]),
        (["algorithm.clip_low=1.0"], ["algorithm.clip_low is 1.0"]),
        pytest.param(
            ["data.min_pixels=9000", "data.max_pixels=9000"],
            ["data.min_pixels is 9000", "less than data.max_pixels = 9000"],
            marks=pytest.mark.needs_option("pictures"),
        ),
        pytest.param(
            ["data.video_key=images"],
            ["data.video_key is 'images'", "another key than data.image_key, or null"],
            marks=pytest.mark.needs_option("pictures"),
        ),
        (["data.max_frames=1"], ["data.max_frames is 1", "2"]),
    ],
)
def test_fields_that_contradict_each_other_are_named(overrides: list[str], parts: list[str]) -> None:
    text = sentence(*overrides)
    for part in parts:
        assert part in text


def test_further_problems_are_counted() -> None:
    text = sentence("run.a=1", "run.b=1", "run.steps=x")
    assert text.startswith("run.a is not a config field")
    assert "; and 2 more problems in this config: (2) run.b is not a config field" in text
    assert "; (3) run.steps is 'x'; it must be a whole number of at least 1" in text


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("data.epochs", "run.epochs"),
        ("trackers.num_train_epochs", "run.epochs"),
        ("algorithm.train_batch_size", "rollout.prompts_per_step"),
        ("run.save_freq", "run.save_every"),
        ("rollout.max_completion_length", "rollout.max_new_tokens"),
    ],
)
def test_a_name_of_another_trainer_leads_to_what_means_the_same(wrong: str, right: str) -> None:
    assert f"(did you mean '{right}'?)" in sentence(f"{wrong}=1")


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("algorithm.kl.estimator=low_var_kl", "(did you mean 'k3'?)"),
        ("algorithm.kl.estimator=mse", "(did you mean 'k2'?)"),
        ("model.recompute=true", "(did you mean 'full'?)"),
        ("model.dtype=fp32", "(did you mean 'float32'?)"),
        ("run.resume=true", "(did you mean 'auto'?)"),
        ("critic.optimizer.schedule=constant_with_warmup", "(did you mean 'constant'?)"),
        (
            "trackers.backends=wandb",
            "it must be a list of 'tensorboard', 'wandb', 'mlflow' or 'swanlab' or 'package.module:Class' or "
            "'path/to/file.py:Class', such as [wandb]",
        ),
    ],
)
def test_a_value_of_another_trainer_leads_to_what_means_the_same(wrong: str, hint: str) -> None:
    assert sentence(wrong).endswith(hint)


def test_a_hint_is_a_value_that_is_taken() -> None:
    for name, values in FOREIGN_VALUES.items():
        for meant in values.values():
            parse_config(apply_overrides(BASE, [f"{name}={meant}", "algorithm.kl.unbiased=true"]))  # with which all three are


def test_a_config_for_the_other_kind_of_run_is_told_so() -> None:
    assert sentence("data.rows_per_step=8").startswith(
        "data.rows_per_step is a field of `megarl sft`, `reward-model` or `preference`, with a section objective, but this is "
        "a config for `megarl train` by reinforcement learning"
    )
    overrides = ["algorithm.name=grpo", "rewards=[]", "run.stpes=1"]
    with pytest.raises(ConfigError, match=r"^rewards and algorithm are fields of `megarl train` by .*; and 1 more problem in"):
        parse_supervised_config({"objective": {}, **apply_overrides(BASE, overrides)})


def test_a_key_given_twice_is_refused(tmp_path) -> None:
    (tmp_path / "c.yaml").write_text("run:\n  steps: 1\n  steps: 2\n")
    with pytest.raises(ConfigError, match=r"key 'steps' is given twice \(line 3"):
        load_config(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("text", "part"), [("[1]", "holds [1]; it must hold sections"), ("a: [", "not valid YAML"), ("", "null")]
)
def test_a_file_that_is_no_config_is_named(tmp_path, text: str, part: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "c.yaml")
    assert part in str(caught.value)
    assert "c.yaml" in str(caught.value)


def test_overrides_leave_the_tree_they_are_given_untouched() -> None:
    before = copy.deepcopy(BASE)
    apply_overrides(BASE, ["rewards.0.weight=3", "run.steps=5"])
    assert before == BASE


def write_model(folder, **sizes: int) -> str:
    import json

    folder.mkdir()
    tree = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 6, "intermediate_size": 24}
    tree |= {"hidden_size": 64, "model_type": "llama", "vocab_size": 96, "max_position_embeddings": 128, **sizes}
    (folder / "config.json").write_text(json.dumps(tree))
    return str(folder)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["policy.layout.tp=3"], "policy.layout.tp is 3, which does not divide the model's 8 attention heads"),
        (
            ["policy.layout.pp=4"],
            "policy.layout.pp is 4, which does not divide the model's 6 layers; it must be 1, 2, 3 or 6",
        ),
        (["reference.layout={tp: 16}"], "reference.layout.tp is 16"),
        (["policy.layout={ep: 2, dp: 2}"], "policy.layout.ep is 2, which needs experts, and the model has none"),
        (
            ["model.layer_spec=local", "policy.layout.cp=2"],
            "policy.layout.cp is 2, which the layers of model.layer_spec = 'local' do not support",
        ),
        (["rollout.tp=3"], "rollout.tp is 3"),
        (["model.path=models/typo"], "model.path is 'models/typo', which is no folder"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(tmp_path, overrides: list[str], part: str) -> None:
    path = write_model(tmp_path / "model")
    config = parse_config(apply_overrides(BASE, [f"model.path={path}", *overrides]))
    with pytest.raises(MegarlError) as caught:
        check_models(config)
    assert part in str(caught.value)


def test_tp_must_divide_the_feed_forward_width(tmp_path) -> None:
    path = write_model(tmp_path / "model", intermediate_size=27)
    config = parse_config(apply_overrides(BASE, [f"model.path={path}", "policy.layout.tp=2"]))
    with pytest.raises(ConfigError, match=r"policy\.layout\.tp is 2, .* feed-forward width of 27"):
        check_models(config)


def test_a_missing_model_folder_names_the_nearest_one(tmp_path) -> None:
    write_model(tmp_path / "SmolLM2")
    config = parse_config(apply_overrides(BASE, [f"model.path={tmp_path}/SmolLM"]))
    with pytest.raises(MegarlError, match=r"did you mean '.*/SmolLM2'"):
        check_models(config)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("model: &m {path: *m}", "nested more than 50 deep"),
        (
            "a: &a [x, x, x]\n"
            + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(12)),
            "entries",
        ),
        ("model: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("? [a, b]\n: 3", "a key is a list or a mapping"),
    ],
    ids=["alias of itself", "aliases of aliases", "deep", "list as key"],
)
def test_yaml_without_end_is_a_sentence_at_once(tmp_path, text: str, part: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match="is not valid YAML") as caught:
        load_config(tmp_path / "c.yaml")
    assert part in str(caught.value)
