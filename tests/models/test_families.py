"""Every architecture family in megatron-core's own model, on one rank, against transformers in float32."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megarl.data.stream import split_shared_prompts
from megarl.models.hf_folder import HFFolder, write_hf_folder
from megarl.models.registry import architecture_for
from tests.families import CHOOSES, ODD, VARIANTS, build_folder, compressed, hub_gradients, hub_tensors, hugging_face
from tests.models.megatron_models import TEMPERATURE, embedded, facts, load_and_write, megatron_names, units
from tests.predicting import build_predicting
from tests.world import World

FAMILIES = VARIANTS | {
    name: ODD[name] for name in ("mistral-odd", "gemma3-odd", "gpt_oss-odd", "glm_moe_dsa-odd") if name in ODD
}
LOCAL = [name for name, family in FAMILIES.items() if family.in_local_layers]
"""What megatron-core's own layers can run: dense models without windows."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        build_folder(name, root / name)
    return {name: root / name for name in FAMILIES}


@pytest.fixture(scope="module")
def by_reference(world: World, folders: dict[str, Path]) -> dict[str, Any]:
    """Facts about every model under the `reference` layer spec."""
    [found] = world.call(facts, [str(path) for path in folders.values()], "reference", size=1, timeout_s=300)
    return {name: found[str(path)] for name, path in folders.items()}


@pytest.fixture(scope="module")
def by_local(world: World, folders: dict[str, Path]) -> dict[str, Any]:
    """Facts about the models of LOCAL under megatron-core's own `local` layer spec."""
    [found] = world.call(facts, [str(folders[name]) for name in LOCAL], "local", size=1)
    return {name: found[str(folders[name])] for name in LOCAL}


@pytest.fixture(scope="module")
def by_transformers() -> dict[str, dict[str, Any]]:
    """Logits of the first unit's responses, and gradients by hub name, each response alone behind its prompt."""
    found = {}
    for name in FAMILIES:
        model = own = hugging_face(name)
        logits: list[Tensor] = []
        exact = compressed.in_float64 if name.startswith("deepseek_v4") else nullcontext
        if name.startswith("deepseek_v4"):
            model = deepcopy(own).double()
        for unit in split_shared_prompts(units()):
            response = unit.responses[0]
            ids = torch.cat([unit.prompt_ids, response.token_ids])[None]
            with exact():
                of_response = model(ids).logits[0, len(unit.prompt_ids) - 1 : -1]
            logits.append(of_response.detach().float())
            log_p = (of_response.double() / TEMPERATURE).log_softmax(-1)
            scores = log_p.gather(1, response.token_ids[:, None])[:, 0] - 0.3 * (log_p.exp() * log_p).sum(-1)
            (-(response.columns["weights"] * scores)[response.mask].sum()).backward()
        gradients = {key: gradient.float() for key, gradient in hub_gradients(model).items()}
        found[name] = {"logits": logits[:3], "gradients": gradients, "tensors": hub_tensors(own), "model": own}
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(by_reference: Any, by_transformers: Any, name: str) -> None:
    _check_logits(by_reference[name], by_transformers[name])


@pytest.mark.parametrize("name", LOCAL)
def test_logits_of_megatron_cores_own_layers_equal_those_of_transformers(
    by_local: Any, by_transformers: Any, name: str
) -> None:
    _check_logits(by_local[name], by_transformers[name])


def _check_logits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for of_megatron, of_transformers in zip(found["logits"], expected["logits"], strict=True):
        assert of_transformers.std() > 0.5
        torch.testing.assert_close(of_megatron[:, :131], of_transformers, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_gradient_element_equals_that_of_transformers(by_reference: Any, by_transformers: Any, name: str) -> None:
    found, expected = by_reference[name]["gradients"], by_transformers[name]["gradients"]
    assert found.keys() - expected.keys() == {key for key in found if key.endswith(CHOOSES)}
    for key, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[key], gradient, rtol=0, atol=1e-5 * scale, msg=lambda m, k=key: f"{k}: {m}")
    trained = [gradient for key, gradient in expected.items() if ".indexer." not in key]  # transformers freezes indexers
    assert sum(bool(gradient.any()) for gradient in trained) > 0.9 * len(trained)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_loaded_is_exported_byte_for_byte(by_reference: Any, by_transformers: Any, name: str) -> None:
    found, expected = by_reference[name]["exported"], by_transformers[name]["tensors"]
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("name", FAMILIES)
def test_the_map_names_everything_a_checkpoint_of_megatron_core_holds(by_reference: Any, folders: Any, name: str) -> None:
    weight_map = _weight_map(folders[name])
    names = megatron_names(weight_map, range(weight_map.num_layers), True, True)
    assert {each: list(weight_map.rule_for(each).shape(1)) for each in names} == by_reference[name]["shapes"]
    assert sorted(names) == sorted(by_reference[name]["state"])


@pytest.mark.parametrize("name", FAMILIES)
def test_rotary_frequencies_and_scale_equal_those_of_transformers(by_reference: Any, by_transformers: Any, name: str) -> None:
    frequencies, scale = by_reference[name]["rotary"]
    rotary, kinds = getattr(by_transformers[name]["model"].model, "rotary_emb", None), ("full_attention", "sliding_attention")
    if rotary is None:  # nothing rotates
        return
    if hasattr(rotary, "main_inv_freq"):  # DeepSeek-V4, whose layers rotate by themselves
        found = (rotary.main_inv_freq, rotary.main_attention_scaling)
    elif not hasattr(rotary, "inv_freq"):  # one for each kind of layer
        expected = torch.cat([getattr(rotary, f"{kind}_inv_freq") for kind in kinds])
        assert not torch.equal(*expected.chunk(2))
        assert rotary.sliding_attention_attention_scaling == 1.0
        found = (expected, rotary.full_attention_attention_scaling)
    else:
        found = (rotary.inv_freq, rotary.attention_scaling)
    torch.testing.assert_close(frequencies, found[0], rtol=1e-6, atol=0.0)
    assert scale == pytest.approx(found[1])


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.num_experts])
def test_an_update_moves_every_weight_but_not_the_bias_that_picks_experts(by_reference: Any, name: str) -> None:
    before, after = by_reference[name]["exported"], by_reference[name]["after"]
    unmoved = {key for key in before if torch.equal(before[key], after[key])}
    idle = {key for key, gradient in by_reference[name]["gradients"].items() if not gradient.any()}
    assert unmoved == idle | {key for key in before if key.endswith(CHOOSES)}


@pytest.mark.parametrize("name", ["mistral", "qwen2", "gemma3", "olmo3", "phi3-window", "smollm3-window", "gpt_oss"])
def test_a_window_hides_tokens_of_the_response_that_is_compared(by_transformers: Any, name: str) -> None:
    """Else the comparisons here, and those in every layout, would prove nothing of windows."""
    unit = units()[0]
    response = max(unit.responses, key=lambda one: len(one.token_ids))
    model = hugging_face(name)
    window = model.config.sliding_window
    assert window < len(response.token_ids)
    ids = torch.cat([unit.prompt_ids, response.token_ids])[None]
    expected = by_transformers[name]["logits"][unit.responses.index(response)]
    torch.testing.assert_close(model(ids).logits[0, len(unit.prompt_ids) - 1 : -1], expected)
    model.config.sliding_window = 200
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    assert float((model(ids).logits[0, len(unit.prompt_ids) - 1 : -1] - expected).abs().max()) > 1e-3


def test_embeddings_are_multiplied_by_a_number_of_the_models_dtype(world: World, folders: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["gemma3"], dtype=torch.bfloat16)
    ids = torch.arange(0, 131, 3)
    [found] = world.call(embedded, str(folders["gemma3"]), ids, "bfloat16", size=1)
    assert torch.equal(found, model.model.embed_tokens(ids))
    assert not torch.equal(found, torch.nn.functional.embedding(ids, model.model.embed_tokens.weight) * 32**0.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_for_multi_token_prediction_that_is_not_trained_is_exported_as_it_was(
    world: World, tmp_path: Path, dtype: str
) -> None:
    build_predicting("glm4_moe", tmp_path / "with")
    [messages] = world.call(load_and_write, str(tmp_path / "with"), str(tmp_path / "again"), dtype, size=1)
    [message] = messages
    assert "tensors beside the model that is trained (model.layers.4." in message
    source, written = HFFolder(tmp_path / "with"), HFFolder(tmp_path / "again")
    assert written.config == source.config | {"dtype": dtype}
    assert {*written.names} == {*source.names}
    for name in source.names:
        tensor = source.get_slice(name)[...]
        kept = name.endswith(CHOOSES)
        assert torch.equal(written.get_slice(name)[...], tensor if kept else tensor.to(getattr(torch, dtype))), name
    read = hub_tensors(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=getattr(torch, dtype)))
    assert all(torch.equal(tensor, written.get_slice(name)[...]) for name, tensor in read.items())


def test_a_folder_that_lacks_the_layer_of_its_config_is_exported_with_a_config_that_has_none(
    world: World, by_transformers: Any, folders: Any, tmp_path: Path
) -> None:
    tensors = by_transformers["deepseek_v3"]["tensors"]
    config = HFFolder(folders["deepseek_v3"]).config | {"num_nextn_predict_layers": 1}
    write_hf_folder(tmp_path / "bare", tensors.items(), config)
    assert world.call(load_and_write, str(tmp_path / "bare"), str(tmp_path / "again"), size=1) == [[]]
    assert HFFolder(tmp_path / "again").config["num_nextn_predict_layers"] == 0


def _weight_map(folder: Path) -> Any:
    config = HFFolder(folder).config
    return architecture_for(config).weight_map(config)
