"""The meeting point of the machines of a run: a store on the first machine, which shares the run directory.

Each machine runs the same command; the first machine has the address `launch.rendezvous`.
"""

import contextlib
import errno
import functools
import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from grpo.config.batch import node_range
from grpo.rundir.directory import choose
from grpo.utils.distributed import agreed, is_launched, is_main_process
from grpo.utils.errors import ConfigError, RunError

DIRECTORY = "grpo/directory"
"""Key of the store: the run directory."""


def has_several(config: DictConfig) -> bool:
    """Return whether a run may have several machines; ConfigError if `launch.nodes` is malformed."""
    return node_range(config)[1] > 1


def meeting_point(config: DictConfig) -> tuple[str, int]:
    """Return host and port of the first machine, 0 for a machine alone; ConfigError if missing or malformed."""
    nodes, rendezvous = config.launch.nodes, config.launch.rendezvous
    if not has_several(config):
        return "127.0.0.1", 0
    if not rendezvous:
        raise ConfigError(f"launch.nodes={nodes}: needs launch.rendezvous=host:port, of the first machine")
    host, _, port = rendezvous.rpartition(":")
    if not host or not (port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(f"launch.rendezvous={rendezvous}: write host:port of the first machine, a port up to 65535")
    return host.strip("[]"), int(port)


def is_first(config: DictConfig) -> bool:
    """Return whether this machine is the first of the run, or the only one; raises as `meeting_point` and `is_here`."""
    host, _ = meeting_point(config)
    return not has_several(config) or is_here(host)


def is_here(host: str) -> bool:
    """Return whether this machine has an address; ConfigError if there is no such host."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"launch.rendezvous: {host} cannot be found: {error.strerror}") from error
    for family, kind, _, _, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False


@functools.cache
def meet(host: str, port: int, timeout: int) -> tuple[Any, bool]:
    """Return the store of several machines, and whether this machine is the first, which keeps the store.

    The other machines wait for the store, `timeout` seconds at most.

    Raises:
        ConfigError: another program uses the address.
        RunError: no machine answers at the address.
    """
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # it would repeat what is said here
    first, deadline = is_here(host), time.monotonic() + timeout
    if first:
        try:
            with socket.create_server(("", port)):
                pass
        except OSError as error:
            reason = "in use by another program or run" if error.errno == errno.EADDRINUSE else error.strerror
            raise ConfigError(f"launch.rendezvous={host}:{port}: {reason}; choose another port") from error
    else:
        wait_for_port(host, port, deadline)
    from torch.distributed import TCPStore

    left, store = max(1.0, deadline - time.monotonic()), []
    wait = timedelta(seconds=left)

    def connect() -> None:
        with contextlib.suppress(RuntimeError):
            store.append(TCPStore(host, port, is_master=first, wait_for_workers=False, timeout=wait, multi_tenant=True))

    connecting = threading.Thread(target=connect, daemon=True)  # it may wait for ever for a program of another kind
    connecting.start()
    connecting.join(left)
    if not store:
        raise RunError(f"launch.rendezvous={host}:{port}: the program that listens there is not this one")
    return store[0], first


def wait_for_port(host: str, port: int, deadline: float) -> None:
    """Wait until a program listens; RunError after `deadline`, seconds of the monotonic clock."""
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
    """Set the directory of a run before Hydra writes into it, and where the run continues; the first machine decides.

    Raises:
        ConfigError: the directory belongs to another run, or is not on this machine.
        RunError: the machines do not meet, or the first machine has ended.
    """
    if is_launched():
        if not is_main_process():
            config.hydra.output_subdir = None  # the first process writes it
        config.hydra.run.dir, config.train.resume_from_checkpoint = agreed("directory", lambda: choose(config))
        return
    host, port = meeting_point(config)
    store: Any = None
    if has_several(config):
        store, first = meet(host, port, config.launch.timeout)
    if store and not first:
        try:
            chosen = Path(store.get(DIRECTORY).decode())
        except RuntimeError as error:
            raise RunError(f"launch.rendezvous={host}:{port}: that machine has chosen no run directory") from error
        if not chosen.is_dir():
            raise ConfigError(
                f"hydra.run.dir={chosen}: chosen by {host}:{port}, and not on this machine; a run directory has to be "
                "on a file system that all machines share"
            )
        config.hydra.run.dir, config.hydra.output_subdir = str(chosen), None
        return
    config.hydra.run.dir, config.train.resume_from_checkpoint = choose(config)
    if store:
        chosen = Path(config.hydra.run.dir).absolute()
        chosen.mkdir(parents=True, exist_ok=True)
        store.set(DIRECTORY, str(chosen))
