"""The process that describes a taskset: `python -m grpo.extras.environments.worker TRAINER LINE`."""

import sys
from multiprocessing.connection import Connection
from typing import Any

from rewards.isolation.loader import what_and_where
from rewards.isolation.supervisor import supervise


def main() -> None:
    """Load a taskset, and reply with its description and the asked rows."""
    trainer, line = map(int, sys.argv[1:])
    supervise(trainer, line)
    connection = Connection(line)
    environment_id, environment_args, first, count = connection.recv()
    description: dict[str, Any] = {}
    try:
        from grpo.extras.environments import verifiers

        taskset = verifiers.load_taskset(environment_id, environment_args)
        description = verifiers.describe(taskset)
        description["rows"] = list(verifiers.rows(taskset, first, count)) if count else []
        problem = None
    except ValueError as error:
        problem = " ".join(str(error).split())
    except (Exception, SystemExit) as error:
        problem = what_and_where(error)
    connection.send((problem, description))


if __name__ == "__main__":
    main()
