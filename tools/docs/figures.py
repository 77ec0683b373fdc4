"""Tables of pages from benchmarks/results/, which generate.py writes between marks, and which of these files are too old."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from statistics import mean, median

from option_counts import budget_rows, precision_rows
from results import READ, Figures, measured_on, result


def with_tables(page: str, text: str) -> str:
    """`text` of this page with its tables written anew."""
    for name, table in TABLES[page].items():
        lines = table_with_date(table)
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, _, rest = text.partition(begin)
        if end not in rest:
            raise SystemExit(f"docs/{page} lacks the marks of the table {name!r}: {begin.strip()} and {end}")
        text = f"{before}{begin}" + "\n".join(lines) + f"\n{end}{rest.partition(end)[2]}"
    return text


def table_with_date(table: Callable[[], list[str]]) -> list[str]:
    """The table, and when its figures were measured."""
    READ.clear()
    lines = table()
    dates = sorted({measured_on(name) for name in READ})
    return [*lines, "", f"Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."]


# --- cells and rows ---


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    cells = [list(map(str, row)) for row in rows]
    lines = [re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(row)} |") for row in ([*head], *cells)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def _two_digits(value: float) -> str:
    """Seconds by two digits that count, never in the form 1e-05."""
    return f"{Decimal(f'{value:.2g}'):f}"


def _times(value: float) -> str:
    return f"{value:.2f} times"


def percent(share: float, digits: int = 0) -> str:
    """A share as pages write it."""
    return f"{100 * share:.{digits}f} %"


def megabytes(nbytes: float) -> str:
    """Whole MB."""
    return f"{nbytes / 1e6:.0f}"


def _listed(values: Iterable[float], digits: int = 1) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


# --- evidence/benchmarks.md ---


def step() -> list[str]:
    found = result("against_trl")["megarl"]  # a step has one time on all pages
    at = found["median"]
    phases = f"update {at['time/update_s']:.1f}, generate {at['time/generate_s']:.1f}, weight sync {at['time/sync_s']:.2f}"
    idle = median(one["time/other_s"] / one["time/step_s"] for one in found["steps"])
    generation = result("step")["generation"]
    rows = [
        ("samples/s", f"{found['samples_per_s']:.2f}"),
        ("step", f"{at['time/step_s']:.1f} s: {phases}"),
        ("time in no phase", percent(idle, 2)),
        (
            "generation through megarl's engine",
            f"{_times(generation['megarl_over_bare'])} one plain request to the same server",
        ),
    ]
    return _table(("", ""), rows)


def against_trl() -> list[str]:
    found = result("against_trl")
    trl, ours = found["trl"], found["megarl"]
    at = ours["median"]
    training = f"{at['time/update_s']:.1f} s and {at['time/sync_s']:.1f} s weight sync"
    rows = [
        ("TRL", *_rate(trl, "step_s", "generate_s"), f"{trl['median']['train_s']:.1f} s"),
        ("megarl", *_rate(ours, "time/step_s", "time/generate_s"), training),
        ("ratio", f"{found['megarl_over_trl']:.2f}", "", "", ""),
    ]
    return _table(("", "samples/s", "step", "generation", "training"), rows)


def _rate(side: Figures, whole: str, generation: str) -> tuple[str, str, str]:
    at = side["median"]
    return f"{side['samples_per_s']:.2f}", f"{at[whole]:.1f} s", f"{at[generation]:.1f} s"


def algorithms() -> list[str]:
    functions = result("algorithms")["functions"]
    rows = [(f"`{name}`", f"{one['ns_per_token']:.1f}", f"{one['over_copy']:.1f}") for name, one in functions.items()]
    return _table(("function", "ns per token", "times a copy of what it reads"), rows)


# --- evidence/costs.md ---


def scaling() -> list[str]:
    worlds = result("scaling")["worlds"]
    parts = ("responses", "batch", "planning", "shares", "advantages", "serialising", "collection", "all")
    rows = []
    for ranks, one in worlds.items():
        sizes = f"{int(ranks):,}", f"{one['responses']:,.0f}", f"{one['tokens'] / 1e6:,.0f} M"
        seconds = (_two_digits(one["taking" if part == "responses" else part]) for part in parts)
        sent = f"{one['sent_bytes'] / 1e6:,.1f} MB", f"{one['token_bytes']:,.0f}", f"{one['peak_rss_bytes'] / 1e9:.1f} GB"
        rows.append((*sizes, *seconds, *sent))
    return _table(("ranks", "responses", "tokens", "taking over", *parts[1:], "sent", "tokens sent", "memory"), rows)


def launches() -> list[str]:
    rows = []
    for name, one in result("roofline")["parts"].items():
        layer, rest = one["layer"], one["micro_batch"]
        kind = name.removesuffix(", reference")
        rows.append((kind, layer["launches"], layer["waits"], rest["launches"], *_over_least(layer)))
    head = ("layers of", "launches", "waits", "launches of the rest of a micro-batch", "operations / least", "bytes / least")
    return _table(head, rows)


def launches_of_transformer_engine() -> list[str]:
    parts = result("roofline_of_transformer_engine")["parts"]
    rows = []
    for name, now in parts.items():
        if not name.endswith(", transformer_engine"):
            continue
        before = parts[f"{name}, before"]["layer"]
        counts = [(before[what], f"**{now['layer'][what]}**") for what in ("launches", "waits")]
        rows.append((name.removesuffix(", transformer_engine"), *counts[0], *counts[1], *_over_least(now["layer"])))
    head = ("layers of", "launches before", "now", "waits before", "now", "operations / least", "bytes / least")
    return _table(head, rows)


def _over_least(layer: Figures) -> tuple[str, str]:
    flops, nbytes = (layer[what] / layer["minimum"][what] for what in ("flops", "bytes"))
    return f"{flops:.2f}", f"{nbytes:.1f}"


WAYS_TO_CONVERT = {
    "plain": "plain loop of `load_file` and `save_file`",
    "import": "`megarl convert import`",
    "export": "`megarl convert export`",
    "mbridge": "mbridge 0.15.1, load and save",
}


def conversion(name: str) -> Callable[[], list[str]]:
    def table() -> list[str]:
        found = result(name)
        rows = []
        for way, one in found["medians"].items():
            seconds = f"{one['seconds']:.1f} ({_listed(each['seconds'] for each in found['rounds'][way])})"
            rows.append((WAYS_TO_CONVERT[way], seconds, percent(one["share_of_plain"]), f"{one['peak_mib']:,.0f} MiB"))
        head = ("", "seconds (of each round)", "of the plain loop's throughput", "memory beyond what was resident")
        return _table(head, rows)

    return table


HEADS = {
    "megarl on a CPU, float32": "megarl, float32 on a CPU, 128 rows at once",
    "megarl on a GPU, bfloat16": "megarl, bfloat16 on a GPU, 1,536 rows at once",
    "apart on a GPU, bfloat16": "the same without megatron-core's buffer for the weight's gradient",
    "Liger on a GPU, bfloat16": "Liger 0.8.5, bfloat16 on a GPU, 256 rows at once, by its formula",
    "torch on a CPU, float32": "torch's `linear_cross_entropy`, float32 on a CPU",
    "megatron-core on a CPU, float32": "megatron-core's `vocab_parallel_cross_entropy` of all logits, float32",
    "full on a CPU, float32": "log-softmax and entropy of all logits, float32",
}


def head_memory() -> list[str]:
    found = result("head_memory")["memory"]["hidden size 1024"]
    rows = []
    for name, words in HEADS.items():
        one = found[name]
        share = percent(one["of float32 logits"], 1)
        of_bfloat16 = percent(one["of bfloat16 logits"], 1) if name.endswith("bfloat16") else ""
        rows.append((words, f"{one['bytes'] / 1e6:,.0f}", f"**{share}**" if name.startswith("megarl") else share, of_bfloat16))
    return _table(("hidden size 1,024", "MB", "of all float32 logits", "of all bfloat16 logits"), rows)


def head_times() -> list[str]:
    at = {name: one["ratio"] for name, one in result("head_memory")["times"].items()}
    rows = [
        ("megarl, 64, 128, 256 rows at once", _listed((at[f"megarl, chunks of {rows}"] for rows in (64, 128, 256)), 2)),
        ("megarl, 512 rows, without megatron-core's buffer", f"{at['apart']:.2f}"),
        ("megarl before commit 287ca9d, 512 rows", f"{at['megarl before (287ca9d^), chunks of 512']:.2f}"),
        ("megatron-core's cross-entropy of all logits, no entropy", f"{at['megatron-core']:.2f}"),
        ("log-softmax and entropy of all logits", f"{at['full']:.2f}"),
        ("torch's `linear_cross_entropy`, no entropy", f"{at['torch']:.1f}"),
    ]
    return _table(("head", "ratio"), rows)


# --- evidence/rollouts.md ---

MODES = {"sync": "sync", "one_step": "one_step_off_policy", "async": "async"}


def modes() -> list[str]:
    rows = []
    for mode, name in MODES.items():
        runs = [run for run in result("async_rollouts")["runs"] if run["mode"] == mode]
        busy, training, waits = (f"{mean(run[what] for run in runs):.0%}" for what in ("trainer_busy", "training", "waiting"))
        stale = f"{mean(run['staleness'] for run in runs):.2f}, {max(run['staleness_max'] for run in runs):.0f}"
        rewards, accuracy = _listed((run["reward_last"] for run in runs), 3), f"{mean(run['accuracy'] for run in runs):.0%}"
        rows.append((f"`{name}`", busy, training, waits, stale, rewards, accuracy))
    head = ("mode", "trainer busy", "of it training", "waiting for responses", "staleness (mean, max)")
    return _table((*head, "reward of the last 5 steps, by seed", "accuracy after"), rows)


def lent_engines() -> list[str]:
    runs = result("lent_engines")["runs"]
    rows = []
    for alone, lent in zip(runs[::2], runs[1::2], strict=True):
        ratio = f"{lent['samples_per_s'] / alone['samples_per_s']:.2f}"
        waits = (f"{one['waiting']:.0%}" for one in (alone, lent))
        stale = _listed((alone["staleness"], lent["staleness"]), 2)
        rows.append((lent["seed"], ratio, *waits, f"{lent['lent_share']:.0%}", stale))
    head = ("seed", "samples/s with lending over without", "waiting without", "waiting with", "share of waits lent")
    return _table((*head, "staleness without, with"), rows)


def partial_responses() -> list[str]:
    rows = []
    for way in ("restart", "continue"):
        one = result("partial_responses")["partial_responses"][way]
        older = percent(one["older_tokens"] / one["trained_tokens"])
        rows.append((f"`{way}`", f"{one['sampled_per_trained_token']:.2f}", older))
    head = ("`partial_responses`", "tokens sampled for each that is trained on", "of these sampled by older weights")
    return _table(head, rows)


def turn_cache() -> list[str]:
    rows = []
    for way, words in (("without", "without the turn cache"), ("kept", "with it")):
        one = result("partial_responses")["turn_cache"][way]
        rows.append((words, percent(one["cache_hit_rate"]), f"{one['cpu_seconds_per_conversation']:.2f} s"))
    return _table(("", "prompt tokens that are not computed again", "CPU time of a conversation"), rows)


SPECULATIVE = {"glm4_moe": "GLM-4.5, whose layer is random at first", "llama": "Llama with a layer of `add-draft`"}


def drafts() -> list[str]:
    runs = {(run["model"], run["layer_is_trained"]): run["rollout/acceptance_length"] for run in result("speculative")["runs"]}
    rows = []
    for model, words in SPECULATIVE.items():
        rows.append((words, *(f"{runs[model, trained][0]:.2f} → {runs[model, trained][-1]:.2f}" for trained in (True, False))))
    return _table(("model", "layer trained", "layer left as it was"), rows)


# --- evidence/weight_updates.md ---

PLANS = {
    "70b": "Llama 70B, `tp8·pp8`, engines of `tp8`",
    "671b": "DeepSeek-V3 671B, `tp4·pp8·ep32`, engines of `tp8·ep64`",
}


def reshard_plan() -> list[str]:
    rows = []
    for name, worlds in result("reshard_plan")["plans"].items():
        for world, one in worlds.items():
            ranks = f"**{int(world):,}**" if world == "1024" else f"{int(world):,}"
            sizes = f"{one['transfers_per_engine']:,}, {one['buckets_per_engine']:,}"
            seconds = (f"{one[stage]:.2f} s" for stage in ("plan_s", "verify_s", "cost_s", "cpu_s"))
            rows.append((PLANS[name], ranks, f"{one['engines']:,}", sizes, *seconds, f"{one['peak_mib']:.0f} MiB"))
    head = ("plan", "training ranks", "engines", "transfers, buckets of an engine", "planned", "verified", "priced")
    return _table((*head, "CPU of plan and proof", "peak memory"), rows)


UPDATED = {"135m": "SmolLM2-135M", "1b": "1B Llama"}
WAYS = {
    "shared_memory": "shared memory",
    "process_group": "process group, Gloo",
    "rdma": "RDMA's way on one machine",
    "rdma_over_tcp": "RDMA's way over TCP",
}


def reshard() -> list[str]:
    rows = []
    for name, model in result("reshard")["models"].items():
        for way, words in WAYS.items():
            one = model[way]
            unchecked, checked = one["unchecked"], one["checked"]
            rows.append(
                (
                    f"{UPDATED[name]}, {model['dtype']}, {model['bytes'] / 1e9:.2f} GB",
                    words,
                    f"{one['plain']['total_s']:.3f} s",
                    f"{unchecked['total_s']:.3f} s, {_times(unchecked['times_plain'])}",
                    f"{checked['total_s']:.3f} s, **{_times(checked['times_plain'])}**",
                )
            )
    return _table(("model", "way", "plain transfer", "update", "with every checksum compared"), rows)


# --- evidence/learning.md and evidence/plans.md: the tables that their benchmarks print ---


def learning(kind: str) -> Callable[[], list[str]]:
    def table() -> list[str]:
        import learning

        return learning.table(result("learning")["runs"], kind)

    return table


def distillation() -> list[str]:
    import distillation

    found = result("distillation")
    return distillation.table(found["runs"], found["accuracy"]["teacher"])


def learning_to_see() -> list[str]:
    runs = result("learning_to_see")["runs"]
    seeds = sorted({run["seed"] for run in runs})
    names = ("counting, GRPO", "counting, PPO", "counting, REINFORCE++", "counting, SFT then GRPO", "digits, GRPO")
    rows = []
    for name in names:
        by_seed = {run["seed"]: list(run["held_out_accuracy"].values()) for run in runs if run["name"] == name}
        rows.append((name, *(f"{by_seed[seed][0]:.1%} → {by_seed[seed][-1]:.1%}" for seed in seeds)))
    return _table(("run", *(f"seed {seed}" for seed in seeds)), rows)


def learning_to_hear() -> list[str]:
    runs = result("learning_to_hear")["runs"]
    steps = list(runs[0]["held_out_accuracy"])
    rows = [(run["name"], run["seed"], *(f"{share:.1%}" for share in run["held_out_accuracy"].values())) for run in runs]
    return _table(("run", "seed", "before", *(f"after {step} steps" for step in steps[1:])), rows)


def planning_memory() -> list[str]:
    parts = ("parameters", "gradients", "optimizer", "activations")
    rows = []
    for row in result("planning_memory")["rows"]:
        measured, planned = row["measured"], row["planned"]
        cells = (f"{measured[part] / 1e3:,.0f} kB, {planned[part] / measured[part] - 1:+.1%}" for part in parts)
        rows.append((row["case"], row["stage"], *cells))
    return _table(("layout", "stage", *parts), rows)


# --- evidence/faults.md ---


def faults_mixed() -> list[str]:
    by_family: dict[str, list[Figures]] = {}
    for trial in result("faults_mixed")["trial"]:
        by_family.setdefault(trial["family"], []).append(trial)
    rows = []
    for family, trials in by_family.items():
        restarted = [trial for trial in trials if trial["restarts"]]
        times = [trial["recovered_s"] for trial in trials if trial["recovered_s"] is not None]
        of_restarts = [trial["recovered_s"] for trial in restarted if trial["recovered_s"] is not None]
        good = sum(one["good"] for kind, one in result("faults_mixed")["by_kind"].items() if kind.startswith(f"{family}: "))
        rows.append(
            (
                f"`{family}`",
                len(trials),
                len({trial["kind"] for trial in trials}),
                good,
                sum(trial["same_parameters"] for trial in trials),
                f"{median(times):.1f}, {max(times):.0f}",
                len(restarted),
                f"{median(of_restarts):.0f}" if of_restarts else "",
            )
        )
    head = ("family", "trials", "kinds of faults", "good", "same to the last bit")
    of_times = ("seconds until a further step: median, longest", "trials with a restart", "seconds of these: median")
    return _table((*head, *of_times), rows)


def faults_serve() -> list[str]:
    found = result("faults_serve")
    rows = []
    for kind, words in found["kinds"].items():
        if (one := found["by_kind"].get(kind)) is not None:
            trials = [trial for trial in found["trial"] if trial["kind"] == kind]
            pauses = [trial["paused_s"] for trial in trials if trial["paused_s"] is not None]
            same = sum(trial["same_losses"] and trial["same_log_probs"] and trial["same_adapters"] for trial in trials)
            pause = f"{_seconds(median(pauses))}, {_seconds(max(pauses))}" if pauses else ""
            rows.append((f"`{kind}`", words, one["trials"], one["good"], same, pause))
    head = ("fault", "what the trial does", "trials", "good", "same to the last bit")
    return _table((*head, "longest pause of the client in seconds: median, longest"), rows)


DEEDS = ("kill", "stop", "pause", "cut", "starve", "oom", "jump")


def faults() -> list[str]:
    by_kind = result("faults")["by_kind"]
    rows = []
    for target in ("driver", "supervisor", "rank", "engine", "reward_server", "ray", "clock"):
        cells = []
        for deed in DEEDS:
            one = by_kind.get(f"{deed} {target}")
            cells.append(f"{one['good']} ({_seconds(one['median_recovered_s'])})" if one else "")
        rows.append(("Ray" if target == "ray" else target.replace("_", " "), *cells))
    return _table(("", *DEEDS), rows)


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def replaced_ranks() -> list[str]:
    found, of_copies = result("replaced_ranks"), result("memory_copies")
    copies = [f"{of_copies[way]['median_cpu_s']:.2f}" for way in ("copied, and into new files", "in place")]
    middle = {name: median(seconds) for name, seconds in found["steps_s"].items()}
    rows = [
        ("seconds until an update in which a rank is lost begins again", ", ".join(map(_seconds, found["lost_to_resumed_s"]))),
        ("a step without `resources.spares`, with it: median seconds", f"{middle['without']:.2f}, {middle['with']:.2f}"),
        ("steps lost", found["steps_lost"]),
        ("seconds of processors of a checkpoint: into new files as then, in place", ", ".join(copies)),
    ]
    return _table(("", ""), rows)


def soak() -> list[str]:
    found = [(one["process"], one["memory_bytes"]) for one in result("soak")["processes"]]
    found.sort(key=lambda one: -one[1]["growth"])
    grown = [one for one in found if one[1]["growth"] >= 1e6]
    rows = []
    for process, memory in grown:
        name = process.removeprefix("python ").strip()
        rows.append(
            (f"`{name}`", f"{megabytes(memory['first'])} to {megabytes(memory['last'])} MB", f"{memory['growth'] / 1e6:.1f} MB")
        )
    last = [memory["last"] for _, memory in found[len(grown) :]]
    rows.append((f"each of {len(last)} others", f"{megabytes(min(last))} to {megabytes(max(last))} MB", "less than 1 MB"))
    return _table(("process", "memory", "growth behind the warm-up"), rows)


# --- serve.md ---


def served(name: str, part: str = "table") -> Callable[[], list[str]]:
    return lambda: getattr(__import__(name), part)(result(name))


TABLES: dict[str, dict[str, Callable[[], list[str]]]] = {
    "evidence/benchmarks.md": {"step": step, "algorithms": algorithms, "against_trl": against_trl},
    "evidence/costs.md": {
        "scaling": scaling,
        "launches": launches,
        "launches_of_transformer_engine": launches_of_transformer_engine,
        "budget": lambda: _table(*budget_rows()),
        "convert_1b": conversion("convert_1b"),
        "convert_8b": conversion("convert_8b"),
        "head_memory": head_memory,
        "head_times": head_times,
    },
    "evidence/rollouts.md": {
        "modes": modes,
        "lent_engines": lent_engines,
        "turn_cache": turn_cache,
        "partial_responses": partial_responses,
        "drafts": drafts,
        "engine_precisions": lambda: _table(*precision_rows()),
    },
    "evidence/weight_updates.md": {"reshard_plan": reshard_plan, "reshard": reshard},
    "evidence/learning.md": {
        "distillation": distillation,
        "learning_to_see": learning_to_see,
        "learning_to_hear": learning_to_hear,
        "estimators": learning("estimator"),
        "losses": learning("loss"),
        "presets": learning("preset"),
    },
    "evidence/plans.md": {"memory": planning_memory},
    "serve.md": {
        "served_recipes": served("served_recipes"),
        "served_curves": served("served_curves"),
        "served_curve": served("served_curves", "curve"),
        "served_supervised": served("served_supervised"),
        "served_supervised_curve": served("served_supervised", "curve"),
    },
    "evidence/faults.md": {one.__name__: one for one in (faults_mixed, faults, faults_serve, replaced_ranks, soak)},
}
"""By page and mark, the table that stands between `<!-- mark: begin -->` and `<!-- mark: end -->`."""
