# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
# Where plain pip would fetch torch's CUDA build, name PyTorch's CPU index:
#   make demo TORCH_INDEX=<address of PyTorch's CPU wheels>
TORCH_INDEX ?=
PIP_TORCH := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),)

.PHONY: demo serve test soak lint format protos check-protos install install-dev model clean

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

protos:
	$(BIN)/python -m scripts.protos

clean:
	rm -rf $(VENV) .cache
