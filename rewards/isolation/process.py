"""The process of a reward function, as the trainer's process sees it."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from rewards.isolation.call import Fault, Outcome

IMPORT_LIMIT = 300.0
"""Limit on the import of a reward function, seconds."""
SEND_LIMIT = 60
"""Limit on sending the arguments of a call, seconds."""
END_LIMIT = 5
"""Limit on the end of a process and of all that it has started, seconds."""


def check_system() -> None:
    """Check that processes with functions of the user can be started, kept in view and ended here.

    Raises:
        ValueError: they cannot.
    """
    if sys.platform != "linux":
        system = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
        raise ValueError(
            f"training, rewards and tools need Linux, and this is {system}: use WSL2, a container or a server"
        )


class Worker:
    """A process with one reward function.

    Raises:
        ValueError: the function cannot be loaded; one line with the reason.
    """

    def __init__(self, fn: str, name: str, kwargs: dict[str, Any], output: Any = None) -> None:
        check_system()
        self.traceback = os.memfd_create("traceback")
        self.process, self.connection = start_process("rewards.isolation.worker", output, self.traceback)
        self.connection.send((fn, name, kwargs))
        self.needs: list[str] = []
        problem: str | None = f"reward.{name}.fn={fn}: its process ended while it was imported"
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll(IMPORT_LIMIT):
                problem, self.needs = self.connection.recv()
            else:
                problem = f"reward.{name}.fn={fn}: not imported after {IMPORT_LIMIT:.0f} s"
        if problem is not None:
            self.stop()
            raise ValueError(problem)

    def call(self, arguments: dict[str, Any], timeout: float) -> Outcome:
        """Call the function and return the outcome, at the latest about a second after `timeout` seconds."""
        late = False
        try:
            self.connection.send((arguments, timeout))
            late = not self.connection.poll(timeout + 1)
            if not late:
                return self.connection.recv()
        except (EOFError, OSError):  # the watchdog has ended the process, or it has ended itself
            pass
        except Exception as error:
            return Outcome(failed=Fault(type(error).__name__, f"its arguments cannot be sent: {error}"))
        if self.connection.closed:
            return Outcome(failed=Fault("Died", "its process was ended"))
        where = os.pread(self.traceback, 10_000, 0).decode(errors="replace")
        self.stop()
        if late or where:
            return Outcome(failed=Fault("Timeout", f"took longer than timeout={timeout:g} s and was stopped", where))
        status = self.process.returncode
        how = f"was killed by signal {-status}, perhaps out of memory" if status < 0 else f"status {status}"
        return Outcome(failed=Fault("Died", f"its process ended: {how}"))

    def stop(self) -> None:
        """End the process and the processes that it has started."""
        if self.connection.closed:
            return
        self.connection.close()
        os.close(self.traceback)
        has_ended(self.process, 0.2)  # it may end by itself, with a status that tells the reason
        end_process(self.process)


def start_process(module: str, output: Any, *inherited: int) -> tuple[subprocess.Popen, Connection]:
    """Start a module with the number of this process, that of a line to it, and others; return it and the line.

    Args:
        output: file for what it prints; None is the output of this process.
        inherited: file descriptors that it gets too.
    """
    mine, theirs = socket.socketpair()
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_LIMIT, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, (os.getpid(), theirs.fileno(), *inherited))],
        pass_fds=[theirs.fileno(), *inherited],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
    )
    theirs.close()
    return process, Connection(mine.detach())


def has_ended(process: subprocess.Popen, seconds: float = 0.0) -> bool:
    """Return whether a process ends within some seconds. Its number stays taken until `process.wait()`.

    Until then a signal to this number, or to the group that has it, reaches no other process. (A pidfd has no group.)
    """
    until, pause = time.monotonic() + seconds, 0.0005
    try:
        while process.returncode is None:
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
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
