"""From a Hugging Face folder and a layout to the model chunks of this rank, wrapped for data parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config.layout import Layout
from megarl.megatron import layer_specs
from megarl.megatron.attention import core_attention_called
from megarl.megatron.chosen_parameters import freeze
from megarl.megatron.gate_limits import clamp_gates
from megarl.megatron.heads import LogProbHead
from megarl.megatron.model_config import DTYPES, ddp_config, fuses_gradient_accumulation, refused, transformer_config
from megarl.megatron.norms import norm_behind_rotary
from megarl.megatron.options import ModelOptions
from megarl.megatron.rotary import set_rotary_embedding
from megarl.megatron.value_head import ValueHead
from megarl.megatron.weights import role_map
from megarl.models.adapters import adapter_part
from megarl.models.hf_folder import HFFolder
from megarl.models.packings import padded_vocab
from megarl.models.registry import architecture_for
from megarl.models.vision import vision_part
from megarl.option_list import functions, part
from megarl.platform import cuda_present

LINEAR = (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear)


def initialize_layout(layout: Layout, seed: int) -> None:
    """Make megatron-core's process groups for `layout`; torch.distributed must be up with `layout.world_size` ranks."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def build_model(options: ModelOptions, folder: HFFolder, switch: Any = None) -> list[torch.nn.Module]:
    """This rank's model chunks (one per virtual stage), uninitialised, wrapped in DDP if trainable.

    `switch` is the option's that turns off adapters, if the role has any.

    Raises:
        ConfigError: a field of `options.megatron` does not go with the model, which some layers only say as they are made.
    """
    hf_config = folder.config
    architecture = architecture_for(hf_config)
    config = transformer_config(options, hf_config)
    if options.core_attention != "spec":
        device = torch.device(torch.cuda.current_device())
        core_attention_called(options.core_attention).check(device, config.params_dtype)
    try:
        chunks = [_build_chunk(options, folder, config, stage) for stage in _stages(options)]
    except (ValueError, AssertionError) as error:
        if not options.megatron:
            raise
        raise refused(options, options.megatron, error) from error
    vision = architecture.vision(hf_config)
    mrope = vision.mrope if vision is not None else None
    for chunk in chunks:
        set_rotary_embedding(
            chunk,
            architecture.text_config(hf_config),
            mrope,
            architecture.layer_rope(hf_config),
            counts_itself=options.layer_spec == "transformer_engine" and options.core_attention == "spec",
        )
        if config.multi_latent_attention:
            layer_specs.set_latent_norm_epsilon(chunk)
            layer_specs.stop_rotation(chunk)
        norm_behind_rotary(chunk)
        traits = architecture.traits(hf_config)
        clamp_gates(chunk, traits.gate_limits)
        if traits.own_layers is not None:
            part(traits.own_layers.option, "decoder_layers", "this model").finish(chunk, traits.own_layers)
        chunk.to(device=torch.cuda.current_device())
        if config.num_moe_experts is not None and config.add_bias_linear:
            layer_specs.prepare_biased_experts(chunk)
        for module in chunk.modules():
            if isinstance(getattr(module, "softmax_offset", None), torch.nn.Parameter):
                module.softmax_offset.data = module.softmax_offset.data.to(config.params_dtype)  # Transformer Engine: float32
        if fuses_gradient_accumulation(options):
            fuse_gradient_accumulation(chunk)
        if options.int4_experts:
            part("few_bits", "rounded_experts", "model.int4_experts").round_experts(chunk, options.int4_experts)
    if not options.trainable:
        for chunk in chunks:
            chunk.requires_grad_(False)
        return chunks
    weight_map = role_map(options, folder)
    for chunk in chunks:
        freeze(chunk, options, weight_map)
        if options.lora is not None:
            rows = architecture.rows_together(hf_config)
            layers, head = adapter_part("layers"), options.head == "value"
            layers.insert_adapters(chunk, options.lora, rows, weight_map, switch, value_head=head)
    wrapped = [
        DistributedDataParallel(
            config,
            ddp_config(options),
            chunk,
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = _finalize_without_rescaling
    if ddp_config(options).overlap_grad_reduce:
        # Without it every micro-batch would start the reduction, not only the last.
        functions = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = functions if len(functions) > 1 else functions[0]
    return wrapped


def fuse_gradient_accumulation(chunk: torch.nn.Module) -> None:
    """Have every layer of Transformer Engine's, and on a CPU of megatron-core's, add its weight gradients to megatron-core's
    buffers itself.

    It is set on the layers and not in the config: there it also asks for apex, for the output layer that `LogProbHead`
    replaces.
    """
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]
        elif isinstance(module, LINEAR) and not cuda_present():
            module.gradient_accumulation_fusion = True


def _finalize_without_rescaling(model: list[torch.nn.Module], num_tokens: Any = None, **kwargs: Any) -> None:
    finalize_model_grads(model, None, **kwargs)


def _stages(options: ModelOptions) -> list[int | None]:
    return list(range(options.layout.vpp)) if options.layout.vpp else [None]


def _build_chunk(options: ModelOptions, folder: HFFolder, config: TransformerConfig, vp_stage: int | None) -> GPTModel:
    layout, architecture = options.layout, architecture_for(folder.config)
    pre_process = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    post_process = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    kwargs = dict(architecture.gpt_kwargs(folder.config))
    vocab_size = kwargs.pop("vocab_size")
    if options.head == "value":
        kwargs["share_embeddings_and_output_weights"] = False
    stages = layout.stage_layers(config.num_layers)
    layers = stages[parallel_state.get_pipeline_model_parallel_rank()][vp_stage or 0]
    vision = architecture.vision(folder.config)
    deepstack, traits = len(vision.deepstack) if vision else 0, architecture.traits(folder.config)
    rope = architecture.layer_rope(folder.config)
    kwargs |= {
        "config": config,
        "transformer_layer_spec": layer_specs.block_spec(
            options.layer_spec,
            config,
            layers,
            deepstack,
            traits,
            rope,
            architecture.linear(folder.config),
            core_attention=options.core_attention,
        ),
        "vocab_size": padded_vocab(vocab_size, layout.tp),
        "pre_process": pre_process,
        "post_process": post_process,
        "vp_stage": vp_stage,
    }
    if vision is None:
        model = GPTModel(**kwargs)
    else:
        model = vision_part("model_part").seeing_model(options, folder, vision, **kwargs)
    model.model_type = ModelType.encoder_or_decoder
    if pre_process and traits.embedding_multiplier != 1.0:
        multiplier = traits.embedding_multiplier
        if traits.rounded_multiplier:
            multiplier = torch.tensor(multiplier, dtype=DTYPES[options.dtype], device="cpu").item()
        model.embedding.register_forward_hook(lambda module, inputs, embedded: embedded * multiplier)
    if post_process:
        if options.head == "value":
            model.output_layer = ValueHead(config, model.output_layer.tp_group)
        else:
            model.output_layer = LogProbHead(
                model.output_layer,
                vocab_size=vocab_size,
                temperature=options.temperature * traits.logits_divisor,
                chunk_tokens=options.logit_chunk_tokens,
                limits=options.sampling_limits,
                collision=options.collision,
                overlaps=options.trainable and ddp_config(options).overlap_grad_reduce,
                cap=traits.logits_cap,
            )
        for add_modules in functions("model_part", "add_modules"):
            add_modules(model, config, options, vp_stage)
    return model
