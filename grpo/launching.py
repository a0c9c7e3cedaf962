"""One command line, several processes: PyTorch's torchelastic starts, connects, watches and restarts them.

With several machines each runs the same command. The first one, whose address is `launch.rendezvous`, keeps the store
through which they meet, and chooses the run directory.
"""

import contextlib
import errno
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from grpo.distributed import address_towards, is_launched, world_size
from grpo.errors import ConfigError, RunError
from grpo.hardware import visible_gpus
from grpo.runs.files import read_json, write_json
from grpo.runs.lock import check_directory
from grpo.runs.resume import continue_interrupted

BY_US = "GRPO_LAUNCHED"
"""Environment variable of the processes that this module has started: their run directory."""
STOPPED = 130
"""Exit status of a run that was told to stop."""
DIRECTORY = "grpo/directory"
"""Key of the store of several machines: the run directory."""


def with_processes(config: DictConfig, overrides: list[str]) -> tuple[DictConfig, list[str]]:
    """Return a configuration and its overrides with a number in place of `launch.processes=auto`.

    Raises:
        ConfigError: there is no such number.
    """
    count = config.launch.processes
    if count == "auto":
        gpus = [] if config.train.use_cpu else visible_gpus()
        count = world_size() // max(1, config.launch.nodes) if is_launched() else max(1, len(gpus))
        config, overrides = config.copy(), [*overrides, f"launch.processes={count}"]
        config.launch.processes = count
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"launch.processes={count}: a positive number, or auto for one per GPU")
    return config, overrides


def without_shard(config: DictConfig) -> DictConfig:
    """Return a configuration without `shard` where the file of `accelerate launch` says how to shard."""
    if "true" not in (os.environ.get("ACCELERATE_USE_FSDP"), os.environ.get("ACCELERATE_USE_DEEPSPEED")):
        return config
    config = config.copy()
    config.train.fsdp = config.train.fsdp_config = config.train.deepspeed = None
    return config


def check_processes(config: DictConfig) -> None:
    """Check that this machine can run as many processes, or that they are those that have been started.

    Raises:
        ConfigError: it cannot, or they are not.
    """
    count, gpus = config.launch.processes, [] if config.train.use_cpu else visible_gpus()
    if is_launched():
        if count * config.launch.nodes not in (1, world_size()):
            nodes = f"launch.nodes={config.launch.nodes} " if config.launch.nodes > 1 else ""
            raise ConfigError(
                f"{nodes}launch.processes={count}: {world_size()} processes have been started already, as by torchrun; "
                "leave it out"
            )
    elif gpus and count > len(gpus):
        raise ConfigError(f"launch.processes={count}: there are {len(gpus)} GPUs; launch.processes=auto takes them all")


def meeting_point(config: DictConfig) -> tuple[str, int]:
    """Return host and port of the first machine: of this one alone, any free port.

    Raises:
        ConfigError: they are missing or malformed.
    """
    nodes, rendezvous = config.launch.nodes, config.launch.rendezvous
    if nodes < 1:
        raise ConfigError(f"launch.nodes={nodes}: a positive number of machines")
    if nodes == 1:
        return "127.0.0.1", 0
    if not rendezvous:
        raise ConfigError(f"launch.nodes={nodes}: needs launch.rendezvous=host:port, of the first machine")
    host, _, port = rendezvous.rpartition(":")
    if not host or not (port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(f"launch.rendezvous={rendezvous}: host:port of the first machine, with a port up to 65535")
    return host.strip("[]"), int(port)


def is_first(config: DictConfig) -> bool:
    """Return whether this machine is the first of the run, or the only one.

    Raises:
        ConfigError: as `meeting_point` and `is_here`.
    """
    host, _ = meeting_point(config)
    return config.launch.nodes == 1 or is_here(host)


def is_here(host: str) -> bool:
    """Return whether an address is one of this machine's.

    Raises:
        ConfigError: there is no such host.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"launch.rendezvous: {host} cannot be found: {error.strerror}") from error
    for family, kind, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False


@functools.cache
def meet(host: str, port: int, timeout: int) -> tuple[Any, bool]:
    """Return the store of several machines, and whether this one is the first, which keeps it.

    Args:
        timeout: limit on the wait for the first one, seconds.

    Raises:
        ConfigError: the address is in use by another program.
        RunError: nobody answers there.
    """
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # it would repeat what is said here
    first, deadline = is_here(host), time.monotonic() + timeout
    if first:
        try:
            with socket.create_server(("", port)):
                pass
        except OSError as error:
            what = "in use by another program or run" if error.errno == errno.EADDRINUSE else error.strerror
            raise ConfigError(f"launch.rendezvous={host}:{port}: {what}; choose another port") from error
    else:
        wait_for_port(host, port, deadline)
    from torch.distributed import TCPStore

    left, made = max(1.0, deadline - time.monotonic()), []
    limit = timedelta(seconds=left)

    def connect() -> None:
        with contextlib.suppress(RuntimeError):
            made.append(TCPStore(host, port, is_master=first, wait_for_workers=False, timeout=limit, multi_tenant=True))

    connecting = threading.Thread(target=connect, daemon=True)  # it may wait for ever for a program of another kind
    connecting.start()
    connecting.join(left)
    if not made:
        raise RunError(f"launch.rendezvous={host}:{port}: the program that listens there is not this one")
    return made[0], first


def wait_for_port(host: str, port: int, deadline: float) -> None:
    """Wait until a program listens.

    Args:
        deadline: by the monotonic clock, seconds.

    Raises:
        RunError: none does.
    """
    begun = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline - 0.5:
                raise RunError(
                    f"launch.rendezvous={host}:{port}: nobody answers there within {deadline - begun:.0f} s "
                    f"({error.strerror or error}); start the same command on that machine too"
                ) from error
            time.sleep(0.5)


def choose_directory(config: DictConfig) -> None:
    """Set the directory of a run before Hydra writes into it; with several machines, the one of the first of them.

    Raises:
        ConfigError: it belongs to another run, or is not on this machine.
        RunError: the machines do not meet.
    """
    if is_launched():  # it is on the command line
        return
    host, port = meeting_point(config)
    store, first = meet(host, port, config.launch.timeout) if config.launch.nodes > 1 else (None, True)
    if not first:
        config.hydra.run.dir, config.hydra.output_subdir = agreed_directory(store, f"{host}:{port}"), None
        return
    continued = continue_interrupted(sys.argv[1:])
    check_directory(continued)
    if continued != sys.argv[1:]:
        config.hydra.run.dir = continued[-1].removeprefix("hydra.run.dir=")
    if store:
        chosen = Path(config.hydra.run.dir).absolute()
        chosen.mkdir(parents=True, exist_ok=True)
        store.set(DIRECTORY, str(chosen))


def agreed_directory(store: Any, first: str) -> str:
    """Return the run directory that the first machine has chosen.

    Args:
        first: its address, for messages.

    Raises:
        ConfigError: this machine does not have the directory.
        RunError: the first machine has ended.
    """
    try:
        run_dir = store.get(DIRECTORY).decode()
    except RuntimeError as error:
        raise RunError(f"launch.rendezvous={first}: that machine has chosen no run directory") from error
    if not Path(run_dir).is_dir():
        raise ConfigError(
            f"hydra.run.dir={run_dir}: chosen by {first}, and not on this machine; a run directory has to be on a file "
            "system that all machines share"
        )
    return run_dir


def launch(config: DictConfig, run_dir: Path, program: str) -> dict[str, Any]:
    """Run this command line in several processes; return the content of `summary.json`.

    Args:
        run_dir: chosen and locked by this process, or by that of the first machine.
        program: module of the command.

    Raises:
        RunError: a process failed and has said why, or died and cannot; the machines do not meet, or lose each other.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of what is no fault here
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    elastic = logging.getLogger("torch.distributed.elastic")  # it would repeat what a process said
    elastic.propagate = False
    elastic.addHandler(logging.NullHandler())
    os.environ[BY_US] = str(run_dir)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # gloo would find the dead processes' addresses in it
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // config.launch.processes)))
    own, summary = [f"hydra.run.dir='{run_dir}'", "hydra.output_subdir=null"], run_dir / "summary.json"
    if is_first(config):
        write_json(summary, {"status": "running", "reason": None})
    try:
        elastic_launch(elastic_config(config, run_dir), sys.executable)("-m", program, *sys.argv[1:], *own)
    except (ChildFailedError, SignalException, RendezvousError, DistError) as error:
        raise reported(error, config, summary) from error
    return read_json(summary)


def elastic_config(config: DictConfig, run_dir: Path) -> Any:
    """Return torchelastic's `LaunchConfig`."""
    from torch.distributed.launcher.api import LaunchConfig

    host, port = meeting_point(config)
    first = is_first(config)
    return LaunchConfig(
        min_nodes=config.launch.nodes,
        max_nodes=config.launch.nodes,
        nproc_per_node=config.launch.processes,
        run_id=run_dir.name,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{host}:{port}",
        local_addr=host if first else address_towards(host),
        rdzv_configs={"is_host": first, "join_timeout": config.launch.timeout, "read_timeout": config.launch.timeout},
        max_restarts=config.launch.max_restarts,
        monitor_interval=0.5,
        shutdown_timeout=config.launch.timeout,
    )


def reported(error: Exception, config: DictConfig, summary: Path) -> BaseException:
    """Return what ends this process after others have, and note in `summary.json` what they cannot.

    Args:
        error: of torchelastic.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

    written, again = read_json(summary), "train.resume_from_checkpoint=auto continues"
    if isinstance(error, SignalException) or written.get("status") == "stopped":
        reason = written.get("reason") or getattr(error, "sigval", signal.SIGTERM).name
        return RunError(f"stopped: {reason}; {again} it", status=STOPPED)
    knows = is_first(config) and written.get("status") == "running"
    reason = "the other machines have ended or cannot be reached"
    if isinstance(error, ChildFailedError):
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:  # it has said why itself
            return SystemExit(failure.exitcode)
        knows, reason = True, f"process {rank} was killed by {signal.Signals(-failure.exitcode).name}"
    elif isinstance(error, RendezvousTimeoutError):
        where = f"{config.launch.rendezvous} within launch.timeout={config.launch.timeout} s"
        reason = f"launch.nodes={config.launch.nodes}: not all machines came to {where}"
    if knows:
        write_json(summary, {**written, "status": "failed", "reason": reason})
    return RunError(f"failed: {reason}; {again} from the last checkpoint")
