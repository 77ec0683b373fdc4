#!/usr/bin/env bash
# R1-Onevision in two stages: supervised on reasoning, then GRPO from what that leaves.
set -euo pipefail
cd "$(dirname "$0")/../.."
megarl="${PYTHON:-.venv/bin/python} -m megarl"
$megarl sft examples/vision/r1_onevision_sft.yaml
$megarl train examples/vision/r1_onevision_grpo.yaml
