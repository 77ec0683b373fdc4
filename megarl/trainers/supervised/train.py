"""The loop of training on given responses, whatever the objective: SFT, reward models, preferences."""

from __future__ import annotations

from typing import Any

from megarl.config import SupervisedConfig
from megarl.runs.owner import owned
from megarl.runs.resuming import refuse_changes
from megarl.system.torchrun import is_leader
from megarl.trainers.supervised.run import SupervisedRun


def train(config: SupervisedConfig) -> dict[str, Any]:
    """Run `config` to its last step and return the summary that is also in the run folder's `summary.json`.

    Under torchrun every rank calls this; rank 0 writes the files.

    Raises:
        MegarlError: anything the user can mend, as one sentence.
    """
    with owned(config, leads=is_leader()):
        refuse_changes(config)
        return _train(config)


def _train(config: SupervisedConfig) -> dict[str, Any]:
    with SupervisedRun(config, leads=is_leader()) as run:
        run.evaluate("before")
        while not run.finished:
            with run.next_step():
                batch = run.next_batch()
                run.update(batch)
            run.evaluate_if_due()
            run.report(batch)
            run.apply_guards()
            run.save_if_due()
        return run.finish()
