# syntax=docker/dockerfile:1
# Two images: `docker build --target cpu .` (slim, for laptops and CI) and `docker build --target gpu .` (clusters).
# Python packages are held by requirements/constraints.txt (and constraints-gpu.txt) and setup.py; Debian's by the release that the tag names, whose
# mirrors keep no older versions to pin.

# ---- cpu ------------------------------------------------------------------------------------------------------------
FROM python:3.12-slim-bookworm AS cpu
# make for the README's commands, gcc for torch.compile's CPU code, libnuma for SGLang's thread binding
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc g++ git libnuma1 make procps \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 megarl && install -d -o megarl /app
USER 1000
WORKDIR /app
# torch from its CPU index: the default build brings 5 GB of CUDA libraries
ARG TORCH="torch==2.13.0"
ARG TORCH_INDEX="https://download.pytorch.org/whl/cpu"
RUN python -m venv .venv && .venv/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" "$TORCH" && touch .venv/.torch
# dependencies first, so that a change of code does not install them again
COPY --chown=1000 setup.py pyproject.toml Makefile ./
COPY --chown=1000 requirements requirements
COPY --chown=1000 megarl/__init__.py megarl/__init__.py
RUN PIP_NO_CACHE_DIR=1 make venv
COPY --chown=1000 . .
# the editable install above found one file; registering again is quick and takes no network
RUN .venv/bin/pip install --quiet --no-deps --no-build-isolation -e .
ENV PATH=/app/.venv/bin:$PATH
ENTRYPOINT ["megarl"]
CMD ["doctor"]

# ---- gpu ------------------------------------------------------------------------------------------------------------
# CUDA 13's toolkit and compilers on Python 3.12; torch, NCCL, cuDNN and Transformer Engine come from requirements/install-gpu.sh.
# CI has no GPU and does not build this target.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS gpu
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends git libnuma1 procps python3.12-dev python3.12-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3.12 -m venv /opt/megarl
ENV PATH=/opt/megarl/bin:$PATH
WORKDIR /app
COPY setup.py pyproject.toml ./
COPY megarl/__init__.py megarl/__init__.py
COPY requirements/install-gpu.sh requirements/constraints.txt requirements/constraints-gpu.txt requirements/
ARG MAX_JOBS=8
RUN bash requirements/install-gpu.sh && useradd --create-home --uid 10001 megarl && chown megarl /app
COPY --chown=10001 . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e .
USER 10001
ENTRYPOINT ["megarl"]
CMD ["doctor"]
