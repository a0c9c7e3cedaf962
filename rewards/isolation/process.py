"""A process with functions of the user, as the process that starts and ends it sees it."""

import contextlib
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from rewards.isolation.system import MARK, is_zombie

IMPORT_LIMIT = 300.0
"""Limit on the import of functions, seconds."""
SEND_LIMIT = 60
"""Limit on sending the arguments of a call, seconds."""
END_LIMIT = 5
"""Limit on the end of a process and of all that it has started, seconds."""
GRACE = 1.0
"""Time for a process to end itself after the limit of a call, seconds."""


def check_system() -> None:
    """Check that processes with functions of the user can be started, kept in view and ended here.

    Raises:
        ValueError: they cannot.
    """
    if sys.platform not in ("linux", "darwin"):
        system = {"win32": "Windows"}.get(sys.platform, sys.platform)
        raise ValueError(
            f"training, rewards and tools need Linux or macOS, and this is {system}: use WSL2, a container or a server"
        )


class Process:
    """A process that loads functions of the user and calls them; they may raise, hang, die and start processes.

    Args:
        module: run by `python -m`, with the number of this process, a file descriptor of the connection, and the
            inherited descriptors; it calls `supervise`, loads `named`, replies with a problem or None, and with a
            description.
        named: the names to load.
        place: the key of these names in the configuration, for messages.
        output: file for the output of the process; None is the output of this process.
        inherited: further file descriptors for the process, closed at its end.

    Raises:
        ValueError: a name cannot be loaded; a line with the reason.
    """

    def __init__(self, module: str, named: Any, place: str, output: Any, *inherited: int) -> None:
        check_system()
        self._inherited = inherited
        mine, theirs = socket.socketpair()
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_LIMIT, 0))
        passed, nothing = [theirs.fileno(), *inherited], subprocess.DEVNULL
        line = [sys.executable, "-P", "-m", module, *map(str, (os.getpid(), *passed))]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        env[MARK] = secrets.token_hex(8)
        env["OBJC_DISABLE_INITIALIZE_FORK_SAFETY"] = "YES"  # of macOS: it forks before it has threads
        self.process = subprocess.Popen(
            line, stdin=nothing, stdout=output, stderr=output, env=env, pass_fds=passed, start_new_session=True
        )
        theirs.close()
        self.connection = Connection(mine.detach())
        problem: str | None
        try:
            problem, self.loaded = ask(self.connection, named, IMPORT_LIMIT)
        except TimeoutError:
            problem = f"{place}: not imported after {IMPORT_LIMIT:.0f} s"
        except (EOFError, OSError):
            problem = f"{place}: its process ended while it was imported"
        if problem is not None:
            self.stop()
            raise ValueError(problem)

    def stop(self) -> None:
        """End the process and the processes that it has started."""
        if self.connection.closed:
            return
        self.connection.close()
        for descriptor in self._inherited:
            os.close(descriptor)
        has_ended(self.process, 0.2)  # it may end by itself, with a status that tells the reason
        end_process(self.process)


def ask(connection: Connection, message: Any, seconds: float) -> Any:
    """Send a message to a process and return the reply.

    Raises:
        TimeoutError: there is none within some seconds.
        EOFError, OSError: the process has ended.
    """
    connection.send(message)
    if not connection.poll(seconds):
        raise TimeoutError
    return connection.recv()


def has_ended(process: subprocess.Popen, seconds: float = 0.0) -> bool:
    """Return whether a process ends within some seconds. Its number stays taken until `process.wait()`.

    Until then a signal to this number, or to the group that has it, reaches no other process. (A pidfd has no group.)
    """
    until, pause = time.monotonic() + seconds, 0.0005
    try:
        while process.returncode is None:
            if is_zombie(process.pid):
                break
            if (left := until - time.monotonic()) <= 0:
                return False
            pause = min(2 * pause, left, 0.05)
            time.sleep(pause)
    except ChildProcessError:  # something else has waited for it
        process.wait()
    return True


def end_process(process: subprocess.Popen) -> None:
    """End a process that is supervised (`rewards.isolation.supervisor`), and with it all that it has started."""
    if not has_ended(process):
        os.kill(process.pid, signal.SIGTERM)  # not `terminate`, which waits for one that has ended by now
        has_ended(process, END_LIMIT)
    end_group(process)


def end_group(process: subprocess.Popen) -> None:
    """End a process and its group, of which it is the leader, unless it has been waited for."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
