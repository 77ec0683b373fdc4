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
# NVIDIA's PyTorch image: CUDA 13, Python 3.12, and a torch with the transformer-engine and apex that were built for it.
FROM nvcr.io/nvidia/pytorch:25.10-py3 AS gpu
RUN useradd --create-home --uid 10001 megarl && install -d -o megarl /app
WORKDIR /app
COPY setup.py pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY megarl megarl
# The image's torch, transformer-engine and apex belong together: pip may not replace them (its own constraint file pins
# them), so SGLang comes without its pins, and its kernels by name.
RUN pip install --no-cache-dir ".[sglang,wandb]" \
 && pip install --no-cache-dir --no-deps sglang==0.5.23 compressed-tensors==0.18.0 gguf xgrammar==0.2.7 \
 && pip install --no-cache-dir --no-deps sgl-kernel flashinfer-python \
 && python -c "import torch; assert torch.version.cuda, 'the CUDA build of torch was replaced'"
COPY --chown=megarl . .
USER megarl
ENTRYPOINT ["megarl"]
CMD ["doctor"]
