# `make demo` and `make test` need Python 3.11, make and a C++ compiler; the rest comes with them.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# Where plain pip would fetch torch's CUDA build, name PyTorch's CPU index:
#   make demo TORCH_INDEX=<address of PyTorch's CPU wheels>
TORCH_INDEX ?=
TORCH := $(shell grep '^torch==' constraints.txt)

# Models are kept here, apart from the user's own cache.
export NORIA_CACHE_DIR ?= $(CURDIR)/.cache

.PHONY: demo serve test test-gpu soak bench-engine bench-quick bench-sampler bench-scheduler bench-prefix-cache \
	bench-startup lint format protos docs model install install-dev clean

demo: install
	$(BIN)/noria demo

# make serve ARGS="--workers 2"
serve: install
	$(BIN)/noria up $(ARGS)

test: install-dev model
	$(BIN)/python -m pytest -m "not soak" $(ARGS)

soak: install-dev model gemma
	$(BIN)/python -m pytest -m soak $(ARGS)

# On a machine with a GPU: proves and measures what the worker does there, in four minutes. It needs
# torch, triton, numpy and safetensors, and installs nothing; ARGS="--device cpu --tiny" tries it.
test-gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,"$(PYTHON)") -m bench.gpu $(ARGS)

# This copy against the commit before it; ARGS="--rounds 5" and the like.
bench-quick: install-dev model
	$(BIN)/noria bench quick $(ARGS)

# Where the time goes from `noria up` to ready.
bench-startup: install model
	$(BIN)/python -m bench.startup $(ARGS)

# make bench-engine ARGS="--backend avx2 --batch 1"
bench-engine: install model
	$(BIN)/python -m bench.engine $(ARGS)

# make bench-scheduler ARGS="--running 64"
bench-scheduler: install
	$(BIN)/python -m bench.scheduler $(ARGS)

# What choosing tokens costs, by kind of request; ARGS="--threads 2" and the like.
bench-sampler: install-dev
	$(BIN)/python -m bench.sampler $(ARGS)

# What a known prefix saves: time to the first token, not the pace after it.
bench-prefix-cache: install model
	$(BIN)/python -m bench.prefix_cache "$(NORIA_CACHE_DIR)"/models/SmolLM2*.gguf $(ARGS)

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python -m scripts.protos --check
	$(BIN)/python -m scripts.api_docs --check
	$(BIN)/python -m scripts.operations_docs --check

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: install-dev
	$(BIN)/python -m scripts.protos

docs: install-dev
	$(BIN)/python -m scripts.api_docs
	$(BIN)/python -m scripts.operations_docs

model: install
	$(BIN)/noria fetch

.PHONY: gemma
gemma: install
	$(BIN)/noria fetch gemma-3-270m

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

clean:
	rm -rf $(VENV) .cache

# Installed once, and again when one of these changes.
INSTALL_INPUTS := pyproject.toml constraints.txt Makefile

define install_extra
	@echo "Installing into $(VENV), what is not there yet:"
	@echo "  $(TORCH): about 200 MB as a CPU build; several GB as the CUDA build that plain pip"
	@echo "    fetches on Linux. TORCH_INDEX=<PyTorch's CPU index> chooses the CPU build."
	@echo "  $(2)"
	@echo "The demo model, when first needed: 93 MB."
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(if $(TORCH_INDEX),$(PIP) install --no-deps --index-url "$(TORCH_INDEX)" "$(TORCH)")
	$(PIP) install --constraint constraints.txt setuptools
	$(PIP) install --constraint constraints.txt --no-build-isolation --editable ".[$(1)]"
endef

$(VENV)/.installed: $(INSTALL_INPUTS)
	$(call install_extra,all,numpy$(COMMA) grpcio$(COMMA) tokenizers and some 40 smaller packages: about 60 MB.)
	@touch $@

# Everything of the plain install is in it.
$(VENV)/.installed-dev: $(INSTALL_INPUTS)
	$(call install_extra,dev,numpy$(COMMA) grpcio$(COMMA) transformers$(COMMA) mypy$(COMMA) ruff and some 60 smaller packages: about 150 MB; on Linux triton: 290 MB.)
	@touch $(VENV)/.installed $@

COMMA := ,
