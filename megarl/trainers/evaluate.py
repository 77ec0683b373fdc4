"""`megarl eval`: answer the held-out prompts with a model or with checkpoints of a run, and score the answers."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from megarl.config import Config
from megarl.config.checks import check_evaluates
from megarl.config.evaluations import EvaluationConfig
from megarl.data.sample import Prompt, Sample
from megarl.errors import CheckpointError, ConfigError, counted
from megarl.experience.eval_figures import is_right
from megarl.experience.inputs import RlInputs
from megarl.observe import evaluation_line, read_metrics
from megarl.observe.answer_progress import answers_shown
from megarl.observe.kept_lines import mend_ends
from megarl.option_list import functions
from megarl.runs.folders import checkpoint_in
from megarl.runs.run_checkpoint import CheckpointFolder
from megarl.runs.training_side import POLICY
from megarl.system.atomic_files import write_text_atomically
from megarl.system.processor import slow_bfloat16
from megarl.system.redaction import redacted_data
from megarl.trainers.inputs import read_inputs
from megarl.trainers.start import open_cluster, open_roles
from megarl.workers.roles import Roles, group_requests
from megarl.workers.rollouts import Rollouts

POLL_S = 5.0
"""Between two looks for a new checkpoint."""


@dataclass(frozen=True)
class Answering:
    """The rows, and engines that have the weights of a model or of a checkpoint."""

    inputs: RlInputs
    rollouts: Rollouts
    roles: Roles | None
    """None: the engines have the weights of `model.path`."""

    def take(self, checkpoint: Path) -> None:
        """Give the engines the policy saved in `checkpoint`."""
        assert self.roles is not None, "weights come from roles"
        self.roles.restore(str(checkpoint.resolve()), [POLICY])
        self.rollouts.update_weights()

    def measure(self, judged: list[tuple[str, Sample]] | None = None) -> dict[str, float]:
        """The figures of `data.eval` (`evaluation`) and of every set of `evaluations` (`set_figures`), and seconds.

        `judged` is given every response with the name of its set, `data.eval` or that of an evaluation.
        """
        started = time.perf_counter()
        figures: dict[str, float] = {}
        judged_samples = judged if judged is not None else []
        if self.inputs.held_out:
            samples = self.rollouts.generate(self.inputs.held_out, greedy=True)
            judged_samples += [("data.eval", sample) for sample in samples]
            figures |= self.inputs.measure_held_out(samples, self.inputs.rewards.score)

        def sample(prompts: Sequence[Prompt], settings: EvaluationConfig) -> list[Sample]:
            samples = self.rollouts.sample(prompts, settings)
            judged_samples.extend((settings.name, answered) for answered in samples)
            return samples

        figures |= self.inputs.measure_sets(sample)
        return figures | {"seconds": time.perf_counter() - started}

    @property
    def asked(self) -> str:
        """The sets that `measure` asks, with their numbers of rows and answers to each."""
        sets = [f"data.eval ({counted(len(self.inputs.held_out), 'row')}, greedy)"] if self.inputs.held_out else []
        for evaluation_set in self.inputs.evaluations:
            settings = evaluation_set.settings
            how = f"temperature {settings.temperature:g}" if settings.temperature else "greedy"
            rows, answers = counted(len(evaluation_set.prompts), "row"), counted(settings.samples_per_prompt, "answer")
            sets.append(f"{settings.name} ({rows}, {answers} each, {how})")
        return ", ".join(sets)


def evaluate(
    config: Config,
    checkpoint: str | None,
    say: Callable[[str], None] | None = None,
    out: str | None = None,
    console: Console | None = None,
) -> dict[str, float]:
    """Evaluate `model.path`, or the policy saved in `checkpoint`, on `data.eval` and on every set of `evaluations`.

    Returns the figures of `evaluation` for `data.eval`, those of `set_figures` as `NAME/figure` for each set, and the seconds
    that generating and scoring took. `say` is told in lines what is measured and how far it is; a `console`
    that is a terminal shows the latter as a bar. Every judged response is a
    line of the file `out`, with its set and whether it is right; without it nothing is written. A reward model is not asked.

    Raises:
        MegarlError: anything the user can mend, as one sentence.
    """
    check_evaluates(config)
    if out is not None and Path(out).exists():
        raise ConfigError(f"--out is '{out}', which exists already; name another file")
    tell, started, judged = say or _say_nothing, time.perf_counter(), list[tuple[str, Sample]]()
    for line in (*slow_bfloat16(config.model.dtype), f"starting engines with {checkpoint or config.model.path}"):
        tell(line)
    with answering(config, checkpoint, train=False) as answers:
        tell(f"started in {time.perf_counter() - started:.1f} s; measuring {answers.asked}")
        with answers_shown(answers.rollouts.answered, tell, console):
            figures = answers.measure(judged)
            answers.inputs.take_reward_errors(tell)
    if out is not None:
        lines = (
            redacted_data(json.dumps({"set": name, "right": is_right(sample)} | sample.to_dict())) + "\n"
            for name, sample in judged
        )
        write_text_atomically(out, "".join(lines))
        tell(f"{len(judged)} judged responses written to {out}")
    return figures


def _say_nothing(text: str) -> None:
    pass


def watch(config: Config, say: Callable[[str], None], console: Console | None = None) -> None:
    """Evaluate every checkpoint of the run of `config` when it appears, until the run is finished and the last one is done.

    Each becomes a line of `evaluations.jsonl` in the run folder; steps that have one are left out. `say` is told what is done;
    a `console` that is a terminal shows meanwhile how far an evaluation is.

    Raises:
        MegarlError: anything the user can mend, as one sentence.
    """
    check_evaluates(config)
    folder = Path(config.run_folder)
    checkpoints, file = CheckpointFolder(folder / "checkpoints"), folder / "evaluations.jsonl"
    for line in mend_ends(folder, ["evaluations"]):
        say(line)
    seen = {int(row["step"]) for row in read_metrics(file)} if file.exists() else set()
    with ExitStack() as stack:
        answers: Answering | None = None
        for step, path in _new_checkpoints(checkpoints, folder / "summary.json", seen):
            try:
                checkpoints.resolve(str(path))
                if answers is None:
                    say(f"the first checkpoint is {path}: starting engines")
                    answers = stack.enter_context(answering(config, str(path), train=False))
                else:
                    answers.take(path)
            except CheckpointError:
                if path.exists():
                    raise
                say(f"step {step}: {path} was removed before it was read; raise run.keep_checkpoints")
                continue
            with answers_shown(answers.rollouts.answered, _say_nothing, console):
                figures = answers.measure()
            answers.inputs.take_reward_errors(say)
            with file.open("a") as lines:
                lines.write(json.dumps({"step": step} | figures) + "\n")
            say(f"step {step}: {evaluation_line(figures)}")


def _new_checkpoints(checkpoints: CheckpointFolder, summary: Path, seen: set[int]) -> Iterator[tuple[int, Path]]:
    """Step and folder of each checkpoint, oldest first, as they appear; ends with the run."""
    while True:
        is_finished = summary.exists()  # looked at first: what the run saved before that is there now
        new = [(step, path) for path in checkpoints.all() if (step := int(path.name.rpartition("_")[2])) not in seen]
        for step, path in new:
            seen.add(step)
            yield step, path
        if not new and is_finished:
            return
        if not new:
            time.sleep(POLL_S)


def answer(
    config: Config, checkpoint: str | None, say: Callable[[str], None] | None = None, console: Console | None = None
) -> tuple[list[Sample], list[float]]:
    """Sampled responses of `model.path`, or of the policy saved in `checkpoint`, and their rewards.

    They are `rollout.samples_per_prompt` to every row of `data.train` that is not held out. A reward model is not asked.
    `say` and `console` are told how far it is, as by `evaluate`.

    Raises:
        MegarlError: anything the user can mend, as one sentence.
    """
    tell, started = say or _say_nothing, time.perf_counter()
    for line in (*slow_bfloat16(config.model.dtype), f"starting engines with {checkpoint or config.model.path}"):
        tell(line)
    with answering(config, checkpoint, train=True) as answers:
        prompts = [prompt for part in answers.inputs.train for prompt in part]
        each = counted(config.rollout.samples_per_prompt, "response")
        tell(f"started in {time.perf_counter() - started:.1f} s; sampling {each} to each of {counted(len(prompts), 'prompt')}")
        with answers_shown(answers.rollouts.answered, tell, console):
            samples = answers.rollouts.generate(prompts)
            return samples, answers.inputs.rewards.score(samples)


@contextmanager
def answering(config: Config, checkpoint: str | None, *, train: bool) -> Iterator[Answering]:
    """Read the rows (those of `data.train` only with `train`) and start engines.

    Raises:
        MegarlError: anything the user can mend, as one sentence.
    """
    if not config.rewards and (train or config.data.eval is not None):
        raise ConfigError("an evaluation needs a source of reward: set rewards (a source may have weight 0)")
    if checkpoint is None and (field := config.other_weights) is not None:
        raise ConfigError.needs(
            field, "a checkpoint whose weights the engines get first", f"name one with --checkpoint, or remove {field}"
        )
    for without_training in functions("questions", "without_training"):
        config = without_training(config)
    folder = None
    if checkpoint is not None:
        folder = CheckpointFolder(config.run_folder).resolve(str(checkpoint_in(checkpoint) or checkpoint), "--checkpoint")
    inputs = read_inputs(config, train=train)
    with ExitStack() as stack:
        stack.callback(inputs.close)
        requests = group_requests(config)[:1] if folder is not None else []
        logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="megarl-logs-"))
        cluster = stack.enter_context(open_cluster(config, requests, logs))
        rollouts = Rollouts(config, cluster, inputs.tokenizer, inputs.episodes)
        stack.callback(rollouts.close)
        starting, roles = rollouts.begin_start(), None
        if folder is not None:
            roles = open_roles(config, cluster.start_groups(config.run.seed))
            roles.load(POLICY)
        rollouts.finish_start(starting, roles)
        answers = Answering(inputs, rollouts, roles)
        if folder is not None:
            answers.take(folder)
        yield answers
