"""The table of docs/models.md: a line for each family that is registered, by what the program answers about its models.

The questions are asked of the tiny models of the tests (tests/families, tests/seeing.py, tests/hearing.py), which have of their
families what decides, and of the published configs in examples/models. `SEEN_IN_SGLANG` alone is written by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import yaml

from megarl.config.layout import Layout
from megarl.errors import ConfigError, LayoutError, ModelError
from megarl.models.architecture import Architecture
from megarl.models.check_layouts import check_layout
from megarl.models.registry import ARCHITECTURES, architecture_for, load_hf_config
from megarl.models.shape import ModelShape, shape_of
from megarl.options.few_bits.formats import FORMATS
from megarl.options.lora.sglang import SERVED
from megarl.options.lora.weight_map import Lora

ROOT = Path(__file__).resolve().parents[2]
PAGE, BEGIN, END = "models.md", "<!-- families: begin -->\n", "<!-- families: end -->"
SEEN_IN_SGLANG = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), "tests/options/lora/test_sglang_adapters.py"),
    **dict.fromkeys(("mixtral", "qwen3_moe", "glm4_moe"), "tests/rollout/test_sglang_experts.py"),
    **dict.fromkeys(
        ("deepseek_v3", "glm4", "olmo2", "olmo3", "gemma3_text", "phi3", "granite", "gpt_oss"),
        "tests/rollout/test_sglang_families.py",
    ),
    **dict.fromkeys(("ministral3", "exaone4", "exaone_moe", "glm4_moe_lite"), "tests/rollout/test_sglang_families.py"),
    **dict.fromkeys(
        ("minimax_m2", "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe"),
        "tests/rollout/test_sglang_mixtures.py",
    ),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe"), "tests/rollout/test_sglang_seeing.py"),
}
"""By family the tests in which its servers, on a CPU, answer what transformers computes; tests/docs/test_models_page.py holds
that these are the families of those tests."""
SIZES = (2, 3, 4)
"""Sizes of a dimension of a layout, of which one must be possible."""


@dataclass
class Sources:
    """The configs of a family: those of the tests' tiny models, and by folder the published ones."""

    tiny: list[dict[str, Any]] = field(default_factory=list)
    published: dict[str, dict[str, Any]] = field(default_factory=dict)


def with_families(folder: Path) -> dict[str, str]:
    """The page on families below `folder`, if it is there, with today's table."""
    page = folder / PAGE
    if not page.is_file():
        return {}
    before, _, rest = page.read_text().partition(BEGIN)
    if END not in rest:
        raise SystemExit(f"{page} lacks the marks of the table of families: {BEGIN.strip()} and {END}")
    return {PAGE: f"{before}{BEGIN}" + "\n".join(lines()) + f"\n{END}{rest.partition(END)[2]}"}


@cache
def lines() -> tuple[str, ...]:
    """The table, and below it why families are refused what they do not have."""
    return (*_table(sources()),)


def _table(configs: dict[str, Sources]) -> Iterator[str]:
    plans, why = ready_plans(), dict[tuple[str, str], list[str]]()
    columns = ("family", "split by", "MTP", "engines in few bits", "SGLang", "adapters", "published config", "ready plans")
    yield from (f"| {' | '.join(columns)} |", "|---" * len(columns) + "|")
    for family in ARCHITECTURES:
        of_family, name = configs[family.name], f"`{family.name}`"
        split, refused = split_by(of_family)
        served, reason = served_by(family, of_family)
        for what, sentence in [*refused.items(), *([("SGLang", reason)] if reason else [])]:
            why.setdefault((what, sentence), []).append(name)
        cells = (
            ", ".join((name, *(f"`{other}`" for other in family.other_types))),
            ", ".join(split),
            prediction(family, of_family) or "none",
            ", ".join(few_bits(family, of_family)) or "none",
            served,
            adapters(family, of_family, served),
            "<br>".join(f"`{folder}`, {count(config):,}" for folder, config in of_family.published.items()),
            "<br>".join(f"`{plan}`" for plan in plans.get(family.name, ())),
        )
        yield f"| {' | '.join(cells)} |"
    yield from ("", "Why not, in the program's own words:", "", "| what | families | why |", "|---|---|---|")
    for (what, sentence), names in why.items():
        yield f"| {what} | {', '.join(names)} | {' '.join(sentence.split()).replace('|', chr(92) + '|')} |"


def sources() -> dict[str, Sources]:
    """By name of each family its configs.

    Raises:
        SystemExit: the tests have no model of a family.
    """
    found = {family.name: Sources() for family in ARCHITECTURES}
    for config in _of_tests():
        found[architecture_for(config).name].tiny.append(config)
    served = {folder for _, _, folder in _plans() if folder}
    for file in sorted(ROOT.glob("examples/models/*/config.json")):
        if f"examples/models/{file.parent.name}" not in served:  # what engines load in few bits is the same model again
            config = load_hf_config(file.parent)
            found[architecture_for(config).name].published[file.parent.name] = config
    if missing := [name for name, of_family in found.items() if not of_family.tiny]:
        raise SystemExit(f"tests/families, tests/seeing.py and tests/hearing.py have no model of {', '.join(missing)}: add one")
    return found


def _of_tests() -> Iterator[dict[str, Any]]:
    """The configs of all tiny models."""
    import transformers

    transformers.logging.set_verbosity_error()
    from tests import hearing, seeing
    from tests.families import ODD, VARIANTS
    from tests.families.family import SIZES as OF_ALL

    for entry in (VARIANTS | ODD).values():
        settings = OF_ALL | {"pad_token_id": None} | entry.settings
        config = getattr(transformers, entry.config_class)(**settings).to_dict()
        yield config | {
            "architectures": [f"{entry.class_prefix}ForCausalLM"],
            "model_type": entry.model_type or config["model_type"],
        }
    for name, seen in seeing.SEEING.items():
        yield seeing.hf_config(name).to_dict() | {"architectures": [f"{seen.class_prefix}ForConditionalGeneration"]}
    yield hearing.hf_config().to_dict() | {"architectures": ["Qwen3OmniMoeThinkerForConditionalGeneration"]}


def split_by(of_family: Sources) -> tuple[list[str], dict[str, str]]:
    """The dimensions of layouts that models of a family are split by, and by each of the others that there are, why not."""
    taken, refused = [], dict[str, str]()
    shapes = [shape_of(config) for config in of_family.tiny]
    experts = any(shape.experts for shape in shapes)
    for name in ("tp", "pp", "cp", *(("ep", "etp") if experts else ())):
        answers = [
            _refusal(shape, name, size) for shape in shapes for size in SIZES if name in ("tp", "pp", "cp") or shape.experts
        ]
        if None in answers:
            taken.append(name)
        else:
            refused[name] = _without_sizes(next(answer for answer in answers if answer is not None))
    return taken, refused


def _refusal(shape: ModelShape, name: str, size: int) -> str | None:
    with_experts = bool(shape.experts)
    sizes = {
        "tp": {"tp": size, "sequence_parallel": with_experts, **({"dp": size, "ep": size} if with_experts else {})},
        "etp": {"tp": size, "etp": size, "sequence_parallel": True},
        "ep": {"dp": size, "ep": size},
    }
    try:
        check_layout(Layout(**sizes.get(name, {name: size})), shape)
    except (ConfigError, LayoutError) as error:
        return str(error)
    return None


def _without_sizes(sentence: str) -> str:
    """Return the text of a refusal, but for the value that was asked for."""
    return sentence.partition(", which ")[2].partition("; it must be")[0] or sentence


def prediction(family: Architecture, of_family: Sources) -> str:
    """Say what becomes of layers for multi-token prediction that folders of a family have."""
    found = set()
    for config in of_family.tiny:
        for more in ({}, {"num_nextn_predict_layers": 1}, {"mtp_num_hidden_layers": 1}):
            with contextlib.suppress(ModelError):
                of_model = family.weight_map(config | more)
                others = ("visual.", ".self_attn.")  # a tower is no such layer, nor are keys that nobody reads
                carried = any(not any(other in beginning for other in others) for beginning in of_model.left_out)
                found.add("trained" if of_model.prediction is not None else "carried" if carried else "")
    return next((word for word in ("trained", "carried") if word in found), "")


def few_bits(family: Architecture, of_family: Sources) -> list[str]:
    """The formats with few bits that engines may have the weights of a family in."""
    found = []
    for name in ("fp8-block", "mxfp8", "int4-32"):
        of_experts = name.startswith("int4")
        for config in of_family.tiny:
            if FORMATS[name].refusal(config) is None and (not of_experts or family.weight_map(config).num_experts):
                found.append(name.partition("-")[0].upper())
                break
    return found


def served_by(family: Architecture, of_family: Sources) -> tuple[str, str | None]:
    """Say whether SGLang serves models of a family, and, of one that it is refused for, why."""
    if family.name in SEEN_IN_SGLANG:
        return "seen on a CPU", None
    configs = [*of_family.published.values(), *of_family.tiny]
    without_windows = {"sliding_window": None, "layer_types": None}
    configs += [config | without_windows for config in of_family.tiny if "sliding_window" in config]
    reasons = []
    for config in configs:
        with contextlib.suppress(ModelError):  # a family whose windows cannot be left out
            reasons.append(family.sglang.refusal(config))
    return ("written, not seen", None) if None in reasons else ("refused", reasons[0])


def adapters(family: Architecture, of_family: Sources, served: str) -> str:
    """Say how SGLang, if it may be `served` with the family, gets what adapters have learnt."""
    try:
        shape_of(of_family.tiny[0]).with_lora(Lora(rank=1, alpha=1.0))
    except ConfigError:
        return "refused"
    return "SGLang adds them" if family.name in SERVED else "trained" if served == "refused" else "merged for SGLang"


def count(config: dict[str, Any]) -> int:
    """Numbers in all tensors of a model's folder, but for layers for multi-token prediction."""
    whole, total = architecture_for(config).weight_map(config), 0
    for rule in whole.rules:
        layers = sum(map(rule.has_layer, range(whole.num_layers))) if rule.stage == "layer" else 1
        experts = whole.num_experts if rule.is_expert else 1
        total += 0 if rule.tied_copy else layers * experts * sum(map(prod, rule.packing.hf_shapes))
    return total


def ready_plans() -> dict[str, list[str]]:
    """By family the names of the plans in examples/plans."""
    found: dict[str, list[str]] = {}
    for plan, folder, _ in _plans():
        found.setdefault(architecture_for(load_hf_config(ROOT / folder)).name, []).append(plan)
    return found


@cache
def _plans() -> tuple[tuple[str, str, str | None], ...]:
    """Each ready plan with the folder of its model, and the one that its engines load if that is another."""
    trees = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(ROOT.glob("examples/plans/*.yaml"))}
    return tuple(
        (name, tree["model"]["path"], (tree.get("rollout", {}).get("servers") or {}).get("model_path"))
        for name, tree in trees.items()
    )
