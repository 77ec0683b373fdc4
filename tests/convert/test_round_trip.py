"""Hugging Face → distributed checkpoint → Hugging Face gives every byte back, for every family, layout and way there."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoint.format.torch_save_format import find_tensor, frame
from megarl.config.layout import Layout
from megarl.convert.plan import plan_dist, plan_hf
from megarl.convert.run import run_plan
from megarl.convert.sources import open_dist, open_hf
from megarl.errors import LayoutError
from megarl.models.hf_folder import HFFolder
from tests.convert.conftest import assert_same_tensors, exported, imported, resharded, tensors
from tests.families import VARIANTS, hugging_face
from tests.themes.parallel.worlds import LAYOUTS, layout_for

OTHERS = [Layout(), Layout(pp=3, first_stage_layers=1, last_stage_layers=1)]
"""Besides those of the parity matrix."""
OTHERS_OF_EXPERTS = [Layout(tp=4, ep=2, etp=2), Layout(tp=2, pp=2, ep=2)]
A_FEW = ("vpp2", "tp2·pp2", "ep2·etp2")
"""Every way to split a tensor. What a layout does to one is the same in every family: two stand for all in all the others."""
IN_ALL_LAYOUTS = ("llama", "deepseek_v3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "names"),
    [
        *(pytest.param(family, A_FEW, id=family) for family in VARIANTS if family not in IN_ALL_LAYOUTS),
        *(
            pytest.param(
                family, tuple(LAYOUTS), id=f"{family}, all", marks=() if family in IN_ALL_LAYOUTS else pytest.mark.exhaustive
            )
            for family in VARIANTS
        ),
    ],
)
def test_every_layout_gives_every_byte_back_also_by_way_of_another(
    families: Callable[[str], Path], tmp_path: Path, family: str, names: tuple[str, ...]
) -> None:
    folder, before = families(family), None
    kind = VARIANTS[family].kind | {"biases": False, "one_stage": False}  # a conversion splits them all the same
    of_matrix = [layout for name in names if (layout := layout_for(name, **kind)) is not None]
    assert len(of_matrix) > 1
    others = OTHERS + (OTHERS_OF_EXPERTS if VARIANTS[family].num_experts else [])
    for number, layout in enumerate(of_matrix + (others if names != A_FEW else [])):
        checkpoint = tmp_path / f"dist{number}"
        imported(folder, checkpoint, layout)
        exported(checkpoint, tmp_path / f"hf{number}", max_shard_bytes=20_000)
        assert_same_tensors(tmp_path / f"hf{number}", folder)
        if before is not None:
            resharded(before, tmp_path / f"resharded{number}", layout)
            for file in checkpoint.glob("*.distcp"):
                assert (tmp_path / f"resharded{number}" / file.name).read_bytes() == file.read_bytes(), file.name
        before = checkpoint


def test_an_export_is_a_folder_that_transformers_loads_with_all_that_belongs_to_it(
    families: Callable[[str], Path], tmp_path: Path
) -> None:
    import transformers

    source = tmp_path / "source"
    source.mkdir()
    for file in families("llama").iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    carried = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
    for name in carried:
        (source / name).write_text("{}" if name.endswith("json") else "{{ messages }}")
    imported(source, tmp_path / "dist", Layout(tp=2))
    source.rename(tmp_path / "moved")  # the checkpoint needs it no more
    exported(tmp_path / "dist", tmp_path / "hf", max_shard_bytes=20_000)
    assert all((tmp_path / "hf" / name).read_bytes() == (tmp_path / "moved" / name).read_bytes() for name in carried)
    assert HFFolder(tmp_path / "hf").config == HFFolder(tmp_path / "moved").config
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    expected = tensors(tmp_path / "moved")
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    for file in (tmp_path / "hf").glob("*.safetensors"):
        length = int.from_bytes(file.read_bytes()[:8], "little")
        assert json.loads(file.read_bytes()[8 : 8 + length])["__metadata__"] == {"format": "pt"}


@pytest.mark.parametrize("family", ["phi3", "glm4"])
def test_what_the_hub_stores_in_one_tensor_is_stored_so_again(
    families: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    """By transformers' own names, which weight maps do not have."""
    expected = hugging_face(family).state_dict()
    imported(families(family), tmp_path / "dist", Layout(tp=2, pp=2))
    exported(tmp_path / "dist", tmp_path / "hf", max_shard_bytes=20_000)
    for folder in (families(family), tmp_path / "hf"):
        found = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_dtypes_change_as_torch_changes_them(families: Callable[[str], Path], tmp_path: Path) -> None:
    """Halves on the way in, floats on the way out; a parameter with a dtype of its own (DeepSeek's expert bias) keeps it."""
    folder = families("deepseek_v3")
    imported(folder, tmp_path / "dist", Layout(tp=2, pp=2, ep=2), dtype="bf16")
    exported(tmp_path / "dist", tmp_path / "same")
    exported(tmp_path / "dist", tmp_path / "floats", dtype="fp32")
    same, floats = tensors(tmp_path / "same"), tensors(tmp_path / "floats")
    for name, value in tensors(folder).items():
        kept = value if name.endswith("e_score_correction_bias") else value.to(torch.bfloat16)
        assert same[name].dtype == kept.dtype, name
        assert torch.equal(same[name], kept), name
        assert floats[name].dtype == torch.float32, name
        assert torch.equal(floats[name], kept.float()), name
    assert HFFolder(tmp_path / "same").config["dtype"] == "bfloat16"
    assert HFFolder(tmp_path / "floats").config["dtype"] == "float32"


def test_blocks_smaller_than_a_tensor_change_nothing(
    families: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.convert.blocks.BLOCK_BYTES", 200)
    for family in ("qwen2", "mixtral"):
        layout = Layout(tp=4, pp=2, etp=4)
        imported(families(family), tmp_path / family, layout)
        exported(tmp_path / family, tmp_path / f"{family}-hf")
        assert_same_tensors(tmp_path / f"{family}-hf", families(family))


def test_each_ranks_part_is_one_run_of_bytes_in_a_file_of_its_own(families: Callable[[str], Path], tmp_path: Path) -> None:
    plan = plan_dist("import", open_hf(families("llama")), Layout(tp=2, pp=2), None)
    assert sorted(plan.files) == [f"__{rank}_0.distcp" for rank in range(4)]
    run_plan(plan, tmp_path / "dist")
    dist = open_dist(tmp_path / "dist")
    assert dist.dist is not None
    for file, size in plan.files.items():
        own = (chunk for key in dist.dist.keys.values() for chunk in key.chunks if chunk.file == file)
        chunks = sorted({(chunk.offset, chunk.offset + chunk.length) for chunk in own})
        gaps = [start - end for (_, end), (start, _) in pairwise(chunks)]
        assert max(gaps) < 64  # alignment
        assert chunks[-1][1] == size


def test_a_layout_that_the_model_does_not_fit_is_refused_with_one_that_does(families: Callable[[str], Path]) -> None:
    for layout, message in (
        (Layout(tp=3), "tp is 3, which does not divide"),
        (Layout(pp=3), "layers"),
        (Layout(dp=3, ep=3), "the model has none"),
    ):
        with pytest.raises(LayoutError, match=message):
            plan_dist("import", open_hf(families("llama")), layout, None)
    with pytest.raises(LayoutError, match="4 experts"):
        plan_dist("import", open_hf(families("mixtral")), Layout(dp=3, ep=3), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(1, 12, 32), (7,), (3, 0), ()])
def test_a_frame_is_what_torch_saves_and_loads(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 10).to(dtype)
    content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    around = frame(dtype, shape)
    blob = around.prefix + content + around.suffix
    assert len(blob) == around.length
    loaded = torch.load(io.BytesIO(blob), weights_only=True)
    assert loaded.dtype == dtype
    assert torch.equal(loaded, tensor)
    saved = io.BytesIO()
    torch.save(tensor, saved)
    for stored in (blob, saved.getvalue()):  # ours, and what torch itself makes
        found = find_tensor(io.BytesIO(b"before" + stored + b"after"), 6, len(stored), dtype, shape)
        assert (b"before" + stored)[found:].startswith(content)
    with zipfile.ZipFile(io.BytesIO(saved.getvalue())) as theirs, zipfile.ZipFile(io.BytesIO(blob)) as ours:
        name = next(name for name in theirs.namelist() if name.endswith("/data.pkl"))
        assert ours.read("archive/data.pkl") == theirs.read(name)


def test_a_frame_of_more_than_4_gib_is_what_torch_loads(tmp_path: Path) -> None:
    elements = 5 * 2**30 // 2
    around = frame(torch.bfloat16, (elements,))
    with (tmp_path / "large").open("wb") as file:  # a hole but for the last element
        file.write(around.prefix)
        file.seek(2 * elements - 2, io.SEEK_CUR)
        file.write(b"\x80\x3f" + around.suffix)
    loaded = torch.load(tmp_path / "large", mmap=True, weights_only=True)
    assert loaded.shape == (elements,)
    assert (loaded[-1], loaded[-2]) == (1.0, 0.0)
    with (tmp_path / "large").open("rb") as file, zipfile.ZipFile(file) as archive:
        assert archive.getinfo("archive/data/0").file_size == 2 * elements


def test_a_source_with_a_repeated_output_layer_or_rotary_tables_is_taken_without_them(
    families: Callable[[str], Path], tmp_path: Path
) -> None:
    kept = tensors(families("llama-tied"))
    extra = {"lm_head.weight": kept["model.embed_tokens.weight"].clone(), "model.rotary_emb.inv_freq": torch.ones(3)}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_bytes((families("llama-tied") / "config.json").read_bytes())
    save_file(kept | extra, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    source = open_hf(tmp_path / "hf")
    assert set(source.left_out()) == set(extra)
    run_plan(plan_dist("import", source, Layout(tp=2, pp=2), None), tmp_path / "dist")
    run_plan(plan_hf("export", open_dist(tmp_path / "dist"), None), tmp_path / "back")
    assert_same_tensors(tmp_path / "back", families("llama-tied"))
