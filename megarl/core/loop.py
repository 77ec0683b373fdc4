"""The reinforcement-learning loop: generate, reward, estimate advantages, update; as the papers write it.

Everything with a flag is behind a method of `RlRun`. GRPO, PPO and REINFORCE++ are this same loop under different names in the
config. So are its schedules: where generation does not wait for training, `generate` finds its responses made or under way.
"""

from __future__ import annotations

from typing import Any

from megarl.core.steps import RlRun


def train(run: RlRun) -> dict[str, Any]:
    """Take `run` to its last step and return the summary that is also in the run folder's `summary.json`.

    Raises:
        MegarlError: anything the user can mend, as one sentence.
    """
    with run:
        run.evaluate("before")
        while not run.finished:
            with run.next_step():
                run.sync_weights()
                samples = run.generate()
                rewards = run.score(samples)
                samples, rewards = run.replace_uniform_groups(samples, rewards)
                for attempt in run.attempts():  # one, but where ranks were lost and replaced
                    with attempt:
                        batch = run.prepare(samples)  # old and reference log-probs, values
                        run.estimate_advantages(batch, rewards)
                        for rows in run.mini_batches(batch):
                            run.update(batch, rows)  # critic and policy
            run.evaluate_if_due()
            run.report(batch)
            run.apply_guards()
            run.save_if_due()
        return run.finish()
