"""Processes of a run under torchelastic, `accelerate launch` or Slurm; only this module reads rank and world size.

Rank 0 shares its decisions with the others through the store of PyTorch's rendezvous.
"""

import contextlib
import functools
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import psutil

from grpo.utils.errors import ConfigError

T = TypeVar("T")
BY_US = "GRPO_LAUNCHED"
"""Environment variable of the processes that `grpo.launching` has started: their run directory."""
LAUNCHER = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that each launcher sets."""
LOST = "lost the connection to another process"
"""Reason of a failure that is none of this process's."""
LOST_STATUS = 75
"""Exit status of a process that ends because another has failed or died."""
LOSSES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection timed out",
    "Broken pipe",
    "remote process exited",
)
"""Messages of gloo and NCCL in an operation after another process has died, or its machine has fallen silent."""
FAILED = "failed"
"""Key of the store: how many processes have failed; with `/reason`, why the first of them did."""


def check_launcher() -> None:
    """Check that a launcher has set all of its variables, or none: some may be left of an earlier job.

    Raises:
        ConfigError: some are set, with which this process would wait for others, or write nothing.
    """
    numbers = {name: os.environ[name] for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK") if name in os.environ}
    missing = [name for name in LAUNCHER if name not in os.environ]
    wrong = [name for name, value in numbers.items() if not value.isdecimal()]
    if wrong or (missing and numbers.items() - {("WORLD_SIZE", "1"), ("RANK", "0")}):
        shown = ", ".join(f"{name}={value}" for name, value in numbers.items())
        rest = f"without {', '.join(missing)}" if missing else f"and {wrong[0]} is no number"
        raise ConfigError(
            f"{shown} {rest}: the environment has this, perhaps of an earlier job, and no launcher has started this "
            f"process; `unset {' '.join(numbers)}`, or start it with torchrun or launch.processes=…"
        )


def is_launched() -> bool:
    """Return whether a launcher has started this process and chooses its GPU."""
    return any(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def world_size() -> int:
    """Return the number of processes that train."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int | None:
    """Return the number of processes on this machine; None without a launcher."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if is_launched() and "LOCAL_WORLD_SIZE" in os.environ else None


def machines() -> int:
    """Return the number of machines that train, among processes that torchelastic has started."""
    return int(os.environ["GROUP_WORLD_SIZE"])


def has_other_machines() -> bool:
    """Return whether processes on other machines train, too."""
    return local_world_size() not in (None, world_size())


def rank() -> int:
    """Return the number of this process among those that train."""
    return int(os.environ.get("RANK", "0"))


def is_main_process() -> bool:
    """Return whether this process is the first of all."""
    return rank() == 0


def restarts() -> int:
    """Return how often all processes have been started again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if is_launched() else 0


def own_name(file: str) -> str:
    """Return the name of a file as this process writes it: `train.log` is rank 0's, `train.1.log` rank 1's."""
    stem, _, suffix = file.rpartition(".")
    return file if is_main_process() else f"{stem}.{rank()}.{suffix}"


def log_name() -> str:
    """Return the name of the log of this process."""
    return own_name("train.log")


def address_towards(host: str) -> str:
    """Return the address that this machine has for another; OSError if there is no way to it."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def choose_interface() -> None:
    """Let gloo and NCCL use the network interface towards rank 0, unless the user has named an interface.

    gloo would take the interface of this machine's name, which other machines may not reach.
    """
    if not has_other_machines():
        return
    with contextlib.suppress(OSError):
        address = address_towards(os.environ["MASTER_ADDR"])
        for name, addresses in psutil.net_if_addrs().items():
            if address in [each.address for each in addresses] and not address.startswith("127."):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def end_silent_connections(limit: float) -> None:
    """Let the system end connections to machines that are silent for `limit` seconds, as after a loss of power.

    It does so after hours, else. The libraries that wait for such a machine get an error then. See TCP_USER_TIMEOUT in
    tcp(7).
    """

    def watch() -> None:
        options = [
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(limit / 4))),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(limit / 4))),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * limit)),
        ]
        while True:
            for connection in psutil.Process().net_connections("tcp"):  # libraries open more of them at any time
                if connection.raddr:
                    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as copy:
                        for option in options:
                            copy.setsockopt(*option)
            time.sleep(limit / 4)

    threading.Thread(target=watch, daemon=True).start()


@functools.cache
def store() -> Any:
    """Return the store that all processes share; rank 0 or its launcher keeps it.

    A launcher's store survives a restart of all processes, after which they must not read earlier decisions. Rank 0's
    store does not survive it, and the launchers of several machines may count restarts differently.
    """
    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    shared, _, _ = next(rendezvous("env://"))
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return PrefixStore(f"grpo/{restarts() if of_launcher else 0}", shared)


def agreed(name: str, choose: Callable[[], T]) -> T:
    """Return rank 0's choice on every process, once per name; JSON values only.

    Raises:
        ConfigError: rank 0 has raised it.
    """
    if world_size() == 1:
        return choose()
    if not is_main_process():
        error, value = json.loads(store().get(name))
        if error:
            raise ConfigError(error)
        return value
    try:
        value = choose()
    except ConfigError as error:
        store().set(name, json.dumps([str(error), None]))
        raise
    store().set(name, json.dumps([None, value]))
    return value


def is_loss(error: BaseException) -> bool:
    """Return whether an error means that another process has died."""
    if world_size() == 1 or not any(text in str(error) for text in LOSSES):
        return False
    from torch.distributed import DistError

    return type(error) is RuntimeError or isinstance(error, DistError)  # not one of ours, as of a vLLM server


def is_first_to_fail(reason: str) -> bool:
    """Record the failure of this process; return whether it is the first failure, whose reason is printed.

    The store may be gone with the process that kept it, rank 0 or its launcher, which has printed its reason. For a
    process that died, the launcher prints the signal.
    """
    if world_size() == 1:
        return True
    if LOST in reason and BY_US in os.environ:
        return False
    try:
        shared = store()
        shared.set_timeout(timedelta(seconds=5))
        if shared.add(FAILED, 1) > 1:
            return False
        shared.set(f"{FAILED}/reason", reason)
    except Exception:
        return is_main_process()
    return True


def first_failure() -> str | None:
    """Return why another process has failed; None if none has, or if nobody can say."""
    if world_size() > 1:
        with contextlib.suppress(Exception):
            key = f"{FAILED}/reason"
            if store().check([key]):
                return store().get(key).decode()
    return None


def any_of(flag: bool) -> bool:
    """Return whether a flag is set on any process."""
    return any(gathered([flag]))


def gathered(rows: list[Any]) -> list[Any]:
    """Return the rows of all processes, in the order of their ranks."""
    if world_size() == 1:
        return rows
    from torch.distributed import all_gather_object

    everyone: list[Any] = [None] * world_size()
    all_gather_object(everyone, rows)
    return [row for of_process in everyone for row in of_process]
