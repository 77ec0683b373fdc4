"""How the acceptance length of speculative decoding moves while the policy is trained, with a draft that learns and without.

    make tiny-model && python benchmarks/speculative.py --out benchmarks/results/speculative.json

The models are tiny ones of tests/families.py with the tokenizer of the tiny example: a GLM-4.5, whose layer for multi-token
prediction is random at first, and a Llama that was given such a layer by `megarl convert add-draft`. The embedded engine drafts
two tokens a pass, so that the acceptance length is between 1 and 3.
Counts do not depend on the machine's speed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers
from measured_code import code_of
from workload import ROOT, machine, versions

sys.path.insert(0, str(ROOT))

FIGURES = ("rollout/acceptance_length", "rollout/acceptance_rate", "reward/mean", "policy/mtp_loss")


def run(model: Path, seed: int, steps: int, *, train_layer: bool) -> dict[str, Any]:
    """One run, and its figures by step."""
    from megarl.config import parse_config
    from megarl.observe import read_metrics
    from megarl.trainers.rl.train import train

    terms = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = {"source": "reasoning_gym", "name": "chain_sum", "limit": 64, "args": terms}
    config = parse_config(
        {
            "run": {
                "folder": str(model.parent),
                "name": f"{model.name}-{train_layer}-{seed}",
                "steps": steps,
                "log_samples": 0,
                "seed": seed,
            },
            "model": {"path": str(model), "dtype": "float32"},
            "policy": {"optimizer": {"lr": 1e-2}, "mtp": {"train": train_layer}, "share_prefix": True},
            "data": {"train": task, "max_prompt_tokens": 96, "chat_template": "never"},
            "rollout": {
                "engine": "embedded",
                "prompts_per_step": 8,
                "samples_per_prompt": 8,
                "max_new_tokens": 12,
                "speculative": {"algorithm": "mtp", "num_steps": 2},
            },
            "rewards": [{"name": f"{ROOT}/tests/themes/e2e/digits.py:share_of_digits"}],
        }
    )
    with contextlib.redirect_stdout(io.StringIO()):
        train(config)
    rows = [row for row in read_metrics(Path(config.run_folder) / "metrics.jsonl") if row["step"]]
    by_step = {name: [round(row[name], 4) for row in rows] for name in FIGURES if name in rows[0]}
    return {"model": model.name, "layer_is_trained": train_layer, "seed": seed, **by_step}


def main() -> None:
    """Run both, and write what they say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    from megarl.option_list import part
    from tests.families import build_folder
    from tests.predicting import build_predicting

    runs = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_predicting("glm4_moe", folder / "glm4_moe")
        build_folder("llama", folder / "plain")
        part("prediction", "new_layer", "this benchmark").add_layer(folder / "plain", folder / "llama")
        for model, seed in itertools.product((folder / "glm4_moe", folder / "llama"), range(given.seeds)):
            transformers.AutoTokenizer.from_pretrained(ROOT / "models/tiny-arithmetic").save_pretrained(model)
            for train_layer in (True, False):
                runs.append(run(model, seed, given.steps, train_layer=train_layer))
                lengths = runs[-1]["rollout/acceptance_length"]
                which = f"{model.name}, seed {seed}, layer {'trained' if train_layer else 'kept'}"
                print(f"{which}: {lengths[0]:.2f} tokens a pass at first, {lengths[-1]:.2f} at the end", flush=True)
    setup = {"machine": machine(), "versions": versions(), "code": code_of("speculative")}
    given.out.write_text(json.dumps(setup | {"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
