#!/usr/bin/env bash
# Builds the wheel of transformer_engine_torch, which PyPI has as source alone, and prints its path. Neither a GPU nor an
# installed CUDA toolkit is needed: it is C++ against torch's headers, and nvcc, asked only for its version, comes from PyPI.
#
#     bash requirements/build-transformer-engine.sh FOLDER      (Python 3.12 as PYTHON; 8 GB; about half an hour on two cores)
#
# The wheel works under the torch that it was built with, on glibc as new as this machine's.
set -euo pipefail
folder=$(mkdir -p "${1:?a folder to work in}" && cd "$1" && pwd)
version=2.20.2 torch=2.11.0 cuda=13.0
python=$folder/venv/bin/python
wheel=$(find "$folder" -maxdepth 1 -name "transformer_engine_torch-$version-*.whl")
if [ -n "$wheel" ]; then
  echo "$wheel"
  exit
fi
exec 3>&1 1>&2 # only the path goes to stdout

[ -x "$python" ] || "${PYTHON:-python3.12}" -m venv "$folder/venv"
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install "torch==$torch" numpy "setuptools<82" wheel packaging ninja pybind11
pip install --no-deps "nvidia-cuda-nvcc==$cuda.*" "nvidia-nvvm==$cuda.*" "nvidia-cuda-crt==$cuda.*" "nvidia-cuda-cccl==$cuda.*" \
  nvidia-cudnn-frontend

CUDA_HOME=$("$python" -c 'import nvidia; print(list(nvidia.__path__)[0])')/cu${cuda%%.*}
export CUDA_HOME
export PATH=$folder/venv/bin:$CUDA_HOME/bin:$PATH
export NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_CUDA_ARCHS=90
export NVTE_WITH_NCCL_EP=0 # expert parallelism by NCCL's own kernels, which needs its headers
export MAX_JOBS=${MAX_JOBS:-2}
export NVTE_BUILD_MAX_JOBS=$MAX_JOBS
pip download --no-deps --no-build-isolation --no-binary=:all: --dest "$folder" "transformer_engine_torch==$version"
tar --extract --gzip --file "$folder/transformer_engine_torch-$version.tar.gz" --directory "$folder"
(cd "$folder/transformer_engine_torch-$version" && "$python" setup.py --quiet bdist_wheel --dist-dir "$folder")
find "$folder" -maxdepth 1 -name "transformer_engine_torch-$version-*.whl" >&3
