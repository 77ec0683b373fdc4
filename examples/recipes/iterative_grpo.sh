#!/usr/bin/env bash
# Iterative GRPO: policy and reward model take turns; each iteration's reference is the policy it starts from. Starts from what
# examples/rlhf/run.sh leaves.
set -euo pipefail
cd "$(dirname "$0")/../.."
megarl="${PYTHON:-.venv/bin/python} -m megarl"
[ -e runs/rlhf-reward-model/model ] || examples/rlhf/run.sh
model=runs/rlhf-sft/model reward=runs/rlhf-reward-model/model
for iteration in 1 2; do
  $megarl train examples/recipes/iterative_grpo.yaml model.path=$model reward_model.path=$reward run.name=iterative-grpo-$iteration
  [ $iteration = 2 ] && break
  model=runs/iterative-grpo-$iteration/model
  pairs=runs/iterative-grpo-pairs-$iteration.jsonl
  $megarl generate examples/recipes/iterative_grpo.yaml model.path=$model rollout.temperature=1.5 data.train.limit=300 --as pairs --out $pairs
  $megarl reward-model examples/recipes/continue_reward_model.yaml model.path=$reward
  reward=runs/continue-reward-model/model
done
