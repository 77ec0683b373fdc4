#!/usr/bin/env bash
# What megarl needs on a machine with NVIDIA GPUs: the gpu target of the Dockerfile and apptainer.def both run this, in the folder
# that has setup.py, in an environment of Python 3.12. It wants CUDA 13's toolkit: SGLang compiles kernels as it runs.
#
# Two steps, as Transformer Engine has no wheel of the half that is compiled against torch: first everything that brings torch,
# then that half, against the very torch that stays.
set -euo pipefail
export MAX_JOBS=${MAX_JOBS:-8} PIP_NO_CACHE_DIR=1
# but for setuptools: Transformer Engine's setup.py asks for an older one than the others
constraints=$(mktemp)
grep --no-filename --invert-match '^setuptools==' requirements/constraints.txt requirements/constraints-gpu.txt >"$constraints"
transformer_engine=2.20.2

pip install --constraint "$constraints" ".[gpu,wandb]"

# what its setup.py needs; the headers of cuDNN and CUDA come with torch
pip install --constraint "$constraints" "setuptools<82" wheel packaging ninja pybind11 nvidia-cudnn-frontend
# Not a ready wheel, which would be for another torch; without expert parallelism by NCCL's own kernels, which needs NCCL's headers.
export NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_WITH_NCCL_EP=0
pip install --constraint "$constraints" --no-build-isolation "transformer-engine[core_cu13,pytorch]==$transformer_engine"
