"""Several processes from one command line: PyTorch's torchelastic starts, connects, watches and restarts them."""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from grpo.launching.rendezvous import is_first, meeting_point
from grpo.rundir.files import read_json, write_json
from grpo.rundir.resume import how_to_continue
from grpo.utils.distributed import BY_US, LOST, address_towards
from grpo.utils.errors import RunError

SAME_COMMAND = "start the same command on each of them, with an address that all can reach"
STOPPED = 130
"""Exit status of a stopped run."""
SIGTERM_TO_SIGKILL = 30
"""Seconds that torchelastic gives the processes of a machine after a process has failed; it has no option."""


def launch(config: DictConfig, run_dir: Path, program: str) -> dict[str, Any]:
    """Run this command line in several processes; return the content of `summary.json`.

    Args:
        run_dir: directory, chosen and locked by this process or by the first machine's.
        program: module of the command.

    Raises:
        RunError: a process failed or died; the machines do not meet, or lose each other.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of what is no fault here
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    elastic = logging.getLogger("torch.distributed.elastic")  # it would repeat what a process said
    elastic.propagate = False
    elastic.addHandler(logging.NullHandler())
    os.environ[BY_US] = str(run_dir)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # gloo would find the dead processes' addresses in it
    options, own = config.launch, [f"hydra.run.dir='{run_dir}'", "hydra.output_subdir=null"]
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // options.processes)))
    (host, port), first, summary = meeting_point(config), is_first(config), run_dir / "summary.json"
    if first:
        write_json(summary, {"status": "running", "reason": None})
    how = LaunchConfig(
        min_nodes=options.nodes,
        max_nodes=options.nodes,
        nproc_per_node=options.processes,
        run_id=run_dir.name,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{host}:{port}",
        local_addr=host if first else address_towards(host),
        rdzv_configs={"is_host": first, "join_timeout": options.timeout, "read_timeout": options.timeout},
        max_restarts=options.max_restarts,
        monitor_interval=0.5,
        shutdown_timeout=options.timeout,
    )
    try:
        elastic_launch(how, sys.executable)("-m", program, *sys.argv[1:], *own)
    except (ChildFailedError, SignalException, RendezvousError, DistError) as error:
        raise reported(error, config, summary) from error
    return read_json(summary)


def reported(error: Exception, config: DictConfig, summary: Path) -> BaseException:
    """Return the exception for an error of torchelastic, and complete `summary.json` for processes that could not."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

    written, again = read_json(summary), how_to_continue(summary.parent)
    codes = [failure.exitcode for failure in error.failures.values()] if isinstance(error, ChildFailedError) else []
    if isinstance(error, SignalException) or (
        written.get("status") == "stopped" and set(codes) <= {STOPPED, -signal.SIGTERM}
    ):
        reason = written.get("reason") or getattr(error, "sigval", signal.SIGTERM).name
        return RunError(f"stopped: {reason}; {again}", status=STOPPED)
    knows = is_first(config) and written.get("status") == "running"
    reason = "the other machines have ended or cannot be reached"
    if isinstance(error, ChildFailedError):
        rank, failure = first_cause(error)
        if failure.exitcode >= 0:
            said = written.get("status") == "failed" and written.get("reason") != LOST
            if config.launch.nodes == 1 or said or failure.exitcode != 1:  # by the process itself
                return SystemExit(failure.exitcode)
            return RunError(f"failed: {LOST}, on another machine; {again}")
        knows, reason = True, f"process {rank} was killed by {signal.Signals(-failure.exitcode).name}"
    elif isinstance(error, RendezvousTimeoutError):
        where = f"{config.launch.rendezvous} within launch.timeout={config.launch.timeout} s"
        reason, again = f"launch.nodes={config.launch.nodes}: not all machines came to {where}", SAME_COMMAND
    if knows:
        write_json(summary, {**written, "status": "failed", "reason": reason})
    return RunError(f"failed: {reason}; {again}")


def first_cause(error: Any) -> tuple[int, Any]:
    """Return rank and failure of the process that failed first in a `ChildFailedError`.

    A killed process reports nothing, and the others lose their connections to it. They then get SIGTERM, and SIGKILL if
    SIGTERM does not end them.
    """
    first = min(failure.timestamp for failure in error.failures.values())

    def order(one: tuple[int, Any]) -> tuple[int, int]:
        code, seconds = one[1].exitcode, one[1].timestamp - first
        ended_for_it = code == -signal.SIGTERM or (code == -signal.SIGKILL and seconds >= SIGTERM_TO_SIGKILL - 1)
        return (1 if code >= 0 else 2 if ended_for_it else 0), one[1].timestamp

    return min(error.failures.items(), key=order)
