"""`verify`, `inspect` and `--dry-run`: what they say is so, and what is not the same is found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl import cli
from megarl.config.layout import Layout
from megarl.convert.plan import RECORD, plan_dist, plan_hf
from megarl.convert.sources import open_dist, open_hf
from megarl.convert.verify import check_record, compare, open_any
from tests.convert.conftest import exported, imported

ROOT = Path(__file__).resolve().parents[2]
TENSOR = "model.layers.2.self_attn.k_proj.weight"


@pytest.fixture
def trio(families: Callable[[str], Path], tmp_path: Path) -> dict[str, Path]:
    """The same model as a Hugging Face folder, a checkpoint of it, and one for another layout."""
    imported(families("llama"), tmp_path / "a", Layout(tp=2, pp=2))
    imported(families("llama"), tmp_path / "b", Layout(tp=4))
    exported(tmp_path / "a", tmp_path / "hf")
    return {"a": tmp_path / "a", "b": tmp_path / "b", "hf": tmp_path / "hf", "source": families("llama")}


def flip_bit(folder: Path, name: str) -> None:
    """Flip the lowest bit of the first byte of a tensor, wherever it lies."""
    extent = open_hf(folder).matrices[name].extents[0]
    with (folder / extent.file).open("r+b") as file:
        file.seek(extent.offset)
        byte = file.read(1)[0]
        file.seek(extent.offset)
        file.write(bytes([byte ^ 1]))


def test_the_same_model_in_other_folders_is_the_same(trio: dict[str, Path]) -> None:
    for left, right in (("source", "a"), ("a", "b"), ("b", "hf"), ("source", "hf")):
        tally = compare(open_any(trio[left]), open_any(trio[right]))
        assert (tally.differences, tally.warnings) == ([], [])
        assert tally.tensors == len(open_hf(trio["source"]).matrices)
        assert all(mine == theirs for mine, theirs in tally.checksums.values())


def test_one_flipped_bit_is_found_by_comparing_and_by_the_record_alone(trio: dict[str, Path]) -> None:
    assert check_record(open_any(trio["hf"])).differences == []
    flip_bit(trio["hf"], TENSOR)
    for tally in (check_record(open_any(trio["hf"])), compare(open_any(trio["a"]), open_any(trio["hf"]))):
        [difference] = tally.differences
        assert f"'{TENSOR}' has" in difference
        assert "checksum" in difference


def test_a_damaged_record_is_one_sentence_for_who_verifies_and_who_looks(
    trio: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    record = trio["hf"] / RECORD
    whole = json.loads(record.read_text())
    damaged = [[], whole | {"xxh3_64": 3}, whole | {"xxh3_64": {TENSOR: [1]}}, whole | {"layout": 3}, {}]
    for text in ("", "{", "[" * 100_000, *map(json.dumps, damaged)):
        record.write_text(text)
        for command in (["inspect", str(trio["hf"])], ["verify", str(trio["hf"])]):
            assert cli.main(["convert", *command]) == 2
            said = capsys.readouterr().err
            assert f"'{record}' is damaged or not of a conversion (" in said
            assert said.count("\n") == 1
    record.write_text(json.dumps(whole))
    assert cli.main(["convert", "verify", str(trio["hf"])]) == 0


def test_one_flipped_bit_in_a_distributed_checkpoint_is_found_by_its_record(trio: dict[str, Path]) -> None:
    assert check_record(open_any(trio["b"])).differences == []
    plan = plan_dist("import", open_hf(trio["source"]), Layout(tp=4), None)
    task = next(task for task in plan.tasks if task.target.name.endswith("linear_fc2.weight"))
    extent = task.target.extents[3]
    with (trio["b"] / extent.file).open("r+b") as file:
        file.seek(extent.offset + 5)
        byte = file.read(1)[0]
        file.seek(extent.offset + 5)
        file.write(bytes([byte ^ 128]))
    [difference] = check_record(open_any(trio["b"])).differences
    assert f"'{task.names[3]}' has checksum" in difference


def test_names_shapes_dtypes_and_values_that_differ_are_said(trio: dict[str, Path], tmp_path: Path) -> None:
    exported(trio["a"], tmp_path / "bf16", dtype="bf16")
    tally = compare(open_any(trio["source"]), open_any(tmp_path / "bf16"))
    assert len(tally.differences) == tally.tensors
    assert f"'{TENSOR}' is float32 and bfloat16, the largest difference of its values is 0.00" in "\n".join(tally.differences)
    tied = json.loads((trio["hf"] / "config.json").read_text()) | {"tie_word_embeddings": True}
    weights = load_file(trio["hf"] / "model.safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, trio["hf"] / "model.safetensors", metadata={"format": "pt"})
    (trio["hf"] / "config.json").write_text(json.dumps(tied))
    tally = compare(open_any(trio["source"]), open_any(trio["hf"]))
    assert tally.differences == [f"'lm_head.weight' is in '{trio['source']}', but not in '{trio['hf']}'"]


def test_values_that_are_not_finite_are_warned_of(trio: dict[str, Path], tmp_path: Path) -> None:
    weights = load_file(trio["hf"] / "model.safetensors")
    weights[TENSOR][1, 2:4] = torch.tensor([float("nan"), float("inf")])
    save_file(weights, trio["hf"] / "model.safetensors", metadata={"format": "pt"})
    imported(trio["hf"], tmp_path / "nan", Layout(tp=2))
    tally = compare(open_any(trio["hf"]), open_any(tmp_path / "nan"))
    assert tally.differences == []
    [warning] = tally.warnings
    assert f"'{TENSOR}' has values that are not finite" in warning
    assert "4 in both" in warning


def test_exit_codes_and_checksums_of_the_command(trio: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", "verify", str(trio["source"]), str(trio["a"]), "--checksums"]) == 0
    out = capsys.readouterr().out
    mine, theirs, name = next(line for line in out.splitlines() if line.endswith(TENSOR)).split()
    assert mine == theirs
    assert name == TENSOR
    assert "same: 39 tensors" in out
    flip_bit(trio["hf"], TENSOR)
    assert cli.main(["convert", "verify", str(trio["hf"]), str(trio["a"])]) == 1
    assert f"differs: '{TENSOR}' has other values" in capsys.readouterr().out
    assert cli.main(["convert", "verify", str(trio["hf"])]) == 1
    assert cli.main(["convert", "verify", str(trio["a"])]) == 0


@pytest.mark.slow
# tests/models/test_families.py compares every family's logits, and the first here the ways of a command to them
@pytest.mark.parametrize(
    "family", ["qwen2", *(pytest.param(family, marks=pytest.mark.exhaustive) for family in ("mixtral", "deepseek_v3"))]
)
def test_logits_through_megatron_core_are_those_of_transformers(
    families: Callable[[str], Path], tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    imported(families(family), tmp_path / "dist", Layout(pp=2))
    (tmp_path / "prompts").write_text("[5, 130, 0, 77, 12, 41]\n\n[90, 3, 3, 118]\n")
    arguments = ["convert", "verify", str(families(family)), str(tmp_path / "dist"), "--prompts", str(tmp_path / "prompts")]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "logits of 10 tokens" in out
    assert "same best token 100.0%" in out
    assert float(out.partition("max abs difference ")[2].partition(",")[0]) < 1e-5
    # a checkpoint that fits but holds other weights
    other = load_file(families(family) / "model.safetensors")
    other["model.norm.weight"] = other["model.norm.weight"] * 1.1
    (tmp_path / "other").mkdir()
    save_file(other, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "other" / "config.json").write_bytes((families(family) / "config.json").read_bytes())
    arguments[2] = str(tmp_path / "other")
    assert cli.main(arguments) == 1
    assert "differs: logits differ by" in capsys.readouterr().out


def test_inspect_says_what_a_folder_is(trio: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", "inspect", str(trio["a"]), "--keys"]) == 0
    out = capsys.readouterr().out
    for part in (
        "megatron-core distributed checkpoint",
        "LlamaForCausalLM, num_hidden_layers=4, hidden_size=32, vocab_size=131",
        "tp=2,pp=2",
        "decoder.layers.mlp.linear_fc1.weight",
        "[4, 48, 32]  16 chunks",
    ):
        assert part in out
    elements = sum(t.numel() for t in load_file(trio["source"] / "model.safetensors").values()) + 2 * 32  # two padded rows
    assert f"{elements:,} float32" in out
    assert cli.main(["convert", "inspect", str(trio["source"])]) == 0
    assert "Hugging Face folder" in capsys.readouterr().out


def test_a_dry_run_says_the_bytes_that_a_run_moves_and_writes_nothing(
    trio: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for action, source, plan in (
        ("import", trio["source"], plan_dist("import", open_hf(trio["source"]), Layout(), None)),
        ("export", trio["a"], plan_hf("export", open_dist(trio["a"]), None)),
    ):
        assert cli.main(["convert", action, str(source), str(tmp_path / "none"), "--dry-run", "--rate", "0.001"]) == 0
        out = capsys.readouterr().out
        weights = load_file(trio["source"] / "model.safetensors").values()
        assert plan.bytes_read == sum(tensor.nbytes for tensor in weights)
        assert f"{plan.bytes_written / 2**20:,.2f} MiB in 1 file" in out
        assert f"predicted time {plan.bytes_written / 1e6:.0f} s".replace(" ", "") in out.replace(" ", "")
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "parameters", "layout"),
    [
        ("llama-3.1-405b", 405_853_388_800, "tp=8,pp=16,first_stage_layers=7,last_stage_layers=7"),
        # with the layer for multi-token prediction, without its second copies of embedding and output layer
        ("deepseek-v3", 671_026_419_200 + 11_610_068_224, "pp=16,dp=64,ep=64,first_stage_layers=3,last_stage_layers=2"),
    ],
)
def test_the_largest_models_are_planned_from_their_config_in_little_memory(model: str, parameters: int, layout: str) -> None:
    """Data beyond 1 GiB is refused by the system."""
    arguments = [
        "convert",
        "import",
        f"examples/models/{model}",
        "/nowhere/out",
        "--dry-run",
        "--rate",
        "1",
        "--layout",
        layout,
    ]
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))\n"
    code += f"from megarl.cli import main; sys.exit(main({arguments!r}))"
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    gib = float(answer.stdout.partition("bytes written")[2].split()[0].replace(",", ""))
    assert gib == pytest.approx(2 * parameters / 2**30, rel=1e-3)
