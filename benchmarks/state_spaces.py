"""Seconds of a Mamba-2 layer, forward and backward, beside transformers' layer with the same weights on plain torch.

    python benchmarks/state_spaces.py --out benchmarks/results/state_spaces.json

Float32 on a CPU, the sizes of a published model. The same tokens as one sequence, and as several of equal length, which megarl
has packed in one stream and transformers as rows of a batch, since its plain path cannot pack. The layers take turns; figures
are the least and the median of the rounds, by the clock and, on a machine that others use, of the processors. Outputs and
gradients of the projection are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.measured_code import code_of  # noqa: E402
from benchmarks.workload import machine  # noqa: E402
from megarl import platform as megarl_platform  # noqa: E402

MODELS: dict[str, dict[str, Any]] = {
    "granite-4.0-h-tiny": {
        "class": "granitemoehybrid",
        "hidden_size": 1536,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "num_hidden_layers": 1,
        "layer_types": ["linear_attention"],
    },
    "nemotron-3-nano": {
        "class": "nemotron_h",
        "hidden_size": 2688,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "layers_block_type": ["linear_attention"],
    },
}


class Linear(torch.nn.Linear):
    """A projection as megatron-core's, on one rank."""

    def __init__(self, inputs: int, outputs: int, **unused: Any) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, hidden: Tensor) -> Any:  # type: ignore[override]
        """`[..., in]` to `[..., out]`, and no bias."""
        return super().forward(hidden), None


def layers_of(settings: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(transformers' layer, megarl's with its weights, megarl's sizes) of a model."""
    from transformers import GraniteMoeHybridConfig, NemotronHConfig
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    from megarl.models.registry import architecture_for
    from megarl.options.state_spaces.layer import Mamba2, MambaSubmodules

    fields = {name: value for name, value in settings.items() if name != "class"}
    granite = settings["class"] == "granitemoehybrid"
    config: Any = (GraniteMoeHybridConfig if granite else NemotronHConfig)(**fields)
    theirs: Any = (GraniteMoeHybridMambaLayer if granite else NemotronHMamba2Mixer)(config, 0).float()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name in ("dt_bias", "D"):
            getattr(theirs, name).copy_(torch.randn(theirs.num_heads, generator=generator))
        theirs.A_log.copy_(torch.rand(theirs.num_heads, generator=generator) * 2 - 2)
    hf_config = config.to_dict() | {"architectures": [f"{'GraniteMoeHybrid' if granite else 'NemotronH'}ForCausalLM"]}
    sizes = architecture_for(hf_config).linear(hf_config)
    epsilon = config.rms_norm_eps if granite else config.layer_norm_epsilon
    mcore = SimpleNamespace(
        hidden_size=config.hidden_size,
        params_dtype=torch.float32,
        layernorm_epsilon=epsilon,
        init_method=None,
        output_layer_init_method=None,
    )
    single = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    alone = SimpleNamespace(tp=single, cp=single)
    ours = Mamba2(mcore, MambaSubmodules(Linear, Linear), 1, alone, sizes=sizes)  # type: ignore[arg-type]
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours, sizes


def measure(settings: dict[str, Any], tokens: int, sequences: int, rounds: int) -> dict[str, Any]:
    """Seconds of both layers over `tokens` in so many sequences, and how far apart they are."""
    from megarl.data.stream import Response, Unit, pack
    from megarl.options.state_spaces.scan_order import scan_order

    theirs, ours, sizes = layers_of(settings)
    length = tokens // sequences
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(sequences, length, settings["hidden_size"], generator=generator)
    weights = torch.randn(hidden.shape, generator=generator)
    one, rest = torch.zeros(1, dtype=torch.long), torch.zeros(length, dtype=torch.long)
    mask = torch.ones(length, dtype=torch.bool)
    stream = pack([Unit(one, [Response(n, rest, mask)]) for n in range(sequences)])
    assert len(stream.token_ids) == tokens, "a sequence has its prompt's token and all of its response's but the last"
    packed = SimpleNamespace(order=scan_order(stream, sizes.width))

    def by_transformers() -> Tensor:
        found: Tensor = theirs(hidden)
        return found

    def by_megarl() -> Tensor:
        return ours(hidden.flatten(0, 1)[:, None], packed_seq_params=packed)[0][:, 0].unflatten(0, hidden.shape[:2])

    seconds: dict[str, list[dict[str, float]]] = {"transformers": [], "megarl": []}
    outputs: dict[str, tuple[Tensor, Tensor]] = {}
    for _ in range(rounds + 1):  # the first one warms up
        for name, layer, run in (("transformers", theirs, by_transformers), ("megarl", ours, by_megarl)):
            layer.zero_grad()
            began, began_cpu = time.perf_counter(), time.process_time()
            found = run()
            forward = time.perf_counter() - began
            (found * weights).sum().backward()
            both, cpu = time.perf_counter() - began, time.process_time() - began_cpu
            seconds[name].append({"forward": forward, "both": both, "both, processors'": cpu})
            outputs[name] = found.detach(), layer.in_proj.weight.grad.clone()
    far = [float((ours - theirs).abs().max() / theirs.abs().max()) for theirs, ours in zip(*outputs.values(), strict=True)]
    figures: dict[str, Any] = {"tokens": tokens, "sequences": sequences, "output apart": far[0], "gradient apart": far[1]}
    for name, each in seconds.items():
        for what in each[0]:
            values = [round_[what] for round_ in each[1:]]
            figures[f"{name} {what} s"] = {"least": min(values), "median": statistics.median(values)}
    return figures


def ready(threads: int) -> None:
    """megatron-core on a CPU, in a process that has not imported it yet."""
    megarl_platform.install()
    torch.set_num_threads(threads)


def main() -> None:
    """Measure every model in both forms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    measured: dict[str, Any] = {"code": code_of("state_spaces"), "machine": machine(), "threads": chosen.threads, "models": {}}
    measured["cores"] = os.cpu_count()
    with ProcessPoolExecutor(1, get_context("spawn"), ready, (chosen.threads,)) as process:
        for name in chosen.models:
            measured["models"][name] = []
            for sequences in chosen.sequences:
                found = process.submit(measure, MODELS[name], chosen.tokens, sequences, chosen.rounds).result()
                measured["models"][name].append(found)
                print(name, json.dumps(found), flush=True)
                if chosen.out is not None:
                    chosen.out.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
