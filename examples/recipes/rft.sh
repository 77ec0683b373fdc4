#!/usr/bin/env bash
# RFT: sample answers, keep the right ones, train on them; prints the held-out accuracy before and after.
set -euo pipefail
cd "$(dirname "$0")/../.."
megarl="${PYTHON:-.venv/bin/python} -m megarl"
make --no-print-directory tiny-model
$megarl eval examples/recipes/rft.yaml
$megarl generate examples/recipes/rft.yaml --as sft --out runs/rft.jsonl
$megarl sft examples/recipes/rft_sft.yaml
$megarl eval examples/recipes/rft.yaml model.path=runs/rft-sft/model
