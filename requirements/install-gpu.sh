#!/usr/bin/env bash
# What megarl needs on top of NVIDIA's PyTorch image: the gpu target of the Dockerfile and apptainer.def both run this, in the
# folder that has setup.py. The image's torch is replaced by the one that SGLang's kernels are built for, so transformer-engine
# and apex are built again, against that one: a process has a single torch.
set -euo pipefail
apex=${APEX:-25.09}
export MAX_JOBS=${MAX_JOBS:-8}
# the image's constraint file holds every package at its own version, torch included
export PIP_CONSTRAINT="" PIP_NO_CACHE_DIR=1

pip uninstall --yes torch torchvision torchaudio triton transformer-engine apex flash-attn
pip install ".[sglang,wandb]" sglang==0.5.23
pip install --no-build-isolation "${TRANSFORMER_ENGINE:-transformer-engine[pytorch]==2.20.2}"
git clone --quiet --depth 1 --branch "$apex" https://github.com/NVIDIA/apex /tmp/apex
APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation /tmp/apex
rm -rf /tmp/apex
