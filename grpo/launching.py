"""One command line, several processes: PyTorch's torchelastic starts, connects, watches and restarts them."""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from grpo.distributed import is_launched, world_size
from grpo.errors import ConfigError, RunError
from grpo.hardware import visible_gpus
from grpo.runs.files import read_json, write_json

BY_US = "GRPO_LAUNCHED"
"""Environment variable of the processes that this module has started."""


def with_processes(config: DictConfig, overrides: list[str]) -> tuple[DictConfig, list[str]]:
    """Return a configuration and its overrides with a number in place of `launch.processes=auto`.

    Raises:
        ConfigError: there is no such number.
    """
    count = config.launch.processes
    if count == "auto":
        gpus = [] if config.train.use_cpu else visible_gpus()
        count = world_size() if is_launched() else max(1, len(gpus))
        config, overrides = config.copy(), [*overrides, f"launch.processes={count}"]
        config.launch.processes = count
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"launch.processes={count}: a positive number, or auto for one per GPU")
    return config, overrides


def check_processes(config: DictConfig) -> None:
    """Check that this machine can run as many processes, or that they are those that have been started.

    Raises:
        ConfigError: it cannot, or they are not.
    """
    count, gpus = config.launch.processes, [] if config.train.use_cpu else visible_gpus()
    if is_launched():
        if count not in (1, world_size()):
            raise ConfigError(
                f"launch.processes={count}: {world_size()} processes have been started already, as by torchrun; leave "
                "it out"
            )
    elif gpus and count > len(gpus):
        raise ConfigError(f"launch.processes={count}: there are {len(gpus)} GPUs; launch.processes=auto takes them all")


def launch(config: DictConfig, run_dir: Path, program: str) -> dict[str, Any]:
    """Run this command line in several processes; return the content of `summary.json`.

    Args:
        run_dir: chosen and locked by this process.
        program: module of the command.

    Raises:
        RunError: a process failed and has said why, or died and cannot.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it would repeat what a process said
    os.environ[BY_US] = "1"
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # gloo would find the dead processes' addresses in it
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of what is no fault here
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // config.launch.processes)))
    launch_config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.launch.processes,
        run_id=run_dir.name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        rdzv_configs={"timeout": config.launch.timeout},
        max_restarts=config.launch.max_restarts,
        monitor_interval=0.5,
        shutdown_timeout=config.launch.timeout,
    )
    own = [f"hydra.run.dir='{run_dir}'", "hydra.output_subdir=null"]
    summary = run_dir / "summary.json"
    try:
        elastic_launch(launch_config, sys.executable)("-m", program, *sys.argv[1:], *own)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode < 0:  # it could not say so itself
            reason = f"process {failure.local_rank} was killed by {signal.Signals(-failure.exitcode).name}"
            write_json(summary, {**read_json(summary), "status": "failed", "reason": reason})
            again = "train.resume_from_checkpoint=auto continues from the last checkpoint"
            raise RunError(f"failed: {reason}; {again}") from error
        raise SystemExit(failure.exitcode) from error
    except SignalException as error:
        reason = read_json(summary).get("reason") or f"{error.sigval.name}"
        raise RunError(f"stopped: {reason}; train.resume_from_checkpoint=auto continues it", status=130) from error
    return read_json(summary)
