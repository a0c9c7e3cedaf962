"""A GRPO trainer: `python -m grpo.train`, or `from grpo.trainer import ExactGRPOTrainer`."""

import locale
import os
import sys
from typing import Any

if sys.argv[:1] == ["-m"]:  # a command starts
    if locale.getencoding().lower() != "utf-8" and not sys.flags.utf8_mode:
        # all libraries and processes of a run read files as the locale has it, which may know no letter but ours
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):
        # Python looks into the current folder first, where `rewards.py` or `datasets.py` is a file of the user
        sys.path.append(sys.path.pop(0))

from rewards.isolation.system import processors, quota

# OpenMP's threads spin while they wait for each other, by default long enough to use up the time slice that the awaited
# thread needs where another program has a core. Fewer turns help busy machines and cost others, on some of which steps
# take twice as long with 1,000 (measured at 62e4013). Read when PyTorch loads, and by child processes.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
if quota() < (os.cpu_count() or 1):  # of a container, of which PyTorch and OpenMP see the machine's processors
    os.environ.setdefault("OMP_NUM_THREADS", str(processors()))


def __getattr__(name: str) -> Any:
    """Return `grpo.Page`, the callback that writes the page of a script: its libraries take seconds."""
    if name == "Page":
        from grpo.extras.page.callback import Page

        return Page
    raise AttributeError(f"module 'grpo' has no attribute {name!r}")
