"""A tiny GPT made of megatron-core's own parts (local layer spec, DDP, distributed optimizer, its schedules), trained a few
steps in a world of tests/world.py. Weights and data depend on names and seeds alone, never on the layout."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import Any

import torch

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, SEQUENCE = 64, 32, 4, 4, 2, 48, 12
GLOBAL_BATCH, MICRO_BATCH = 8, 2
EXPERTS = 4


def train(rank: int, world_size: int, layout: dict[str, int], moe: bool, steps: int) -> dict[str, list[float]]:
    """Train under `layout` (tp, pp, ep, etp, optimizer_instances); return each step's mean token loss and gradient norm.

    The loss is the sum over all response tokens of the global batch over their number, so it does not depend on how the
    batch is cut; the numbers are the same on every rank.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    instances = layout.get("optimizer_instances", 1)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.get("tp", 1),
        pipeline_model_parallel_size=layout.get("pp", 1),
        expert_model_parallel_size=layout.get("ep", 1),
        expert_tensor_parallel_size=layout.get("etp", 1),
        num_distributed_optimizer_instances=instances,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    config = _config(layout, moe)
    model = _build(config, moe)
    fill_by_name(model)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, num_distributed_optimizer_instances=instances
    )
    chunk = DistributedDataParallel(config, ddp_config, model)
    optimizer_config = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=0.5, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(optimizer_config, [chunk])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = chunk.no_sync
    losses, gradient_norms = [], []
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    for _ in range(steps):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=micro_batches(replica, replicas),
            model=[chunk],
            num_microbatches=GLOBAL_BATCH // MICRO_BATCH // replicas,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        succeeded, gradient_norm, _ = optimizer.step()
        assert succeeded
        losses.append(_global_mean_loss(reports))
        gradient_norms.append(float(gradient_norm))
    return {"losses": losses, "gradient_norms": gradient_norms}


def micro_batches(replica: int, replicas: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this replica's micro-batches of the one global batch; its sequences carry loss on 3 to 10 tokens each."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCAB, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
    lengths = torch.randint(3, SEQUENCE - 1, (GLOBAL_BATCH, 1), generator=generator)
    mask = (torch.arange(SEQUENCE) < lengths).float()
    for rows in torch.arange(GLOBAL_BATCH).split(MICRO_BATCH)[replica::replicas]:
        yield {"tokens": tokens[rows, :-1], "labels": tokens[rows, 1:], "mask": mask[rows]}


def _forward_step(data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(data_iterator)
    position_ids = torch.arange(SEQUENCE).expand(MICRO_BATCH, -1)
    token_losses = model(batch["tokens"], position_ids, None, labels=batch["labels"])

    def loss_function(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        loss = (output.float() * batch["mask"]).sum()
        tokens = batch["mask"].sum().to(torch.int)
        return loss, tokens, {"loss_sum": loss.detach(), "tokens": tokens}

    return token_losses, loss_function


def _global_mean_loss(reports: list[dict[str, torch.Tensor]]) -> float:
    from megatron.core import parallel_state

    sums = torch.zeros(2, dtype=torch.float64)
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        for report in reports:  # empty except on the last pipeline stage
            sums += torch.stack([report["loss_sum"].double(), report["tokens"].double()])
    torch.distributed.all_reduce(sums)
    return float(sums[0] / sums[1])


def _config(layout: dict[str, int], moe: bool) -> Any:
    from megatron.core.transformer import TransformerConfig

    of_moe = {
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_ffn_hidden_size": FFN,
        "moe_shared_expert_intermediate_size": FFN,
        "moe_shared_expert_overlap": True,
    }
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        ffn_hidden_size=FFN,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,
        tensor_model_parallel_size=layout.get("tp", 1),
        pipeline_model_parallel_size=layout.get("pp", 1),
        expert_model_parallel_size=layout.get("ep", 1),
        expert_tensor_parallel_size=layout.get("etp", 1),
        pipeline_dtype=torch.float32,
        **(of_moe if moe else {}),
    )


def _build(config: Any, moe: bool) -> torch.nn.Module:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=EXPERTS if moe else None, normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )


def fill_by_name(model: torch.nn.Module) -> None:
    """Fill every parameter with this rank's slice of a full tensor that is a function of the parameter's global name."""
    from megatron.core import parallel_state

    first_expert = parallel_state.get_expert_model_parallel_rank() * (
        EXPERTS // parallel_state.get_expert_model_parallel_world_size()
    )
    for name, parameter in model.named_parameters():
        global_name = re.sub(r"decoder\.layers\.(\d+)", lambda m: f"layer{model.decoder.layers[int(m[1])].layer_number}", name)
        global_name = re.sub(r"local_experts\.(\d+)", lambda m: f"expert{int(m[1]) + first_expert}", global_name)
        global_name = global_name.replace("output_layer.weight", "embedding.word_embeddings.weight")
        if ".experts." in name:
            index = parallel_state.get_expert_tensor_parallel_rank()
            parts = parallel_state.get_expert_tensor_parallel_world_size()
        else:
            index = parallel_state.get_tensor_model_parallel_rank()
            parts = parallel_state.get_tensor_model_parallel_world_size()
        if not getattr(parameter, "tensor_model_parallel", False):
            index, parts = 0, 1
        shape = list(parameter.shape)
        axis = parameter.partition_dim if parts > 1 else 0
        shape[axis] *= parts
        generator = torch.Generator().manual_seed(zlib.crc32(global_name.encode()))
        full = torch.randn(shape, generator=generator) * 0.1 + (1.0 if "norm" in name else 0.0)
        # a gated first layer is [gate; up]: each rank holds its share of either half
        halves = full.chunk(2, dim=axis) if "linear_fc1" in name else (full,)
        parameter.data.copy_(torch.cat([half.chunk(parts, dim=axis)[index] for half in halves], dim=axis))
