#!/usr/bin/env bash
# Supervised training, then reinforcement learning, of a model that sees, on a CPU: R1-Onevision's two stages in small. The KL to
# the first stage keeps alive what its model hardly ever answers: without it one of the five counts is lost in some runs.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
[ -e models/tiny-vision-untrained ] || "$python" tools/model/tiny_vision.py models/tiny-vision-untrained --untrained
"$python" -m megarl sft examples/vision/count_sft.yaml
"$python" -m megarl train examples/vision/count.yaml run.name=count-after-sft model.path=runs/count-sft/model algorithm.kl.coef=0.02
