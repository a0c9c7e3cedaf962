"""Trainers that take turns, each in a process and an environment of its own. Needs torch alone."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.peak import read_peak, reset_peak

MARK = "RESULT "
"""Begins the lines of a process that are for the one that started it; libraries print others."""
ROLLOUTS, GRADIENT, POLICY = "rollouts.json", "gradient.pt", "policy"
"""Names in the folder that the processes share."""


class Peer:
    """A process that computes an update each time that it is asked.

    Args:
        python: interpreter of its environment.
        module: what it runs, with the folder and further arguments.
        folder: where the rollouts are; gets its log.
        environment: further variables.

    Raises:
        RuntimeError: the process ended.
    """

    def __init__(
        self, python: str, module: str, folder: Path, *arguments: str, environment: dict[str, str] | None = None
    ) -> None:
        self.log = folder / f"{module.rpartition('.')[2]}{''.join(arguments)}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [python, "-m", module, str(folder), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | (environment or {}),
            )
        self.versions = self._result()

    def update(self, keep_gradient: bool = False) -> dict[str, Any]:
        """Return seconds and peak memory of an update."""
        assert self.process.stdin
        self.process.stdin.write(f"{json.dumps(keep_gradient)}\n")
        self.process.stdin.flush()
        return self._result()

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()

    def _result(self) -> dict[str, Any]:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(MARK):
                result: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return result
        raise RuntimeError(f"a trainer ended early:\n{self.log.read_text()[-2000:]}")


def serve(
    versions: dict[str, str], folder: Path, update: Callable[[], tuple[dict[str, Any], dict[str, torch.Tensor]]]
) -> None:
    """Compute an update for each line of stdin, and print its seconds and its peak memory.

    Args:
        versions: of the libraries that compute it.
        folder: gets the gradient of an update whose line says so.
        update: returns what else is to be said of an update, and its gradient by the names of the parameters.
    """
    print(MARK + json.dumps(versions), flush=True)
    for line in sys.stdin:
        before, started = reset_peak(), time.perf_counter()
        found, gradient = update()
        seconds, peak = time.perf_counter() - started, read_peak() - before
        if json.loads(line):
            torch.save(gradient, folder / GRADIENT)
        del gradient
        reset_peak()  # free memory goes back to the system before the others' turns
        print(MARK + json.dumps({"seconds": round(seconds, 2), "peak_gib": round(peak, 2), **found}), flush=True)


def gradient_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradient of a model, unsharded, and drop it from the model."""
    found = {}
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        parameter.grad = None
    return {name: grad for name, grad in found.items() if grad is not None}
