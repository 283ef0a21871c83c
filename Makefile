# Everything sets itself up: the virtual environment is made and filled when it is missing or out of date.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin

# The tests start many processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install install-locked quickstart site test test-fast test-release lint bench reliability lock audit licences release nano

install: .venv/.installed

.venv/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer is needed, none was found"; exit 4; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

.venv/.installed-test: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

.venv/.installed-bench: .venv/.installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	@touch $@

.venv/.installed-docs: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

.venv/.installed-release: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[release]'
	@touch $@

# The environment of CI, with the versions and hashes of the lock: Linux on x86-64, Python 3.11, no GPU.
install-locked:
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r release/lock.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch .venv/.installed .venv/.installed-test

site: .venv/.installed-docs
	$(BIN)/python docs/.site/build.py site

quickstart: .venv/.installed
	$(BIN)/fivetune quickstart

test: .venv/.installed-test
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not release"

test-fast: .venv/.installed-test
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not release"

test-release: .venv/.installed-test
	$(BIN)/python -m pytest -n auto --dist worksteal -m release
	$(BIN)/python -m pytest -n auto --hypothesis-profile=release tests/test_properties.py tests/training/state/test_resume.py

lint: .venv/.installed-test
	$(BIN)/ruff format fivetune recipes tests benchmarks reliability release
	$(BIN)/ruff check --fix fivetune recipes tests benchmarks reliability release
	$(BIN)/pyright

bench: .venv/.installed-bench
	$(BIN)/python -m benchmarks.data --json
	$(BIN)/python -m benchmarks.optimizers --json
	$(BIN)/python -m benchmarks.decode --json
	$(BIN)/python -m benchmarks.export --json
	for model in t5-small mt5-small; do \
	  $(BIN)/python -m benchmarks.train --device cpu --model $$model --workload squad --peers default,tuned,tuned-bf16 --json || exit; done

reliability: .venv/.installed-test
	$(BIN)/python -m reliability --release --output reliability.json --page docs/reliability.md

# Versions are a week old at least: what harms is mostly found within days.
COMPILE = $(BIN)/uv pip compile pyproject.toml --quiet --system-certs --python-version 3.11 --upgrade \
  --generate-hashes --no-annotate --no-header --no-emit-index-url --exclude-newer "7 days"
# Where the CPU build of torch lies, with which CI and the image run: a folder or an address.
WHEELS ?= $(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null)

lock: .venv/.installed-release
	@test -n "$(WHEELS)" || { echo "make lock: where is the CPU build of torch? WHEELS=FOLDER"; exit 2; }
	$(COMPILE) --universal --output-file release/runtime.txt
	$(COMPILE) --python-platform x86_64-manylinux_2_28 --extra test --find-links "$(WHEELS)" \
	  --constraint release/runtime.txt --output-file release/lock.txt
	echo hatchling | $(COMPILE) - --python-platform x86_64-manylinux_2_28 --extra serve --extra export --extra adapters \
	  --find-links "$(WHEELS)" --constraint release/lock.txt --output-file release/image.txt

# Needs the network: without its database every package "could not be audited", which --strict makes an error. The
# database knows no local versions such as +cpu.
audit: .venv/.installed-release
	sed 's/+cpu//' release/lock.txt > .venv/lock.txt
	for lock in .venv/lock.txt release/runtime.txt; do \
	  $(BIN)/pip-audit --strict --disable-pip --require-hashes --requirement $$lock || exit; done

licences: .venv/.installed-release
	$(BIN)/python -m release.licences > docs/licences.md

release: .venv/.installed-release
	$(BIN)/python -m release.build dist

nano: .venv/.installed
	$(BIN)/python -m recipes.nano runs/nano
	for stage in pretrain pretrain_2 pretrain_3; do $(BIN)/fivetune train recipes/nano/$$stage.yaml --overwrite || exit; done
	$(BIN)/python -m recipes.nano runs/nano publish
