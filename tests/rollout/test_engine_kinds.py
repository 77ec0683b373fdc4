"""Which class a run's engines are, and what it says of itself: known kinds, the user's own, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megarl.config import Config
from megarl.config.engine_kinds import KINDS, capabilities_of
from megarl.errors import ConfigError, EngineError
from megarl.rollout.engines.protocol import EnginePlace
from megarl.rollout.engines.registry import CLASSES, check_engine, engine_path, load_engine
from megarl.rollout.engines.sglang.server import ServerOptions
from tests.config.smallest import config as smallest

STUB = """
from megarl.rollout import Engine, EngineCapabilities

class Stub(Engine):
    capabilities = EngineCapabilities(concurrent=True)
    @property
    def weight_version(self): return 0
    async def generate(self, request): return []
    async def health(self): pass
    async def stop(self): pass
    async def begin_update(self, version, base=None): pass
    async def end_update(self, version, checksums=None): pass
    async def abandon_update(self): pass
"""


def config_of(placement: str = "colocated", **rollout: object) -> Config:
    """A config whose section `rollout` has these fields."""
    return smallest(rollout=rollout, resources={"placement": placement})


@pytest.mark.parametrize(
    ("rollout", "kind"),
    [
        ({"engine": "sglang"}, "sglang"),
        ({"engine": "embedded"}, "embedded"),
        ({"engine": "replay", "replay_from": "x.jsonl"}, "replay"),
        ({"engine": "sglang", "weight_transport": "folder", "servers": {"urls": ["http://a:1"]}}, "running SGLang servers"),
    ],
)
def test_the_config_knows_of_an_engine_what_its_class_says_of_itself(rollout: dict[str, object], kind: str) -> None:
    config = config_of(**rollout)
    assert engine_path(config.rollout) == CLASSES[kind]
    assert load_engine(CLASSES[kind]).capabilities is capabilities_of(config.rollout)


def test_every_kind_that_the_config_knows_has_a_class() -> None:
    assert CLASSES.keys() == KINDS.keys()


def test_a_class_of_the_users_own_is_taken_from_its_file_wherever_a_process_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(STUB)
    monkeypatch.chdir(tmp_path)
    config = config_of(engine="mine.py:Stub")
    assert engine_path(config.rollout) == f"{tmp_path}/mine.py:Stub"
    assert capabilities_of(config.rollout).concurrent
    assert check_engine(config, "cpu").__name__ == "Stub"


@pytest.mark.parametrize(
    ("changed", "rollout", "sentence"),
    [
        (("class Stub(Engine)", "class Stub"), {}, r"mine.py:Stub', which must be a class derived from megarl.rollout.Engine"),
        (("async def stop(self): pass", ""), {}, r"a class without stop, which every engine must have"),
        (("capabilities =", "able ="), {}, r"has no EngineCapabilities as 'capabilities'"),
        (("import Engine,", "import Engin,"), {}, r"mine.py cannot be imported: ImportError"),
        (("class Stub", "class Stubb"), {}, r"no function 'Stub' \(did you mean 'Stubb'\?\)"),
        (
            ("", ""),
            {"tp": 2},
            r"rollout.tp is 2, which rollout.engine = '.*mine.py:Stub' cannot do in one process; it must be 1",
        ),
        (("", ""), {"engine_args": {"a": 1}}, r"rollout.engine_args needs .* an own engine that reads them"),
        (("", ""), {"replay_from": "x"}, r"rollout.replay_from needs rollout.engine = 'replay'"),
    ],
)
def test_a_class_that_is_no_engine_or_contradicts_a_field_is_refused_in_a_sentence(
    tmp_path: Path, changed: tuple[str, str], rollout: dict[str, object], sentence: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(STUB.replace(*changed) if changed[0] else STUB)
    with pytest.raises(ConfigError, match=sentence):
        check_engine(config_of(engine=f"{file}:Stub", **rollout), "cpu")


def test_no_code_of_the_user_runs_while_a_config_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit('it was run')")
    assert config_of(engine=f"{file}:Stub").rollout.engine == f"{file}:Stub"


def test_an_unknown_kind_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"rollout.engine is 'sglnag'.*did you mean 'sglang'"):
        config_of(engine="sglnag")


@pytest.mark.parametrize(("first", "bound"), [(0, "2,3|4,5"), (4, "6,7|8,9"), (6, "8,9|2,3")])
def test_engines_of_a_machine_are_bound_to_cores_beside_each_other(
    first: int, bound: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(2, 10)))
    options = ServerOptions("model", tmp_path / "log", tp=2, threads=2, first_core=first)
    assert options.environment({})["SGLANG_CPU_OMP_THREADS_BIND"] == bound


def test_a_server_of_each_engine_has_room_for_its_share_of_a_step(tmp_path: Path) -> None:
    config = config_of(
        engine="sglang", engines=3, prompts_per_step=8, samples_per_prompt=40, max_new_tokens=100, tp=2,
        servers={"port": 2000}, engine_args={"mem_fraction_static": 0.5},
    )  # fmt: skip
    config = config.model_copy(update={"data": config.data.model_copy(update={"max_prompt_tokens": 28})})
    kind = load_engine(CLASSES["sglang"])
    options = ServerOptions("model", **kind.options(config, EnginePlace(2, 5, "cpu", tmp_path)))
    assert (options.port, options.log_file, options.tp) == (2002, tmp_path / "engine-2.log", 2)
    assert (options.threads, options.first_core) == (2, 8)  # of 5 threads its 2 ranks get 2 each, beside two engines of 4 cores
    assert options.extra == {"mem_fraction_static": 0.5}
    # 8 prompts are 3 for each of 3 engines, with 40 responses of at most 28 + 100 tokens
    assert (options.max_running_requests, options.max_total_tokens) == (120, 120 * 128 + 1024)
    assert ServerOptions("model", **kind.options(config, EnginePlace(0, 5, "cuda", tmp_path))).max_total_tokens is None


@pytest.mark.parametrize(
    ("gpus", "flags"), [((4, 5), ["4", "1"]), ((0, 2), ["0", "2"]), ((7,), ["7", "1"])], ids=["neighbours", "step", "one"]
)
def test_a_server_on_gpus_is_told_which_are_its_own_and_sees_all(
    gpus: tuple[int, ...], flags: list[str], tmp_path: Path
) -> None:
    config = config_of(engine="sglang", tp=len(gpus))
    place = EnginePlace(0, 5, "cuda", tmp_path, gpus)
    options = ServerOptions("model", **load_engine(CLASSES["sglang"]).options(config, place))
    line = options.arguments(1, "id")
    said = [line[line.index(flag) + 1] for flag in ("--base-gpu-id", "--gpu-id-step", "--tp-size", "--device")]
    assert said == [*flags, str(len(gpus)), "cuda"]
    seen = options.environment({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "A": "1"})
    assert {name: value for name, value in seen.items() if name != "PYTHONPATH"} == {
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "A": "1", "SGLANG_VLM_CACHE_SIZE_MB": "0"
    }  # fmt: skip


def test_a_server_on_a_cpu_is_told_of_no_gpu(tmp_path: Path) -> None:
    place = EnginePlace(0, 5, "cpu", tmp_path)
    options = ServerOptions("model", **load_engine(CLASSES["sglang"]).options(config_of(engine="sglang"), place))
    assert not {"--base-gpu-id", "--gpu-id-step"} & set(options.arguments(1, "id"))


@pytest.mark.parametrize("name", ["base_gpu_id", "gpu_id_step"])
def test_where_a_servers_gpus_are_is_not_for_the_config_to_say(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.engine_args\.{name} is set by megarl, which chooses the engines' GPUs"):
        check_engine(config_of(engine="sglang", engine_args={name: 1}), "cuda")


def test_a_server_leaves_room_on_its_gpus_for_what_the_trainer_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = tmp_path / "nvidia-smi"  # in MiB, a line for each GPU
    answers.write_text("#!/bin/sh\necho 81559\necho 81920\n")
    answers.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def fraction(beside: int, **rollout: object) -> str | None:
        place = EnginePlace(0, 5, "cuda", tmp_path, (0,), beside)
        config = config_of(engine="sglang", **rollout)
        line = ServerOptions("model", **load_engine(CLASSES["sglang"]).options(config, place)).arguments(1, "id")
        return line[line.index("--mem-fraction-static") + 1] if "--mem-fraction-static" in line else None

    total = 81559 * 2**20
    found = fraction(4 * 2**30)
    assert found is not None
    assert total * (1 - float(found)) == pytest.approx(14 * 2**30, abs=0.001 * total)
    assert fraction(4 * 2**30, engine_args={"mem_fraction_static": 0.5}) == "0.5"
    assert fraction(0) is None, "SGLang takes what is free"
    with pytest.raises(EngineError, match=r"of the 79.6 GiB of a GPU the trainer keeps 75.0 and .* works in 10: none is left"):
        fraction(75 * 2**30)


def test_two_processes_on_one_gpu_cannot_share_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.rollout.engines.sglang.engine.check_model", lambda *_: None)
    check = load_engine(CLASSES["sglang"]).check
    config = config_of(engine="sglang", weight_transport="process_group")
    check(config, "cpu")
    with pytest.raises(ConfigError, match=r"weight_transport is 'process_group', which NCCL cannot use .* one GPU"):
        check(config, "cuda")
    check(config_of("separate", engine="sglang", weight_transport="process_group"), "cuda")
