#!/usr/bin/env bash
# Iterative RPO: each iteration samples pairs from the model of the last one and starts from it (docs/methods.md#rpo-term).
set -euo pipefail
cd "$(dirname "$0")/../.."
megarl="${PYTHON:-.venv/bin/python} -m megarl"
make --no-print-directory tiny-model
model=models/tiny-arithmetic
$megarl eval examples/recipes/rft.yaml model.path=$model
for iteration in 1 2; do
  $megarl generate examples/recipes/rft.yaml model.path=$model run.seed=$iteration --as pairs --out runs/rpo-$iteration.jsonl
  $megarl preference examples/recipes/rpo.yaml model.path=$model data.train.path=runs/rpo-$iteration.jsonl run.name=rpo-$iteration
  model=runs/rpo-$iteration/model
  $megarl eval examples/recipes/rft.yaml model.path=$model
done
