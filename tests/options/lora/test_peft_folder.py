"""PEFT folders: what is written is what peft loads, what peft wrote is what is read, and what is no adapter is a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.errors import ModelError
from megarl.models.adapters import LORA_A, LORA_B
from megarl.models.registry import architecture_for
from megarl.models.transformers_names import hub_tensors
from megarl.options.lora.peft_folder import AdapterFolder, write_peft_folder
from megarl.options.lora.peft_header import CONFIG_FILE, OUTPUT_WEIGHT, SCORE, WEIGHTS_FILE, AdapterHeader
from megarl.options.lora.weight_map import Lora
from tests.families import FAMILIES, hugging_face

SEPARATE_EXPERTS = {"mixtral": (), "qwen3_moe": ("*.layers.1.mlp.*",), "qwen3_next": ("*.layers.1.mlp.*", "*.shared_expert.*")}
"""Families whose files of single experts peft 0.21.2 turns into what transformers 5 has, and layers that it then forgets."""
FUSED_EXPERTS = {"mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss"}
DENSE = [name for name, family in FAMILIES.items() if family.num_experts is None]
PLAIN = [(name, False) for name in SEPARATE_EXPERTS]  # of these peft 0.21.2 doubles rank and alpha, and with rslora the scale
FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")
"""What the hub calls layers that some families store as one."""
IDS = torch.tensor([[5, 17, 99, 3, 61, 88, 120, 4, 42, 7]])


def adapters_of(hf_config: dict[str, Any], lora: Lora, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Random A and B of every adapter, under the names of the weight map."""
    family = architecture_for(hf_config)
    weight_map = family.weight_map(hf_config)
    fused = family.fused_rows(hf_config) if family.fused_rows is not None else None
    shapes = lora.with_adapters(weight_map, fused).hf_shapes()
    generator = torch.Generator().manual_seed(3)
    names = [name for name in shapes if name.endswith((LORA_A, LORA_B))]
    return {name: torch.randn(shapes[name], generator=generator, dtype=dtype) * 0.3 for name in names}


def with_products(model: Any, adapters: dict[str, Tensor], scale: float) -> Any:
    """The model with scale·B·A added to each weight, by a dense formula."""
    with torch.no_grad():
        for name, weight in hub_tensors(model).items():
            layer = name.removesuffix(".weight")
            if layer + LORA_B not in adapters:
                continue
            block, _, own = layer.rpartition(".")
            fused = f"{block}.{FUSED.get(own, own)}{LORA_A}"
            weight += scale * adapters[layer + LORA_B] @ adapters[fused if fused in adapters else layer + LORA_A]
    return model


def hf_config_of(model: Any) -> dict[str, Any]:
    return json.loads(json.dumps(model.config.to_dict() | {"architectures": [type(model).__name__]}))


def read(folder: Path, hf_config: dict[str, Any]) -> dict[str, Tensor]:
    opened = AdapterFolder(folder, hf_config)
    return {name: opened.get_slice(name)[:] for name in opened.names}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_written_folder_reads_back_byte_equal(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    hf_config, lora = hf_config_of(hugging_face(family)), Lora(rank=4, alpha=8.0)
    tensors = adapters_of(hf_config, lora, dtype)
    write_peft_folder(tmp_path / "a", tensors.items(), lora, base="base", hf_config=hf_config)
    found = read(tmp_path / "a", hf_config)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
    again = AdapterHeader(tmp_path / "a", hf_config).lora
    assert (again.rank, again.alpha, again.rslora, again.exclude) == (4, 8.0, False, ())
    write_peft_folder(tmp_path / "b", reversed(found.items()), again, base="base", hf_config=hf_config)
    first, second = (load_file(tmp_path / name / WEIGHTS_FILE) for name in "ab")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert adapters_of(hf_config, again, dtype).keys() == tensors.keys()


@pytest.mark.parametrize(("family", "rslora"), [*((name, rslora) for name in DENSE for rslora in (False, True)), *PLAIN])
def test_peft_computes_with_a_written_folder_what_the_dense_formula_says(family: str, rslora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = hugging_face(family).double()
    hf_config, lora = hf_config_of(model), Lora(4, 6.0, rslora, exclude=SEPARATE_EXPERTS.get(family, ()))
    tensors = adapters_of(hf_config, lora)
    write_peft_folder(tmp_path / "a", tensors.items(), lora, base="base", hf_config=hf_config)
    with torch.no_grad():
        plain = model(IDS).logits.log_softmax(-1)
        adapted = peft.PeftModel.from_pretrained(model, tmp_path / "a")(IDS).logits.log_softmax(-1)
        expected = with_products(hugging_face(family).double(), tensors, lora.scale)(IDS).logits.log_softmax(-1)
    assert (expected - plain).abs().max() > 0.1
    torch.testing.assert_close(adapted, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("family", "targets", "exclude", "named"),
    [
        ("llama", ("q_proj", "lm_head"), (), ["lm_head", "q_proj"]),
        ("qwen2", ("lm_head",), (), ["lm_head"]),
        ("llama", ("q_proj", "v_proj"), (), ["q_proj", "v_proj"]),
        ("llama", ("all-linear",), ("*.layers.0.self_attn.*",), None),
        ("llama", ("all-linear",), ("down_proj",), ["gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]),
        ("llama", ("*.layers.1.*",), (), None),
        ("phi3", ("qkv_proj",), (), ["qkv_proj"]),
        ("deepseek_v3", ("*.self_attn.o_proj",), (), ["o_proj"]),
    ],
)
def test_modules_are_named_by_their_ends_where_these_name_no_other(
    family: str, targets: tuple[str, ...], exclude: tuple[str, ...], named: list[str] | None, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    model = hugging_face(family)
    hf_config, lora = hf_config_of(model), Lora(4, 6.0, targets=targets, exclude=exclude)
    tensors = adapters_of(hf_config, lora, torch.float32)
    write_peft_folder(tmp_path / "a", tensors.items(), lora, base="base", hf_config=hf_config)
    stored = load_file(tmp_path / "a" / WEIGHTS_FILE)
    layers = {name.removeprefix("base_model.model.").removesuffix(LORA_A) for name in stored if name.endswith(LORA_A)}
    written = json.loads((tmp_path / "a" / CONFIG_FILE).read_text())["target_modules"]
    assert written == (sorted(layers) if named is None else named)
    wrapped = peft.PeftModel.from_pretrained(model, tmp_path / "a")
    adapted = {name.partition(".lora_A.")[0] for name, _ in wrapped.named_parameters() if ".lora_A." in name}
    assert {name.removeprefix("base_model.model.") for name in adapted} == layers
    assert set(AdapterHeader(tmp_path / "a", hf_config).lora.targets) == layers


def written_by_peft(model: Any, folder: Path, **settings: Any) -> Any:
    """The model with random adapters of peft's, which peft has saved to `folder`."""
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | settings))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.3)
    wrapped.save_pretrained(folder)
    return wrapped


@pytest.mark.parametrize("settings", [{"target_modules": "all-linear"}, {"use_rslora": True, "lora_alpha": 3}])
@pytest.mark.parametrize("family", [family for family in DENSE if family != "gemma4"])  # whose layers' inputs have no adapters
def test_a_folder_that_peft_wrote_is_read(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = hugging_face(family).double()
    targets = ["o_proj", "down_proj", "out_proj"] if "use_rslora" in settings else None
    wrapped = written_by_peft(model, tmp_path / "a", **{"target_modules": targets} | settings)
    hf_config = hf_config_of(hugging_face(family))
    lora, tensors = AdapterHeader(tmp_path / "a", hf_config).lora, read(tmp_path / "a", hf_config)
    with torch.no_grad():
        adapted = wrapped(IDS).logits.log_softmax(-1)
        expected = with_products(hugging_face(family).double(), tensors, lora.scale)(IDS).logits.log_softmax(-1)
    torch.testing.assert_close(adapted, expected, rtol=0, atol=1e-10)
    assert tensors.keys() == adapters_of(hf_config, lora).keys()


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings", "ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_adapter_of_the_output_layer_comes_and_goes_as_peft_has_it(family: str, tmp_path: Path) -> None:
    """Also of a tied one; peft stores the layer's own weight beside its adapter."""
    peft = pytest.importorskip("peft")
    hf_config = hf_config_of(hugging_face(family))
    assert bool(hf_config["tie_word_embeddings"]) == (family == "qwen2")
    wrapped = written_by_peft(hugging_face(family).double(), tmp_path / "a", target_modules=["q_proj", "lm_head"])
    stored = load_file(tmp_path / "a" / WEIGHTS_FILE)
    assert f"base_model.model.{OUTPUT_WEIGHT}" in stored
    lora, tensors = AdapterHeader(tmp_path / "a", hf_config).lora, read(tmp_path / "a", hf_config)
    assert {name for name in tensors if "lm_head" in name} == {"lm_head.lora_A.weight", "lm_head.lora_B.weight"}
    assert tensors.keys() == adapters_of(hf_config, lora).keys()
    write_peft_folder(tmp_path / "b", tensors.items(), lora, base="base", hf_config=hf_config)
    written = load_file(tmp_path / "b" / WEIGHTS_FILE)
    assert written.keys() == stored.keys() - {f"base_model.model.{OUTPUT_WEIGHT}"}
    assert all(torch.equal(written[name], stored[name]) for name in written)
    with torch.no_grad():
        expected = wrapped(IDS).logits
        again = peft.PeftModel.from_pretrained(hugging_face(family).double(), tmp_path / "b")(IDS).logits
        without = hugging_face(family).double()(IDS).logits
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-12)
    assert (expected - without).abs().max() > 0.1


def test_the_output_layer_that_peft_stored_must_be_the_models(tmp_path: Path) -> None:
    model = hugging_face("llama")
    written_by_peft(model, tmp_path / "a", target_modules=["lm_head"])
    opened = AdapterFolder(tmp_path / "a", hf_config_of(hugging_face("llama")))
    weight = hugging_face("llama").lm_head.weight.detach()
    opened.check_output(weight, slice(3, 90))
    opened.check_output(weight.double(), slice(None))
    weight[100, 3] += 1e-3
    opened.check_output(weight, slice(0, 100))
    with pytest.raises(ModelError, match=r"lm_head.base_layer.weight' in '.*' differs from the model's output layer"):
        opened.check_output(weight, slice(90, 131))


@pytest.mark.parametrize("targets", [("gate_up_proj", "down_proj"), ("down_proj",), ("gate_up_proj",)])
@pytest.mark.parametrize("family", sorted(FUSED_EXPERTS))
def test_one_adapter_for_all_experts_of_a_layer_is_read_as_one_for_each(
    family: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    model = hugging_face(family).double()
    parameters = [f"mlp.experts.{target}" for target in targets]
    wrapped = written_by_peft(model, tmp_path / "a", target_modules=["o_proj"], target_parameters=parameters)
    hf_config = hf_config_of(hugging_face(family))
    lora, tensors = AdapterHeader(tmp_path / "a", hf_config).lora, read(tmp_path / "a", hf_config)
    with torch.no_grad():
        plain = hugging_face(family).double()(IDS).logits.log_softmax(-1)
        adapted = wrapped(IDS).logits.log_softmax(-1)
        expected = with_products(hugging_face(family).double(), tensors, lora.scale)(IDS).logits.log_softmax(-1)
    assert (expected - plain).abs().max() > 0.1
    torch.testing.assert_close(adapted, expected, rtol=0, atol=1e-10)
    assert tensors.keys() == adapters_of(hf_config, lora).keys()


def test_the_head_of_a_classifier_travels_along(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    hf_config, lora = hf_config_of(hugging_face("llama")), Lora(rank=2, alpha=4.0, targets=("q_proj",))
    config = hf_config | {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "reward"}}
    tensors = adapters_of(config, lora, torch.float32) | {SCORE: torch.randn(1, 32)}
    write_peft_folder(tmp_path / "a", tensors.items(), lora, base="base", hf_config=config)
    opened = AdapterFolder(tmp_path / "a", config)
    assert opened.has_score
    assert torch.equal(opened.get_slice(SCORE)[:], tensors[SCORE])
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**config))
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "a")
    assert torch.equal(loaded.base_model.model.score.modules_to_save["default"].weight, tensors[SCORE])
    loaded.save_pretrained(tmp_path / "b")
    assert read(tmp_path / "b", config).keys() == tensors.keys()


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A folder of adapters of a tiny Llama, and the model's config."""
    hf_config, lora = hf_config_of(hugging_face("llama")), Lora(rank=4, alpha=8.0)
    tensors = adapters_of(hf_config, lora, torch.float32)
    write_peft_folder(tmp_path / "a", tensors.items(), lora, base="base", hf_config=hf_config)
    return tmp_path / "a", hf_config


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("peft_type", "LOHA", "peft_type in '.*' is 'LOHA'; it must be 'LORA'"),
        (
            "use_dora",
            True,
            "use_dora in '.*' is true, which scales the rows of each weight anew; it must be false, null or empty",
        ),
        ("lora_bias", True, "lora_bias in"),
        ("bias", "all", "bias in '.*' is 'all', which trains biases of the model; it must be 'none'"),
        ("modules_to_save", ["lm_head"], r"modules_to_save in '.*' is \['lm_head'\].* null or \['score'\]"),
        (
            "rank_pattern",
            {"q_proj": 8},
            "rank_pattern in '.*' is a section .q_proj., which gives some layers another rank; it must be",
        ),
        ("alpha_pattern", {"q_proj": 8}, "alpha_pattern in"),
        ("init_lora_weights", "pissa", "init_lora_weights in '.*' is 'pissa', which has changed the weights of the model"),
        ("r", 0, "r in '.*' is 0; it must be a positive integer"),
        ("r", 8, r"has shape \[4, 24\], but config.json and adapter_config.json imply \[8, 24\]"),
        ("lora_alpha", None, "lora_alpha in '.*' is null; it must be a positive number"),
    ],
)
def test_a_config_that_asks_for_more_than_plain_adapters_is_refused(
    folder: tuple[Path, dict[str, Any]], field: str, value: Any, message: str
) -> None:
    path, hf_config = folder
    file = path / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(ModelError, match=message):
        AdapterFolder(path, hf_config)


def _remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def _change(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def changed(path: Path) -> None:
        tensors = load_file(path / WEIGHTS_FILE)
        change(tensors)
        save_file(tensors, path / WEIGHTS_FILE)

    return changed


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove(CONFIG_FILE), "has no adapter_config.json, so it is no PEFT folder"),
        (_remove(WEIGHTS_FILE), "has no adapter_model.safetensors; adapters must be safetensors"),
        (lambda path: (path / CONFIG_FILE).write_text("{"), "is not valid JSON"),
        (lambda path: (path / CONFIG_FILE).write_text("[]"), "holds a JSON list; it must be an object"),
        (lambda path: (path / WEIGHTS_FILE).write_bytes(b"\1" * 40), "damaged"),
        (_change(lambda t: t.pop(f"{Q}{LORA_B}")), "q_proj.lora_A.weight', but no '.*q_proj.lora_B.weight'"),
        (_change(lambda t: t.update({f"{Q}{LORA_B}": torch.zeros(3, 4)})), r"has shape \[3, 4\], but .* imply \[32, 4\]"),
        (_change(lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.zeros(3)})), "neither A nor B of an adapter"),
        (
            _change(lambda t: t.update({k.replace(".0.", ".9."): v.clone() for k, v in t.items() if ".0." in k})),
            "'model.layers.9.*' is no linear layer of its decoder or its output .did you mean",
        ),
        (_change(lambda t: t.clear()), "has no adapters"),
    ],
)
def test_a_damaged_folder_and_one_of_another_model_are_a_sentence(
    folder: tuple[Path, dict[str, Any]], damage: Callable[[Path], Any], message: str
) -> None:
    path, hf_config = folder
    damage(path)
    with pytest.raises(ModelError, match=message):
        AdapterFolder(path, hf_config)


def test_a_folder_that_is_not_there_and_a_tensor_that_is_not_there_are_named(folder: tuple[Path, dict[str, Any]]) -> None:
    path, hf_config = folder
    with pytest.raises(ModelError, match="adapter folder '/nowhere' does not exist; it must be a local PEFT folder"):
        AdapterFolder("/nowhere", hf_config)
    with pytest.raises(ModelError, match=r"has no tensor 'model.layers.0.self_attn.w_proj.lora_A.weight' \(did you mean"):
        AdapterFolder(path, hf_config).get_slice("model.layers.0.self_attn.w_proj.lora_A.weight")
    with pytest.raises(ModelError, match="exists already"):
        write_peft_folder(path, [], Lora(4, 8.0), base="b", hf_config=hf_config)
