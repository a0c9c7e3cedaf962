"""The process of a reward function: `python -m rewards.isolation.worker TRAINER LINE TRACEBACK`.

A process number and two file descriptors.
"""

import asyncio
import faulthandler
import sys
from multiprocessing.connection import Connection

from rewards.isolation.call import call
from rewards.isolation.loader import bind, load, needs
from rewards.isolation.supervisor import supervise


def main() -> None:
    """Load the function, confirm it, and answer calls until the connection is closed."""
    trainer, line, traceback = map(int, sys.argv[1:])
    supervise(trainer, line, traceback)
    connection = Connection(line)
    fn, name, kwargs = connection.recv()
    try:
        unbound = load(fn, f"reward.{name}.fn={fn}")
        function = bind(unbound, name, kwargs)
    except ValueError as error:
        connection.send((str(error), []))
        return
    connection.send((None, needs(unbound, kwargs)))
    with asyncio.Runner() as runner:
        while True:
            try:
                arguments, timeout = connection.recv()
            except EOFError:
                return
            # a watchdog in C, which works while the function hangs or holds the interpreter
            faulthandler.dump_traceback_later(timeout, exit=True, file=traceback)
            outcome = call(function, arguments, runner.run)
            faulthandler.cancel_dump_traceback_later()
            connection.send(outcome)


if __name__ == "__main__":
    main()
