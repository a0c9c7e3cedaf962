# `make demo` and `make test` set up everything on a machine with Python 3.11 or later; the first call installs.
.PHONY: install demo test lint
.DELETE_ON_ERROR:

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt launch/install.sh
	@launch/install.sh
	@touch $@

demo: .venv/installed
	@.venv/bin/python -m grpo.train

test: .venv/installed
	@.venv/bin/python -m pytest

lint: .venv/installed
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
