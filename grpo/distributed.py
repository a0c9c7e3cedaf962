"""Processes of a run, as `torchrun`, `accelerate launch` or Slurm started them: only this module reads their number."""

import os


def is_launched() -> bool:
    """Return whether a launcher has started this process and chooses its GPU."""
    return any(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def world_size() -> int:
    """Return the number of processes that train."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int | None:
    """Return the number of those on this machine; None if no launcher says."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in os.environ else None


def is_main_process() -> bool:
    """Return whether this process is the first of all."""
    return os.environ.get("RANK", "0") == "0"
