"""Several processes from one command line: PyTorch's torchelastic starts, connects, watches and restarts them."""

import logging
import os
import shutil
import signal
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from grpo.cli import quoted
from grpo.config.batch import node_range
from grpo.launching.causes import STOPPED, first_cause
from grpo.launching.membership import machines_may_change
from grpo.launching.rendezvous import has_several, is_first, meeting_point
from grpo.rundir.files import read_json, write_json
from grpo.rundir.resume import how_to_continue
from grpo.utils.distributed import BY_US, LOST, LOST_STATUS, address_towards
from grpo.utils.errors import RunError
from rewards.isolation.system import processors

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals with which torchelastic ends its processes, unless they are ignored, as by `nohup`."""
SAME_COMMAND = "start the same command on each of them, with an address that all can reach"


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
    options, overrides = config.launch, [f"hydra.run.dir={quoted(str(run_dir))}", "hydra.output_subdir=null"]
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, processors() // options.processes)))
    (host, port), first, summary = meeting_point(config), is_first(config), run_dir / "summary.json"
    least, most = node_range(config)
    if first:
        write_json(summary, {"status": "running", "reason": None})
    several, store = has_several(config), Path(tempfile.mkdtemp()) / "store"  # one machine's is a file, not a server
    launch_config = LaunchConfig(
        min_nodes=least,
        max_nodes=most,
        nproc_per_node=options.processes,
        run_id=run_dir.name,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{host}:{port}" if several else str(store),
        local_addr=host if first else address_towards(host),
        rdzv_configs={
            "store_type": "tcp" if several else "file",
            "is_host": first,
            "join_timeout": options.timeout,
            "read_timeout": options.timeout,
        },
        max_restarts=options.max_restarts,
        monitor_interval=0.5,
        shutdown_timeout=options.timeout,
        signals_to_handle=",".join(n.name for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN),
    )
    try:
        with machines_may_change(run_dir, program) if least < most else nullcontext():
            elastic_launch(launch_config, sys.executable)("-m", program, *sys.argv[1:], *overrides)
    except (ChildFailedError, SignalException, RendezvousError, DistError) as error:
        raise reported(error, config, summary) from error
    finally:
        shutil.rmtree(store.parent)
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
        rank, failure = first_cause(error.failures)
        if failure.exitcode == LOST_STATUS:
            has_reported = written.get("status") == "failed" and written.get("reason") != LOST
            where = ", on another machine" if has_several(config) else ""
            return SystemExit(1) if has_reported else RunError(f"failed: {LOST}{where}; {again}")
        if failure.exitcode >= 0:  # the process has said why
            return SystemExit(failure.exitcode)
        knows, reason = True, f"process {rank} was killed by {signal.Signals(-failure.exitcode).name}"
    elif isinstance(error, RendezvousTimeoutError):
        where = f"{config.launch.rendezvous} within launch.timeout={config.launch.timeout} s"
        least, most = node_range(config)
        came = "not all machines came" if least == most else f"fewer than {least} machines came"
        reason, again = f"launch.nodes={config.launch.nodes}: {came} to {where}", SAME_COMMAND
    if knows:
        write_json(summary, {**written, "status": "failed", "reason": reason})
    return RunError(f"failed: {reason}; {again}")
