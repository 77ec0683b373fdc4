"""What a relay is handed in few bits has the types that senders quantise it to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.config.layout import Layout
from megarl.models.registry import architecture_for, load_hf_config
from megarl.models.weight_tensors import shard_from_hf
from megarl.options.few_bits.formats import FORMATS
from megarl.options.few_bits.quantise import FormatQuantiser
from megarl.options.transports.relay import Relay, sent_dtypes
from megarl.options.transports.relay_plan import Message, RelayPlan, round_bytes
from megarl.weights.machines import Machines
from megarl.weights.plan import plan_reshard
from megarl.weights.rank_plan import RankPlan
from megarl.weights.sglang_targets import EngineTarget
from tests.families import build_folder


@pytest.mark.parametrize("name", ["fp8-block", "mxfp8", "int4-32"])
def test_a_relay_expects_the_types_that_the_sender_makes(tmp_path: Path, name: str) -> None:
    build_folder("qwen3_moe", tmp_path / "model")
    wide = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64, "head_dim": 32}
    config, format = load_hf_config(tmp_path / "model") | wide, FORMATS[name]
    plan = plan_reshard(config, Layout(), EngineTarget(tp=1), format=format)
    machines = Machines((0,), ((1,),), ((0,),))
    beside, messages = RankPlan(plan, 0, buckets=()), RelayPlan(plan, 0, machines, round_bytes(plan))
    relay = Relay(beside, messages, torch.device("cpu"), sent_dtypes(plan.tensors))
    _, load = relay._expected(Message(0, 0, 0, tuple(plan.sends(0))))
    found = {piece.held.tensor: piece.tensor.dtype for piece in load.pieces}
    weight_map, quantiser = architecture_for(config).weight_map(config), FormatQuantiser(format)
    expected = {}
    for rule in weight_map.bound_rules():
        if not quantiser.applies_to(rule):
            expected |= {hub: getattr(torch, rule.dtype or "bfloat16") for hub in rule.hf_names}
            continue
        shard = shard_from_hf(rule, lambda hub, rule=rule: torch.ones(rule.hf_shapes[hub]), 0, 1)
        made = quantiser(rule, shard, 0, 1, lambda values: None)
        for part in quantiser.rules(rule):
            expected |= dict.fromkeys(part.hf_names, made[part.megatron_name].dtype)
    assert found == expected
    assert len(set(found.values())) > 2, "the format has types of its own"


def test_a_quantised_shard_is_on_the_device_of_its_weight() -> None:
    from megarl.models.packings import Copy
    from megarl.models.weight_map import BoundRule

    rule = BoundRule("decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight", ("down.weight",), Copy((64, 64)))
    for format in FORMATS.values():
        if format.group <= 64:
            made = FormatQuantiser(format)(rule, torch.empty(64, 64, device="meta"), 0, 1, lambda values: None)
            assert {tensor.device.type for tensor in made.values()} == {"meta"}, format.name
