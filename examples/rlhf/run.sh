#!/usr/bin/env bash
# The classical four-model RLHF on a CPU: demonstrations, a learned reward model, PPO with critic and reference.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
[ -e models/tiny-untrained ] || "$python" tools/model/tiny.py models/tiny-untrained --untrained
"$python" -m megarl sft examples/rlhf/sft.yaml
"$python" -m megarl reward-model examples/rlhf/reward_model.yaml
"$python" -m megarl train examples/rlhf/ppo.yaml
