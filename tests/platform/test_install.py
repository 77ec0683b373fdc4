"""Where there is CUDA nothing is changed; where there is none, what changes is as small and as local as promised."""

from __future__ import annotations

import logging.handlers
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl import platform
from megarl.platform import cuda
from megarl.platform.cpu import CpuPlatform
from megarl.platform.cuda import CudaPlatform
from tests.world import REPOSITORY, World


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )


def _changed_attributes(machine: str) -> set[str]:
    ran = _python("-m", "tests.platform.untouched_by_cuda", machine)
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.split())


@pytest.mark.slow
def test_with_cuda_torch_is_left_untouched() -> None:
    assert _changed_attributes("cuda") == set()


def test_without_cuda_only_the_listed_redirects_change_torch() -> None:
    from megarl.platform.cpu_redirects import redirects

    changed = {name for name in _changed_attributes("cpu") if not name.startswith("sys.meta_path")}
    assert changed == {f"{redirect.owner.__name__}.{redirect.attribute}" for redirect in redirects()}


@pytest.mark.slow
def test_installing_after_megatron_is_refused_without_cuda() -> None:
    ran = _python("-c", "import megatron.core; from megarl import platform; platform.install()")
    assert ran.returncode == 1
    assert "call it before the first import of megatron" in ran.stderr


def _torch_under_redirects(rank: int, world_size: int) -> dict[str, object]:
    assert CpuPlatform().device(3) == torch.cuda.current_device() == torch.device("cpu")
    with torch.device("meta"):
        on_meta = [torch.empty(2).device.type, torch.tensor([1]).device.type, torch.empty(2, device="cpu").device.type]
    cuda_devices = ["cuda", "cuda:1", torch.device("cuda", 0), 0, torch.cuda.current_device()]
    factories = (torch.empty, torch.ones, torch.tensor, torch.zeros)
    child = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.ones(1).type())"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return {
        "default device context": on_meta,
        "factories": {factory(2, device=device).device for factory in factories for device in cuda_devices},
        "like": {torch.empty_like(torch.ones(2), device=device).device for device in cuda_devices},
        "pinned": torch.tensor([1.0], device="cuda", pin_memory=True).cuda(non_blocking=True).tolist(),
        "is_available": torch.cuda.is_available(),
        "type": [torch.ones(1).type(), torch.ones(1, dtype=torch.bfloat16).type(), torch.ones(1).type(torch.int64).type()],
        "type in a child process": child.stdout.strip(),
    }


def test_torch_under_the_redirects_answers_for_the_cpu(world: World) -> None:
    assert world.call(_torch_under_redirects, size=1)[0] == {
        "default device context": ["meta", "meta", "cpu"],
        "factories": {torch.device("cpu")},
        "like": {torch.device("cpu")},
        "pinned": [1.0],
        "is_available": False,
        "type": ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor", "torch.cuda.LongTensor"],
        "type in a child process": "torch.FloatTensor",
    }


def _draws_in_and_around_a_fork(rank: int, world_size: int) -> tuple[list[float], list[float], list[float], list[str]]:
    from megatron.core import parallel_state, tensor_parallel

    warnings = logging.handlers.BufferingHandler(capacity=100)
    logging.getLogger(tensor_parallel.random.__name__).addHandler(warnings)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(5)
    torch.manual_seed(11)
    outside = [torch.rand(1).item()]
    draws: list[float] = []
    for _ in range(2):
        with tensor_parallel.get_cuda_rng_tracker().fork():
            draws.append(torch.rand(1).item())
        outside.append(torch.rand(1).item())
    torch.manual_seed(11)
    return draws, outside, torch.rand(3).tolist(), [record.getMessage() for record in warnings.buffer]


def test_megatrons_rng_fork_is_a_stream_of_its_own(world: World) -> None:
    draws, outside, outside_without_forks, warnings = world.call(_draws_in_and_around_a_fork, size=1)[0]
    assert outside == outside_without_forks
    assert len({*draws, *outside}) == 5
    assert warnings == []
    seed_of_tensor_parallel_rank_0 = 5 + 2718  # model_parallel_cuda_manual_seed's documented offset
    expected = torch.rand(2, generator=torch.Generator().manual_seed(seed_of_tensor_parallel_rank_0))
    assert draws == pytest.approx(expected.tolist(), abs=0)


def _draws_after_restoring(rank: int, world_size: int) -> list[float]:
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(1).item()
    torch.cuda.set_rng_state(state)
    return [first, torch.rand(1).item()]


def test_the_cuda_generator_is_the_cpus(world: World) -> None:
    expected = torch.rand(1, generator=torch.Generator().manual_seed(3)).item()
    assert world.call(_draws_after_restoring, size=1)[0] == [expected, expected]


def _kinds_of_fused_functions(rank: int, world_size: int) -> list[str]:
    from megatron.core.fusions import fused_bias_dropout, fused_bias_swiglu

    functions = (fused_bias_dropout.bias_dropout_add_fused_train, fused_bias_swiglu.swiglu)
    return [f"{type(function).__name__} of {function.__code__.co_filename.split('/')[-1]}" for function in functions]


def test_no_worker_starts_a_compiler(world: World) -> None:
    expected = ["function of fused_bias_dropout.py", "function of fused_bias_swiglu.py"]
    assert world.call(_kinds_of_fused_functions, size=1)[0] == expected


STEPS = """
import sys
import torch
if sys.argv[1] == "installed":
    from megarl import platform
    platform.install()
    import megarl.workers.rank
    import megarl.megatron.build
torch.manual_seed(0)
numbers = []
for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
    weight = torch.nn.Parameter(torch.randn(5))
    optimizer = kind([weight], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (weight ** 3).sum().backward()
        optimizer.step()
    other = kind([weight], lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    other.step()
    numbers += weight.tolist()
print(numbers, torch.is_grad_enabled())
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_an_optimizer_steps_as_torchs_does_and_imports_no_compiler() -> None:
    installed, plain = (_python("-c", STEPS, which) for which in ("installed", "plain"))
    assert (installed.returncode, plain.returncode) == (0, 0), installed.stderr
    assert installed.stdout.splitlines()[0] == plain.stdout.splitlines()[0]
    assert (installed.stdout.splitlines()[1], plain.stdout.splitlines()[1]) == ("False", "True")


def _clipped(rank: int, world_size: int) -> tuple[bool, bool]:
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_scale

    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    expected, address = gradient.clone(), gradient.data_ptr()
    local_multi_tensor_scale(0, None, [[expected], [expected]], 0.3)
    clip_grads.multi_tensor_scale_impl(0, None, [[gradient], [gradient]], 0.3)
    return torch.equal(gradient, expected), gradient.data_ptr() == address


def test_gradients_are_clipped_in_place(world: World) -> None:
    assert world.call(_clipped, size=1)[0] == (True, True)


def _added_weight_gradients(rank: int, world_size: int) -> list[bool]:
    from megatron.core.tensor_parallel import layers

    found = []
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        inputs, of_outputs = (torch.randn(5, width, generator=generator).to(dtype) for width in (3, 4))
        total = torch.randn(4, 3, generator=generator)
        expected = total + (of_outputs.t() @ inputs)
        layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(inputs, of_outputs, total)
        found.append(torch.allclose(total, expected, rtol=0, atol=1e-6))
    return found


def test_weight_gradients_are_added_where_they_are_summed(world: World) -> None:
    assert world.call(_added_weight_gradients, size=1)[0] == [True, True]


def _gather_rows(rank: int, world_size: int, async_op: bool) -> list[list[list[float]]]:
    mine = torch.full((rank, 2), float(rank))
    outputs = [torch.full((other, 2), -1.0) for other in range(world_size)]
    handle = torch.distributed.all_gather(outputs, mine, async_op=async_op)
    if async_op:
        handle.wait()
    return [output.tolist() for output in outputs]


@pytest.mark.parametrize("async_op", [False, True])
def test_gloo_gathers_tensors_of_unequal_and_zero_length(world: World, async_op: bool) -> None:
    expected = [[[float(other)] * 2] * other for other in range(3)]
    assert world.call(_gather_rows, async_op, size=3) == [expected] * 3


@pytest.mark.slow
def test_a_worker_started_with_worker_env_keeps_freed_memory() -> None:
    program = (
        "import resource, torch\n"
        "def page_faults_of_20_blocks():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for _ in range(20):\n"
        "        block = torch.empty(64 * 2**20, dtype=torch.uint8).fill_(1)\n"
        "        del block\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "page_faults_of_20_blocks()  # glibc needs some rounds until a freed block is large enough for its aligned successor\n"
        "print(page_faults_of_20_blocks(), torch.get_num_threads())\n"
    )

    def page_faults_and_threads(environment: dict[str, str]) -> list[int]:
        ran = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return [int(word) for word in ran.stdout.split()]

    faults, threads = page_faults_and_threads(CpuPlatform().worker_env(threads=1))
    assert threads == 1
    assert faults < page_faults_and_threads({"MALLOC_MMAP_THRESHOLD_": "131072"})[0] / 20


def test_worker_env_names_threads_and_connections() -> None:
    for one in (CpuPlatform(), CudaPlatform()):
        environment = one.worker_env(threads=3)
        assert environment["OMP_NUM_THREADS"] == "3"
        assert environment["OMP_WAIT_POLICY"] == "passive"
        with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
            one.worker_env(threads=0)
    assert CudaPlatform().worker_env(1)["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_what_cuda_reads_from_the_environment_is_set_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cuda.ENVIRONMENT:
        monkeypatch.setenv(name, "")
        del os.environ[name]
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert CudaPlatform().worker_env(1).items() >= {"NVIDIA_TF32_OVERRIDE": "1", "NCCL_CUMEM_ENABLE": "0"}.items()
    monkeypatch.setattr(platform, "_installed", None)
    monkeypatch.setattr(platform, "cuda_present", lambda: True)
    assert platform.install().name == "cuda"  # as a rank under torchrun, which nobody gave an environment
    assert {name: os.environ[name] for name in cuda.ENVIRONMENT} == cuda.ENVIRONMENT | {"NVIDIA_TF32_OVERRIDE": "1"}


def test_memory_on_a_cpu_is_resident_memory() -> None:
    memory = CpuPlatform().memory()
    resident_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert memory["allocated_bytes"] == pytest.approx(resident_bytes, rel=0.02)
    assert memory["allocated_bytes"] <= memory["peak_bytes"] * 1.01 <= memory["total_bytes"]


def test_a_seed_fixes_every_generator() -> None:
    import random

    import numpy

    def draws() -> list[float]:
        CpuPlatform().seed(2**40 + 3)
        return [random.random(), float(numpy.random.rand()), torch.rand(1).item()]

    assert draws() == draws()


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True], ids=["imports", "needs a driver"])
def test_without_cuda_transformer_engine_and_its_adam_are_hidden(tmp_path: Path, *, broken: bool) -> None:
    """A package of its name stands for one that is installed on a machine without a GPU."""
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (tmp_path / "transformer_engine" / "__init__.py").write_text("__version__ = '2.20.2'\n")
    (package / "__init__.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')\n" if broken else "")
    (package / "optimizers.py").write_text("class FusedAdam: ...\nclass FusedSGD: ...\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from megarl import platform; platform.install()\n"
        "from megatron.core.optimizer import Adam; print(Adam.__module__)\n"
        "from megarl.megatron.options import has_transformer_engine; print(has_transformer_engine())\n"
    )
    ran = _python("-c", program)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["torch.optim.adamw", "False"]
