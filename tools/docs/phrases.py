"""Phrases with a figure of benchmarks/results/ that pages must have word by word, in sentences that people write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean, median

from figures import MODES, SPECULATIVE, WAYS, megabytes, percent, result


def phrases_missing(page: str, text: str) -> list[str]:
    """The phrases that `text` of this page should have and has not."""
    words = " ".join(text.split())
    return [phrase for phrase in PHRASES[page]() if phrase not in words]


def _words(share: float, digits: int = 0) -> str:
    """A share as `{:.1%}` rounds it, with the space that pages have before the sign."""
    return f"{share:.{digits}%}".replace("%", " %")


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}"


def of_performance() -> list[str]:
    driver, roofline = result("scaling"), result("roofline")
    ranks, one = list(driver["worlds"].items())[-1]
    converted, heads = result("convert_8b")["medians"], result("head_memory")["memory"]["hidden size 1024"]
    alone = result("group_calls")
    call_s = median(one["step_s"] / alone["calls_of_a_step"] / int(ranks) for ranks, one in alone["by_rank"].items())
    calls, checks = alone["by_node"], result("update_checks")["checks"]["671b"]["10240"]
    llama = (
        roofline["parts"]["llama, reference"]["layer"],
        result("roofline_of_transformer_engine")["parts"]["llama, transformer_engine"],
    )
    return [
        f"{one['all']:.1f} s for {one['responses']:,.0f} responses on {int(ranks):,} ranks",
        f"{one['sent_bytes'] / 1e6:,.0f} MB are sent",
        f"about {1e3 * call_s:.1f} ms for each Ray actor",
        f"calls of a step take {calls['1024']['step_s']:.2f} s for 1,024 ranks and {calls['10240']['step_s']:.1f} s for 10,240",
        f"it adds up {checks['driver_s']:.2f} s for DeepSeek-V3 on 10,240 GPUs",
        f"launches {llama[0]['launches']} kernels as a `reference` layer and {llama[1]['layer']['launches']} under Transformer",
        f"takes {converted['import']['seconds']:.0f} s and export {converted['export']['seconds']:.0f} s, with at most"
        f" {max(converted[way]['peak_mib'] for way in ('import', 'export')):.0f} MiB of memory beyond",
        f"{percent(heads['megarl on a GPU, bfloat16']['of float32 logits'], 1)} of their float32 size in bfloat16 on a GPU",
        f"{percent(heads['megarl on a CPU, float32']['of float32 logits'], 1)} in float32 on a CPU",
    ]


def of_costs() -> list[str]:
    converted, larger = result("convert_1b"), result("convert_8b")
    asked, checks = result("group_calls")["by_node"]["10240"], result("update_checks")["checks"]["671b"]["10240"]
    fastest = min(one["seconds"] for one in converted["rounds"]["plain"])
    heads = result("head_memory")["memory"]["hidden size 4096"]
    ours, liger = heads["megarl on a GPU, bfloat16"], heads["Liger on a GPU, bfloat16"]
    conversations, secrets = result("tokenising")["rows_per_s"], result("redaction")["run"]
    micro_batches = [one["micro_batch"]["launches"] for name, one in result("roofline_of_transformer_engine")["parts"].items()
                     if name.endswith(", transformer_engine")]  # fmt: skip
    return [
        f"by the table {asked['submit_s'] + asked['wait_s']:.1f} s of CPU",
        f"its {checks['boxes_of_rank']:,} boxes in {1e3 * checks['rank_s']:.1f} ms",
        f"1.1B parameters, {converted['bytes'] / 1e9:.1f} GB,",
        f"({larger['bytes'] / 1e9:.0f} GB, load",
        f"fastest round export is at {percent(fastest / converted['medians']['export']['seconds'])}",
        f"import at {percent(fastest / converted['medians']['import']['seconds'])}",
        f"has {megabytes(ours['bytes'])} MB ({percent(ours['of float32 logits'], 1)})",
        f"Liger's {liger['bytes'] / 1e6:,.0f} MB ({percent(liger['of float32 logits'], 1)})",
        f"takes: {secrets['ns_per_character']:.0f} ns a character",
        f"at most {_words(secrets['share_by_default'], 2)} of a step",
        f"and {_words(secrets['share_of_a_step'])} with all {secrets['log_samples']}",
        f"within {result('log_probs')['figures']['worst_error_nats']:.1e} nats of float64".replace("e-0", "e-"),
        f"**{conversations['megarl']:,.0f} a second**",
        f"makes {conversations['transformers']:,.0f} a second",
        f"The rest of a micro-batch launches {min(micro_batches)} to {max(micro_batches)}",
    ]


def of_learning() -> list[str]:
    accuracy = result("distillation")["accuracy"]
    apart = max(run["largest_mismatch"] for run in result("learning_to_see")["runs"])
    return [
        f"are right with probability {accuracy['student']:.3f}, the teacher's with {accuracy['teacher']:.3f}",
        f"never more than {apart:.1e} apart",
        f"the threshold is {result('learning')['threshold']} for every row",
    ]


KINDS_OF_INPUT = {"config": "config", "cli": "command line", "data": "data", "http": "HTTP", "model": "model folder"}


def of_faults() -> list[str]:
    mixed, plain, agents = result("faults_mixed"), result("faults"), result("faults_agents")
    rivals, served, again = result("faults_rivals"), result("faults_serve"), result("faults_serve_again")
    of_nodes = {kind: mixed["by_kind"][f"nodes: {kind}"]["median_recovered_s"] for kind in ("kill node", "pause link")}
    wrong, soaked, bad = result("corruption"), result("soak"), result("bad_input")
    saving, writing = result("checkpoint_cost"), result("checkpoint_writing")
    restarted = [one["recovered_s"] for one in plain["trial"] if one["restarts"]]
    past, through = writing["past the page cache"], writing["through the page cache"]
    return [
        f"**{mixed['good']} of {mixed['trials']} trials are good**, in each of the {len(mixed['families'])} families",
        f"Prompts lost {mixed['prompts_lost']}, trained on twice {mixed['prompts_duplicated']}, processes left behind"
        f" {mixed['left_processes_behind']}",
        f"A lost node (`kill node`) cost {of_nodes['kill node']:.0f} s",
        f"a link that was down for seconds {of_nodes['pause link']:.1f} s",
        f"**{plain['good']} of {plain['trials']} trials are good**, all to the last bit",
        f"median **{plain['median_recovered_s']:.1f} s** over all",
        f"{plain['longest_recovered_s']:.0f} s at most",
        f"{median(restarted):.0f} s over the {len(restarted)} that took a restart",
        f"**{agents['good']} of {agents['trials']} are good**",
        f"**{rivals['good']} of {rivals['trials']} are refused",
        f"**{served['good']} of {served['trials']} trials are good**: clients noticed a pause at most",
        f"**{again['good']} of {again['trials']} are good**, of the 40 that were planned",
        f"Of {wrong['trials']:,} damages of {wrong['files']} files ({wrong['truncated']} truncations, {wrong['flipped']:,}"
        f" bits) {wrong['detected']:,} were detected",
        f"A checkpoint has {saving['checkpoint_bytes'] / 1e9:.1f} GB and is complete {saving['whole_after_s']:.0f} s after",
        f"{saving['blocked_s']:.2f} s, **{percent(saving['blocked_share_of_a_step'], 1)} of a step**",
        f"of {saving['clean_step_s']:.1f} s ({saving['blocked_each_s'][0]:.1f} s the first time",
        f"{past['median_cpu_s']:.2f} s of CPU time (5 checkpoints: {min(past['cpu_s']):.2f} to {max(past['cpu_s']):.2f} s)",
        f"through the cache {min(through['cpu_s']):.2f} to {max(through['cpu_s']):.1f} s",
        f"{soaked['steps'][1]:,} steps",
        f"{soaked['written_bytes'] / 1e6:.0f} MB of them were written",
        f"{soaked['process_count']['first']} processes at the beginning and at the end",
        f"gives the command line {bad['cases']} malformed inputs",
        *(f"| {words} | {bad['by_kind'][kind]} |" for kind, words in KINDS_OF_INPUT.items()),
        f"**{bad['as_they_must']} of {bad['cases']} behave as they must** in {bad['seconds']:.0f} s",
    ]


def of_vision() -> list[str]:
    last = [(run["name"], list(run["held_out_accuracy"].values())[-1]) for run in result("learning_to_see")["runs"]]
    counting, digits = ([end for name, end in last if name.startswith(task)] for task in ("counting", "digits"))
    return [
        f"counting ends at {_words(min(counting), 1)} or more",
        f"digits at {100 * min(digits):.0f} to {_words(max(digits))}",
    ]


def of_rollouts() -> list[str]:
    runs = result("lent_engines")["runs"]
    gains = [lent["samples_per_s"] / alone["samples_per_s"] for alone, lent in zip(runs[::2], runs[1::2], strict=True)]
    of_modes = result("async_rollouts")["runs"]
    busy = {mode: mean(run["trainer_busy"] for run in of_modes if run["mode"] == mode) for mode in MODES}
    sampling = result("scheduling")["over_sampling"]["32k"]
    shorter = [_words(-sampling[f"{more} of 128 more, continue"]["change"]) for more in (32, 48, 64)]
    return [
        f"is {shorter[0]} shorter with a quarter more groups, {shorter[1]} with three eighths and {shorter[2]} with half",
        f"lending gave {min(gains):.2f} to {max(gains):.2f} times the samples per second",
        f"saves {percent(result('partial_responses')['turn_cache']['kept']['cache_hit_rate'])} of the prompt tokens",
        f"busy for {_words(busy['sync'])} of a step in `sync`, {_words(busy['one_step'])} in `one_step_off_policy`"
        f" and {_words(busy['async'])} in `async`",
    ]


def of_resharding() -> list[str]:
    plans = [one for worlds in result("reshard_plan")["plans"].values() for one in worlds.values()]
    largest = [worlds["16384"] for worlds in result("reshard_plan")["plans"].values()]
    large = [one["plan_s"] + one["verify_s"] + one["cost_s"] for one in largest]
    times = {way: [model[way]["checked"]["times_plain"] for model in result("reshard")["models"].values()] for way in WAYS}
    return [
        f"A plan for 16,384 ranks takes {min(large):.0f} to {max(large):.0f} s",
        f"at most {max(one['peak_mib'] for one in plans):.0f} MiB",
        f"takes {_range(times['shared_memory'])} times a plain copy of the bytes in shared memory",
        f"{_range(times['process_group'])} times a plain broadcast by Gloo",
        f"{_range(times['rdma'])} times one by RDMA's way on one machine",
        f"over TCP RDMA's way takes {_range(times['rdma_over_tcp'])} times it",
    ]


def of_speculative() -> list[str]:
    runs = {(run["model"], run["layer_is_trained"]): run["rollout/acceptance_length"] for run in result("speculative")["runs"]}
    first, trained, untrained = (
        [f"{runs[model, how][at]:.2f}" for model in SPECULATIVE] for how, at in ((True, 0), (True, -1), (False, -1))
    )
    return [
        f"rise from {' and '.join(first)} to {' and '.join(trained)} with training",
        f"fall to {' and '.join(untrained)} without",
    ]


def _activations_off() -> str:
    rows = result("planning_memory")["rows"]
    return _words(max(abs(row["planned"]["activations"] / row["measured"]["activations"] - 1) for row in rows), 1)


def of_security() -> list[str]:
    by_name = result("fuzz")["targets"]
    targets = by_name.values()
    folders = [by_name[name] for name in ("report", "compare", "samples", "status", "watch", "resume", "begin")]
    day = max(one["date"] for one in folders)[:10]
    found = sum(len(one["findings"]) for one in targets) or "nothing"
    return [
        f"{min(one['seconds'] for one in targets) // 60} minutes for each",
        f"found {found}",
        f"run folders {day}: {sum(one['executions'] for one in folders):,} inputs",
    ]


def of_readme() -> list[str]:
    trials = result("faults")
    return [f"{trials['good']} of {trials['trials']} trials in which a process was killed"]


PHRASES: dict[str, Callable[[], list[str]]] = {
    "../README.md": of_readme,
    "performance.md": of_performance,
    "evidence/costs.md": of_costs,
    "evidence/learning.md": of_learning,
    "evidence/plans.md": lambda: [f"the plan's difference from it, {_activations_off()} at most"],
    "evidence/faults.md": of_faults,
    "planning.md": lambda: [f"activations are within {_activations_off()} of"],
    "vision.md": of_vision,
    "rollouts.md": of_rollouts,
    "resharding.md": of_resharding,
    "speculative.md": of_speculative,
    "security.md": of_security,
}
"""By page, phrases that must stand in it word by word, line breaks aside."""
