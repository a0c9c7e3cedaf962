"""A GRPO trainer: `python -m grpo.train`, or `from grpo.trainer import ExactGRPOTrainer`."""

import os

from rewards.isolation.system import processors, quota

# OpenMP's threads spin while they wait for each other, by default long enough to use up the time slice that the awaited
# thread needs where another program has a core: benchmarks/busy.py. Read when PyTorch loads, and by child processes.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
if quota() < (os.cpu_count() or 1):  # of a container, of which PyTorch and OpenMP see the machine's processors
    os.environ.setdefault("OMP_NUM_THREADS", str(processors()))
