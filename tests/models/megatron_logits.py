"""Run as a program: build megatron-core's GPTModel from each Hugging Face folder named, on one rank, and print facts as JSON.

A process of its own, because the platform must be installed before megatron is imported. Facts by folder: parameter
names and shapes, the rotary frequencies, and logits for fixed ids.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from megarl import platform
from megarl.models.hf_folder import HFFolder
from megarl.models.registry import architecture_for

IDS = [[(7 * place + 3) % 61 for place in range(40)]]


def facts(path: Path) -> dict[str, Any]:
    """Build, load through the weight map, run once."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    folder = HFFolder(path)
    architecture = architecture_for(folder.config)
    kwargs = architecture.transformer_config_kwargs(folder.config)
    kwargs["activation_func"] = {"silu": torch.nn.functional.silu}[kwargs.pop("activation")]
    config = TransformerConfig(**kwargs, use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0)
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    model = GPTModel(config=config, transformer_layer_spec=spec, **architecture.gpt_kwargs(folder.config)).eval()
    weight_map = architecture.weight_map(folder.config)
    ids = torch.tensor(IDS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weight_map.rule_for(name).shard_from_hf(folder.get_slice, 0, 1))
        mask = torch.ones(1, 1, 40, 40, dtype=torch.bool).triu(1)
        logits = model(ids, torch.arange(40)[None], mask)
    return {
        "shapes": {name: list(parameter.shape) for name, parameter in model.named_parameters()},
        "rotary_frequencies": (
            model.rotary_pos_emb.inv_freq / (model.rotary_pos_emb.seq_len_interpolation_factor or 1)
        ).tolist(),
        "logits": logits[0].tolist(),
    }


def main() -> None:
    """Facts of every folder in argv."""
    platform.install()
    from megatron.core import parallel_state, tensor_parallel

    with tempfile.TemporaryDirectory() as rendezvous:
        torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        found = json.dumps({path: facts(Path(path)) for path in sys.argv[1:]})
        sys.stdout.write(f"FACTS {found}\n")
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
