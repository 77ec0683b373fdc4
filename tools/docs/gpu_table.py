"""The page on megarl's GPU paths: what was read in the sources of the libraries, where, and what decided it.

Lines are found by the name of a function or class; a name that is gone is an error. So is a test or a part of
`benchmarks/gpu_parts.txt` that a row names and that is not there.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("megatron", "weights", "platform", "options", "workers", "rollout/engines/sglang")
"""Rooms whose files may work on a GPU."""
ELSEWHERE = (
    "rollout/engines/sglang/on_cpu/",
    "platform/cpu_redirects.py",
    "platform/base.py",
    "platform/__init__.py",
    "options/lora/served.py",
)
"""Files that stand for a GPU where there is none."""
GPU_WORDS = re.compile(
    r"torch\.cuda\.(?!current_device|is_available)|\.is_cuda\b|_share_cuda_|_new_shared_cuda|pin_memory|non_blocking|import triton|"
    r"is_float8tensor|_abort_process_group|memory_occupation|batch_isend_irecv|use_deterministic_algorithms|cu_seqlens"
)
PARTS = ROOT / "benchmarks/gpu_parts.txt"
VERDICTS = ("right", "doubtful", "slow", "refused")
ON_H100 = "docs/evidence/gpu.md"
"""Rows that a run on an H100 has decided name its page."""


class GpuPath(NamedTuple):
    """A row: `where` are `file::name` below megarl/, `decided` tests (`file::test` below tests/), parts of gpu_parts.txt (names
    alone), or `ON_H100`."""

    what: str
    where: tuple[str, ...]
    verdict: str
    why: str
    decided: tuple[str, ...]


def _row(what: str, where: str, verdict: str, why: str, decided: str) -> GpuPath:
    return GpuPath(what, tuple(where.split()), verdict, why, tuple(decided.split()))


TE, CPU_TE = "themes/gpu/test_transformer_engine.py", "megatron/test_transformer_engine_on_cpu.py"
SGLANG, WAITS = "themes/gpu/test_sglang.py", "megatron/test_step_waits.py"

# fmt: off
GROUPS: dict[str, list[GpuPath]] = {
    "Layers and passes": [
        _row("Transformer Engine's layers, packed", "megatron/layer_specs.py::_transformer_engine megatron/step.py::packed_lengths",
             "right", "names and arguments are those of megatron-core 0.19.2; the four cumulative lengths are one object, so Transformer Engine sees no padding between sequences",
             f"{TE}::test_packed_responses_score_as_they_do_alone {ON_H100}"),
        _row("fused norms, rotary embedding, SwiGLU, permutation, router", "megatron/model_config.py::_defaults", "right",
             "megatron-core compiles some of them in the first step, and again for the first other lengths: seconds, not a hang",
             f"{TE}::test_fused_options_compute_what_the_unfused_ones_do {ON_H100}"),
        _row("weight gradients added to float32 buffers by the layers", "megatron/build.py::fuse_gradient_accumulation", "right",
             "Transformer Engine does it itself; the head and the embedding add by megatron-core's hook", "megatron/test_megatron_options.py::test_gradient_accumulation_is_fused_on_layers_that_know_it"),
        _row("what this brings in seconds", "megatron/model_config.py::_defaults", "doubtful", "estimates only: no speed has been measured", "short short_rotary short_accumulation short_plain bf16"),
        _row("layers of Transformer Engine under megatron-core 0.16 (Python 3.11)", "megatron/build.py::build_model", "doubtful", "megatron-core 0.16.1 asks for Transformer Engine before 2.12; names that are gone are each in a `try`. A run warns and goes on; Python 3.12 has the pair that is tested",
             "megatron/test_fp8_config.py::test_only_transformer_engine_with_an_older_megatron_core_is_warned_of"),
        _row("reference layers on CUDA", "megatron/attention.py::ReferenceAttention", "right", "plain torch; routers' products are float32 because TF32 is off",
             f"themes/gpu/test_cuda_platform.py::test_the_reference_layers_compute_the_same_as_on_a_cpu {ON_H100}"),
        _row("attention with shared prefixes", "options/shared_prefixes/core_attention.py::FlashKernels options/shared_prefixes/core_attention.py::MergedPasses",
             "doubtful", "arguments are those of FlashAttention 2 and 4; the kernels are held against a plain softmax before they are used, so a wrong one is refused, not trained with. Speed unknown",
             "options/shared_prefixes/test_segment_kernels.py::test_kernels_of_a_device_are_held_against_a_plain_softmax_before_they_are_used shared_prefixes"),
        _row("log-prob head by Triton", "megatron/logit_kernels.py::row_sums_kernel megatron/logit_kernels.py::gradient_kernel", "right",
             "equal to float64 in Triton's interpreter at odd shapes, and compiled for GPUs there", "megatron/test_logit_passes.py::test_the_kernels_are_right_in_tritons_interpreter megatron/test_logit_passes.py::test_kernel_code_is_made_for_gpus logits"),
        _row("head over chunks of 768 MiB of logits", "megatron/heads.py::_chunk_backward", "slow", "each chunk reads and writes the float32 gradient of the weight; 64 MiB, as before, cost 10 % of a step by estimate", "logits short_plain"),
        _row("top-p, top-k and min-p in the head, deterministic runs included", "megatron/kept_tokens.py::_least_of_rows megatron/running_sums.py::running_sum", "right",
             "mended: torch's `cumsum` of floats raises on CUDA under `run.deterministic`", "megatron/test_running_sums.py::test_top_p_keeps_the_same_tokens deterministic"),
        _row("log-probs, metrics and guards of a pass on the host", "megatron/step.py::on_host megatron/update_guard.py::refusal", "right", "one transfer at the end of a pass, none for a micro-batch",
             f"{WAITS}::test_nothing_of_megarl_waits_in_a_pass"),
        _row("micro-batches laid and copied in a thread", "megatron/prefetch.py::_Arrival megatron/prefetch.py::_PinnedCopies", "right", "a stream of its own; the pass's stream waits for its event, and memory is recorded on it",
             "megatron/test_prefetch.py::test_copies_to_a_device_leave_from_pinned_memory_and_are_kept_until_they_are_used"),
        _row("rotary embedding of models that see, of neighbouring pairs, or with an attention factor", "megatron/model_config.py::_without_rotary_kernels", "slow",
             "megatron-core's own rotation asks for lengths on the host: (2 + sequences) x 2 waits a layer; the kernels would compute other angles", "megatron/test_megatron_options.py::test_kernels_that_count_one_position_are_never_used_by_models_that_see tower"),
        _row("counts of experts' tokens, losses that balance them", "megatron/router_watch.py::RouterWatch", "right", "sums stay on the device; one transfer a pass", f"{WAITS}::test_counting_what_routers_decide_adds_no_wait"),
        _row("dispatch of experts by all-to-all", "megatron/model_config.py::_defaults", "slow", "megatron-core waits once a layer for the counts; `flex` with DeepEP across nodes is a field of `policy.megatron`", "replay"),
        _row("pipeline stages", "megatron/model_config.py::transformer_config", "slow", "stages send shapes first, with a wait for each, unless `static_shapes` pads micro-batches to one length; the wait behind each message is off",
             "megatron/test_prefetch.py::test_micro_batches_padded_to_one_length_give_the_same_gradients"),
        _row("overlapped gathering of weights, overlapped tensor parallelism, CUDA graphs, low-precision moments", "megatron/model_config.py::transformer_config", "refused", "fields that megarl does not hand on; see docs/limits.md",
             "megatron/test_options_on_real_layers.py::test_every_switch_is_accepted_or_refused_in_one_sentence"),
        _row("recomputation", "megatron/model_config.py::recompute_modules", "right", "of Transformer Engine's layers everything but attention, which keeps little", "megatron/test_options_on_real_layers.py::test_what_a_gpu_gets_by_default_is_accepted"),
        _row("waits in a layer", "megatron/layer_specs.py::_layer", "right", "operators of each kind of layer are counted, with a bound", "megatron/test_launches_of_transformer_engine.py::test_no_kind_of_layer_asks_for_more_than_the_table_has"),
    ],
    "FP8": [
        _row("recipes", "megatron/model_config.py::_fp8_kwargs", "right", "`delayed`, `tensorwise` and `blockwise` ran; `mxfp8` needs Blackwell and is refused elsewhere", f"{TE}::test_fp8_log_probs_are_near_those_of_bf16 megatron/test_fp8_config.py::test_a_rank_on_the_wrong_gpu_says_what_the_recipe_needs {ON_H100}"),
        _row("speed of the recipes", "megatron/model_config.py::_fp8_kwargs", "doubtful", "no speed has been measured", "fp8_tensorwise fp8_blockwise"),
        _row("weights in FP8, loaded and saved", "megatron/weights.py::_keep_full_precision megatron/shards.py::plain", "right", "`copy_` quantises; what is saved or sent is dequantised first", f"{TE}::test_weights_in_fp8_start_from_and_are_saved_with_a_full_copy options/few_bits/test_fp8_export.py::test_weights_held_in_fp8_are_sent_and_exported_as_the_values_that_they_stand_for"),
        _row("FP8 copies that Transformer Engine keeps", "megatron/offload.py::_forget_fp8_copies", "right", "mended earlier: they leave with the rest", "megatron/test_offload.py::test_weights_in_fp8_leave_with_both_of_their_copies_and_cached_ones_are_forgotten"),
        _row("FP8 weights moved off a GPU and back", "megatron/offload.py::_values_of", "doubtful", "an FP8 tensor's storages are resized in place, which Transformer Engine's sources allow and no GPU has done", "offload"),
    ],
    "Adapters, replay, towers, linear recurrences, Muon": [
        _row("adapters beside Transformer Engine's linear layers", "options/lora/layers.py::put_beside options/lora/layers.py::_normed", "right",
             "hooks get the layer's input, which is normed again; 1 is added to zero-centred norm weights in float32, as there (mended)", "options/lora/test_layers.py adapters"),
        _row("adapters of grouped experts", "options/lora/layers.py::ExpertAdapters", "slow", "one product after another for each expert, and the counts on the host", "adapters"),
        _row("adapters beside shared experts that overlap", "options/lora/checks.py::_check_role", "refused", "mended: with sequence parallelism megatron-core gathers the tokens before the layer, and the adapter would again", "options/lora/test_lora_section.py::test_what_adapters_do_not_go_with_is_refused"),
        _row("routes replayed and recorded", "options/routing_replay/model_part.py::RouterLayer options/routing_replay/model_part.py::_joined", "right", "mended: recorded as int16 (a quarter of the memory); ranks exchange bytes, since NCCL has no int16", "themes/parallel/test_routing_replay.py replay"),
        _row("pictures decoded in the forward pass", "options/pictures/tower.py::SeeingModel", "slow", "0.2 s of a CPU for a picture of 1344 x 1344 pixels, on the thread that computes", "tower"),
        _row("attention of towers", "options/pictures/tower.py::look options/pictures/tower_time.py::TowerTime", "slow", "transformers asks for lengths on the host in each layer, and calls attention for each window", "tower"),
        _row("GLM-4V's tower in deterministic runs", "options/pictures/model_part.py::check_deterministic", "refused", "mended: `grid_sample` has no deterministic gradient on CUDA; frozen towers go", "options/pictures/test_deterministic_towers.py::test_interpolated_positions_are_not_trained_deterministically_on_a_gpu"),
        _row("gated delta rule and Mamba-2's scan on plain torch, deterministic runs included", "options/linear_attention/delta_rule.py::gated_delta_rule options/state_spaces/scan.py::chunked_scan", "right",
             "mended: their float64 `cumsum` raised on CUDA under `run.deterministic`", "megatron/test_running_sums.py::test_the_delta_rule_has_the_same_values_and_gradients megatron/test_running_sums.py::test_the_scan_of_state_spaces_has_the_same_values deterministic"),
        _row("flash-linear-attention's kernels", "options/linear_attention/layer.py::fla_rule", "doubtful", "arguments are those of its source; the boundaries are one object for all layers (mended: its cache knows them by identity, and each layer waited). It is not installed where parts run",
             "options/linear_attention/test_delta_rule.py::test_every_response_reads_what_it_would_behind_its_prompt_alone"),
        _row("Muon", "megatron/muon.py::_Muon megatron/muon.py::orthogonalised", "slow", "one matrix after another over the data-parallel ranks, in float32 without TF32: 13 s a step for 8B by estimate", "megatron/test_muon.py::test_muon_is_dense_newton_schulz_in_every_layout muon"),
        _row("multi-token prediction", "options/prediction/layer.py::PredictionModule", "doubtful", "offsets and gradients agree with the source; it has not run under Transformer Engine on a GPU", "themes/parallel/test_prediction.py layers"),
        _row("experts rounded to INT4", "options/few_bits/rounded_experts.py::round_experts", "slow", "rounded in every forward pass, not once a step", "themes/parallel/test_int4_experts.py few_bits"),
    ],
    "Weights to engines": [
        _row("a buffer over CUDA IPC", "weights/cuda_ipc.py::shared weights/cuda_ipc.py::opened weights/staging.py::Staging", "doubtful",
             "torch's own calls, an event that the opening stream waits for, a buffer filled again only after the answer. Not run; each process has a context of 0.3 to 0.5 GB on every GPU whose memory it opens, of which plans count one",
             "weights/test_cuda_ipc.py::test_torch_shares_and_opens_storages_by_the_calls_that_are_used_here weights/test_pusher.py::test_at_most_two_buckets_are_staged_and_none_is_overwritten_before_the_engine_has_read_it ipc engine"),
        _row("checksums on CUDA", "weights/cuda_ipc.py::checksums weights/checksums.py::digests weights/copying.py::copy", "right", "plain integer operations; one wait for all tensors of a call", "weights/test_cuda_ipc.py::test_checksums_of_many_tensors_are_those_of_each_and_take_a_copy_each_and_one_wait ipc"),
        _row("the loader in SGLang's ranks", "weights/sglang_loader.py::load weights/sglang_places.py::region", "right", "`load_weights` of SGLang 0.5.23 is reached by `--custom-weight-loader`; streams are waited for before an answer", f"weights/test_sglang_loader.py {SGLANG}::test_weights_arrive_bit_for_bit_and_a_sleeping_engine_gives_its_memory_back engine"),
        _row("engines in FP8 blocks or MXFP8", "weights/sglang_places.py::ModelParameters", "right", "mended: SGLang has parameters for scales of the KV cache (`k_scale`, `v_scale`), which no update fills, so the first update was refused for most families",
             "rollout/test_repairs.py::test_a_woken_server_has_what_no_update_sends fp8_engine"),
        _row("weights in few bits that are sent", "megatron/weights.py::local_shards options/few_bits/quantise.py::FormatQuantiser", "right",
             "mended: all of a rank's were quantised before the first was sent (8.8 GB for 70B on tp 8, in no plan). Ranks agree on the scales first, then each makes one parameter at a time",
             "options/few_bits/test_fp8_export.py::test_what_is_sent_by_and_by_is_quantised_one_parameter_at_a_time few_bits"),
        _row("shapes of INT4 experts", "options/few_bits/quantise.py::FormatQuantiser", "right", "mended: they were made in main memory, which NCCL and checksums on CUDA refuse", "options/transports/test_relayed_formats.py::test_a_quantised_shard_is_on_the_device_of_its_weight"),
        _row("relays to engines in few bits", "options/transports/relay.py::sent_dtypes options/transports/relay.py::Relay", "right", "mended: the receiver guessed a type by its size, so INT4 and MXFP8 arrived as other types, or failed", "options/transports/test_relayed_formats.py::test_a_relay_expects_the_types_that_the_sender_makes"),
        _row("keys and values in FP8", "options/fp8_cache/sglang_process.py::set_scales", "doubtful",
             "scales are set as a checkpoint with scales would have them (a tensor to divide by, its number to multiply by), which SGLang's file of scales does not do; the kernels are FlashInfer's, as FlashAttention 3 rounds queries to FP8 too, without a scale. No kernel has run it",
             "options/fp8_cache/test_fp8_cache_on_sglang.py::test_a_server_has_the_log_probs_of_rounding options/fp8_cache/test_fp8_cache_checks.py::test_attention_has_its_scales_again_when_memory_comes_back kv_cache"),
        _row("engines whose kernels repack FP8 or INT4", "options/few_bits/sglang.py::check_weight_layout", "refused", "SGLang's post-processing changes shapes on a B200, and on an A100 for FP8", "options/few_bits/test_weight_layout.py::test_a_layout_that_changes_is_refused"),
        _row("process groups between ranks and engines", "weights/group_sender.py::GroupSender weights/group_ranks.py::receive weights/engine_group.py::OnTheWay platform/cuda.py::CudaPlatform", "doubtful",
             "one group for an engine; both sides have NCCL_CUMEM_ENABLE and NCCL_NVLS_ENABLE at 0; no order of sends in which ranks wait in a circle. NCCL has not run it",
             "weights/test_engine_group.py::test_slices_of_two_senders_arrive_in_each_rank_over_one_group_and_over_new_connections_too weights/test_communicators.py::test_a_rank_in_too_many_groups_is_refused_with_what_would_make_it_fewer"),
        _row("windows of RDMA on a GPU", "options/transports/rdma.py::RemoteReader options/transports/sender.py::ReadSender", "doubtful",
             "descriptors are NIXL's; mended: a new window was given to the network card before what the stream still did with that memory had ended. It needs InfiniBand",
             "options/transports/test_rdma.py::test_a_rank_reads_each_byte_of_its_pieces_once_and_finds_it_where_it_is_told"),
        _row("loads of 1 GiB", "weights/plan.py::ReshardPlan", "right", "at 128 MiB, as before, requests took longer than copies", "weights/test_order.py ipc"),
    ],
    "Turns on a GPU": [
        _row("a role leaves the device and comes back", "megatron/offload.py::Offload megatron/host_memory.py::HostMemory", "right", "storages are resized in place; gradients are not copied; blocks of main memory that pinning does not round up", "megatron/test_offload.py::test_a_role_goes_on_to_the_bit_after_its_memory_was_given_up offload"),
        _row("sleep and wake", "rollout/engines/sglang/engine.py::SglangEngine", "right", "SGLang's calls on an idle server; each kind of memory is given up once", f"{SGLANG}::test_weights_arrive_bit_for_bit_and_a_sleeping_engine_gives_its_memory_back {ON_H100}"),
        _row("what no update sends, after a wake", "rollout/engines/sglang/repairs.py::clear_unsent", "right",
             "mended: pages that a server takes again are not zero. Padded widths of towers, biases that the first rank has alone (gpt-oss) and scales of the KV cache get their values back; servers with a copy in main memory are left alone",
             "rollout/test_repairs.py::test_a_woken_server_has_what_no_update_sends fp8_engine"),
        _row("weights wake before the KV cache", "rollout/engines/sglang/engine.py::SglangEngine rollout/engines/sglang/server.py::static_fraction", "doubtful",
             "by SGLang's tags: weights are sent while the cache is away, which wakes when the policy's have left, so that none of these are kept out of it; not seen on a GPU",
             f"weights/test_weight_state.py::test_the_sglang_engine_answers_with_complete_weights_alone planning/test_run_memory.py::test_engines_are_planned_with_the_share_of_a_gpu_that_they_are_started_with {SGLANG}::test_weights_arrive_bit_for_bit_and_a_sleeping_engine_gives_its_memory_back engine"),
        _row("seconds and memory by turn", "workers/gpu_sharing.py::GpuSharing", "doubtful", "the first update of a run on a GPU has not been seen", "workers/test_gpu_sharing.py::test_no_turn_has_both_of_trainer_and_engines engine"),
        _row("a sleeping server's rest", "planning/turns.py::reserve_bytes", "right", "1.9 GB with its context, measured", ON_H100),
    ],
    "Processes, state, platform": [
        _row("which GPU a rank and an engine gets", "weights/placement.py::Placement workers/own_gpu.py::own_gpu", "right", "by node and GPU, found out before anything is placed; engines see all GPUs of their node", "weights/test_placement.py::test_groups_lie_within_nodes_engines_on_neighbours_and_every_gpu_is_used_as_planned"),
        _row("device of threads", "weights/pusher.py::Pusher weights/intake_ranks.py::RankIntake", "right", "a new thread begins on GPU 0: each that sends or hashes chooses its rank's first", "weights/test_pusher.py::test_every_thread_that_hashes_or_sends_chooses_the_ranks_device_first"),
        _row("variables of CUDA and NCCL", "platform/cuda.py::CudaPlatform", "right", "set before a process starts, unless they are set already", "platform/test_install.py::test_what_cuda_reads_from_the_environment_is_set_where_it_is_not"),
        _row("deterministic runs", "platform/deterministic.py::make_deterministic", "right", "what raises on CUDA is told apart in a test that raises on the CPU, too", "platform/test_deterministic.py::test_deterministic_ranks_use_deterministic_kernels_alone deterministic"),
        _row("cores of a rank", "platform/numa.py::bind_to", "doubtful", "made-up machines only", "platform/test_numa.py::test_a_gpu_is_found_by_its_place_on_the_bus_and_a_cpu_binds_nothing platform"),
        _row("checkpoints", "megatron/optimizer_state.py::owned_boxes megatron/box_reader.py::BoxReader megatron/role_checkpoint.py::load_role megatron/rng_state.py::sharded_rng_state", "right", "ranks read what they own, not whole parameters", f"{TE}::test_a_checkpoint_of_the_reference_layers_is_read_by_transformer_engines_and_back {ON_H100}"),
        _row("the optimizer in main memory", "megatron/optimizer.py::build_optimizer", "right", "megatron-core's hybrid optimizer", f"themes/gpu/test_cuda_platform.py::test_offloaded_updates_are_those_on_the_device {ON_H100}"),
        _row("ranks replaced while NCCL waits", "options/elastic/rank_process.py::interrupt", "doubtful", "torch's `_abort_process_group` ends its collectives; on CPUs Gloo's are closed. It needs several GPUs", "options/elastic/test_rank_process.py"),
        _row("checkpoints in memory, written from a GPU", "options/elastic/shared_file.py::SharedFile", "doubtful", "the mapped file is registered with CUDA and copied to on a stream of its own, behind the stream that computes; registering has not been tried",
             "options/elastic/test_shared_file.py"),
        _row("seconds of a rank's own work", "options/elastic/busy_time.py::_OwnWork", "doubtful", "CUDA events around communication, read when a step has ended", "options/elastic/test_slow_ranks.py"),
        _row("models of many tenants", "options/serve/rank_models.py::RankModels", "right", "pinned copies, and the stream is waited for before one is used", "options/serve/test_two_tenants.py"),
    ],
}
# fmt: on


def page() -> str:
    """The page."""
    lines = [
        "# GPU paths",
        "",
        "<!-- Written by `python tools/docs/generate.py` from `tools/docs/gpu_table.py`: change that file, not this page. -->",
        "",
        "For people who run megarl on GPUs, or change what runs there: every path that only a GPU takes, what reading it against the sources of the libraries gave, and what decided it.",
        "",
        "Read against megatron-core 0.19.2, Transformer Engine 2.20.2, SGLang 0.5.23 and torch 2.11 to 2.14. What has run is in [On a GPU](gpu.md).",
        "",
        "| verdict | |",
        "|---|---|",
        "| right | calls, types, devices and streams agree with the sources, or it has run |",
        "| doubtful | the sources do not decide it: a test without a GPU, or a part of `benchmarks/gpu_parts.txt`, does |",
        "| slow | right, and known to cost more than it must |",
        "| refused | a config that asks for it ends in one sentence |",
        "",
        "Nothing that is known to fail is left. `python benchmarks/gpu_paths.py PART` asks a GPU one of the parts, and `benchmarks/gpu_parts.txt` has all of them in order.",
    ]
    for group, rows in GROUPS.items():
        lines += ["", f"## {group}", "", "| path | where | verdict | why | decided by |", "|---|---|---|---|---|"]
        lines += [_line(row) for row in rows]
    return "\n".join(lines) + "\n"


def says_the_same(path: Path, text: str) -> bool:
    """Return whether a page has this text, but for numbers of lines, which every change of a file moves."""
    return path.is_file() and _without_lines(path.read_text()) == _without_lines(text)


def _without_lines(text: str) -> str:
    return re.sub(r"(?<=\.py:)\d+", "", text)


def unnamed() -> list[str]:
    """Files below megarl/ that work on a GPU, and that no row names."""
    named = {one.split("::")[0] for rows in GROUPS.values() for row in rows for one in row.where}
    files = (path for room in ROOMS for path in sorted((ROOT / "megarl" / room).rglob("*.py")))
    found = {path.relative_to(ROOT / "megarl").as_posix() for path in files if GPU_WORDS.search(path.read_text())}
    return sorted(one for one in found - named if not one.startswith(ELSEWHERE))


def _line(row: GpuPath) -> str:
    if row.verdict not in VERDICTS:
        raise SystemExit(f"gpu_table.py: '{row.what}' has the verdict {row.verdict}; it must be one of {', '.join(VERDICTS)}")
    where = "<br>".join(
        f"`megarl/{file}:{line_of(file, name)}` {name}" for file, name in (one.split("::") for one in row.where)
    )
    decided = "<br>".join(_decision(one) for one in row.decided)
    return f"| {row.what} | {where} | {row.verdict} | {row.why} | {decided} |"


@functools.cache
def _names(file: str) -> dict[str, int]:
    tree = ast.parse((ROOT / "megarl" / file).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name: node.lineno for node in ast.walk(tree) if isinstance(node, kinds)}


def line_of(file: str, name: str) -> int:
    """The line on which a function or class of a file below megarl/ begins; SystemExit if there is none of this name."""
    if name not in _names(file):
        raise SystemExit(f"gpu_table.py names {name} of megarl/{file}, which is not there")
    return _names(file)[name]


@functools.cache
def part_names() -> list[str]:
    """The parts of gpu_parts.txt, in order."""
    return [line.split()[0] for line in PARTS.read_text().splitlines() if line.strip() and not line.startswith("#")]


def _decision(one: str) -> str:
    if one == ON_H100:
        return "[ran on an H100](evidence/gpu.md)"
    if one in part_names():
        return f"part {one}"
    file, _, name = one.partition("::")
    path = ROOT / "tests" / file
    if not path.exists() or (name and f"def {name}(" not in path.read_text()):
        raise SystemExit(f"gpu_table.py names {one}, which is neither a part of {PARTS.name} nor a test")
    return f"`tests/{file}`{f' {name}' if name else ''}"
