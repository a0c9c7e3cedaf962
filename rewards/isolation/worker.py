"""The process of a reward function: `python -m rewards.isolation.worker TRAINER LINE TRACEBACK`.

A process number and two file descriptors.
"""

import asyncio
import faulthandler
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from rewards.isolation.call import call, in_this_process
from rewards.isolation.loader import bind, load, needs
from rewards.isolation.supervisor import supervise


def main() -> None:
    """Load the function, reply with its arguments, and answer calls until the connection is closed."""
    trainer, line, traceback = map(int, sys.argv[1:])
    supervise(trainer, line, traceback)
    connection = Connection(line)
    fn, name, kwargs = connection.recv()
    try:
        with in_this_process():
            unbound = load(fn, f"reward.{name}.fn={fn}")
            function = bind(unbound, name, kwargs)
    except ValueError as error:
        connection.send((str(error), []))
        return
    connection.send((None, needs(unbound, kwargs)))
    serve(connection, lambda run, arguments: call(function, arguments, run), traceback)


def serve(connection: Connection, answer: Callable[..., Any], traceback: Any = sys.stderr) -> None:
    """Answer calls until the connection is closed.

    A call that takes longer than its limit in seconds ends the process; the file `traceback` has its stack.
    """
    with asyncio.Runner() as runner:
        while True:
            try:
                seconds, *arguments = connection.recv()
            except (EOFError, OSError):
                return
            # a watchdog in C, which works while the function hangs or holds the interpreter
            faulthandler.dump_traceback_later(seconds, exit=True, file=traceback)
            reply = answer(runner.run, *arguments)
            faulthandler.cancel_dump_traceback_later()
            connection.send(reply)


if __name__ == "__main__":
    main()
