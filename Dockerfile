# syntax=docker/dockerfile:1
# Two images: `docker build --target cpu .` (slim, for laptops and CI) and `docker build --target gpu .` (clusters).

# ---- cpu ------------------------------------------------------------------------------------------------------------
FROM python:3.11-slim-bookworm AS cpu
# make for the README's commands, gcc for torch.compile's CPU code, libnuma for SGLang's thread binding
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc g++ git libnuma1 make procps \
 && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 megarl && install -d -o megarl /app
USER megarl
WORKDIR /app
# torch from its CPU index: the default build brings 5 GB of CUDA libraries
ARG TORCH="torch==2.13.0"
ARG TORCH_INDEX="https://download.pytorch.org/whl/cpu"
RUN python -m venv .venv && .venv/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" "$TORCH" && touch .venv/.torch
# dependencies first, so that a change of code does not install them again
COPY --chown=megarl setup.py pyproject.toml Makefile ./
COPY --chown=megarl requirements requirements
COPY --chown=megarl megarl/__init__.py megarl/__init__.py
RUN PIP_NO_CACHE_DIR=1 make venv
COPY --chown=megarl . .
# the editable install above found one file; registering again is quick and takes no network
RUN .venv/bin/pip install --quiet --no-deps --no-build-isolation -e .
ENV PATH=/app/.venv/bin:$PATH
ENTRYPOINT ["megarl"]
CMD ["doctor"]

# ---- gpu ------------------------------------------------------------------------------------------------------------
# NVIDIA's PyTorch image for its CUDA 13 toolkit, cuDNN, NCCL and compilers on Python 3.12. Its own torch is replaced by the
# one that SGLang's kernels are built for, so transformer-engine and apex are built again, against that one: a process
# has a single torch. CI has no GPU and does not build this target.
FROM nvcr.io/nvidia/pytorch:25.10-py3 AS gpu
# the image's constraint file holds every package at its own version, torch included
ENV PIP_CONSTRAINT="" PIP_NO_CACHE_DIR=1
RUN pip uninstall --yes torch torchvision torchaudio triton transformer-engine apex flash-attn
WORKDIR /app
COPY setup.py pyproject.toml ./
COPY megarl/__init__.py megarl/__init__.py
RUN pip install ".[sglang,wandb]" sglang==0.5.23
ARG MAX_JOBS=8
ARG APEX=25.09
RUN pip install --no-build-isolation "transformer-engine[pytorch]>=2.8,<3" \
 && git clone --quiet --depth 1 --branch "$APEX" https://github.com/NVIDIA/apex /tmp/apex \
 && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation /tmp/apex \
 && rm -rf /tmp/apex
RUN useradd --create-home --uid 10001 megarl && chown megarl /app
COPY --chown=megarl . .
RUN pip install --no-deps --no-build-isolation -e .
USER megarl
ENTRYPOINT ["megarl"]
CMD ["doctor"]
