"""A run whose machines leave and come, `launch.nodes=2:3`, on the three machines of `tests.e2e.machines`."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from grpo.config.schema import ROOT
from tests.e2e.launched import ENVIRONMENT, ended, processes_of, prompts_by_step, start, wait_for
from tests.e2e.machines import NODES, RENDEZVOUS, three_machines

pytestmark = [pytest.mark.slow, pytest.mark.long]

RANGE = ("launch.nodes=2:3", f"launch.rendezvous={RENDEZVOUS}", "train.gradient_accumulation_steps=3")
RANGE += ("train.max_steps=1000",)
Begin = Callable[..., subprocess.Popen[str]]
SHARDS_ON_CPUS = """
import os
if "RANK" in os.environ:
    from tests.sharding_on_cpus import enable
    enable()
"""
CHANGED = "grpo.train: a machine has left or come; all continue from the newest checkpoint"


@pytest.fixture(scope="module", autouse=True)
def machines() -> Iterator[None]:
    with three_machines():
        yield


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """A function that begins the run on a machine; what it has begun ends with the test."""
    begun: list[subprocess.Popen[str]] = []

    def begin_on(node: int, *options: str, forks: bool = True) -> subprocess.Popen[str]:
        begun.append(start(tmp_path, *RANGE, *options, machine=NODES[node], forks=forks))
        return begun[-1]

    yield begin_on
    for command in begun:
        command.kill()
    for worker in processes_of(tmp_path / "run").values():
        worker.kill()


def steps_of(run_dir: Path) -> list[int]:
    """Steps of which metrics have been written."""
    file = run_dir / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def last_step(run_dir: Path) -> int:
    return max(steps_of(run_dir), default=0)


def cut_power(command: subprocess.Popen[str], worker: psutil.Process) -> None:
    """End everything that a machine does."""
    command.kill()
    worker.kill()


def test_a_sharded_run_goes_on_as_machines_leave_and_come(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SHARDS_ON_CPUS)
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", f"{tmp_path}:{ROOT}")
    options = ("shard=fsdp2", "train.optim=adamw_torch")
    first, second, third = (begin(node, *options, forks=False) for node in range(3))
    run_dir = tmp_path / "run"
    wait_for(lambda: last_step(run_dir) >= 3, first)
    cut_power(third, processes_of(run_dir)[2])
    wait_for(lambda: len(processes_of(run_dir)) == 2 and last_step(run_dir) >= 6, first)
    third = begin(2, *options, forks=False)
    wait_for(lambda: len(processes_of(run_dir)) == 3, first)
    done = last_step(run_dir)
    wait_for(lambda: last_step(run_dir) > done + 1, first)
    first.send_signal(signal.SIGTERM)
    said = [ended(command) for command in (first, second, third)]
    assert [status for status, _, _ in said] == [130, 130, 130], said
    lines = said[0][2].splitlines()
    assert lines.count(CHANGED) == 2, lines
    assert [line for line in lines if line.startswith("processes: ")] == [
        "processes: 3 before, 2 now",
        "processes: 2 before, 3 now",
    ]
    steps, taken = steps_of(run_dir), prompts_by_step(run_dir)
    assert steps == list(range(1, len(steps) + 1))
    alone = tmp_path / "alone"
    status, _, errors = ended(start(alone, f"train.max_steps={len(steps)}", "train.gradient_accumulation_steps=6"))
    assert status == 0, errors
    assert taken == prompts_by_step(alone / "run")
    assert len(taken[1]) == 48


def test_a_stopped_machine_leaves_and_the_first_ends_the_run(begin: Begin, tmp_path: Path) -> None:
    first, second, third = (begin(node) for node in range(3))
    run_dir = tmp_path / "run"
    wait_for(lambda: last_step(run_dir) >= 4, first)
    third.send_signal(signal.SIGTERM)
    status, _, errors = ended(third)
    assert (status, errors.count("\n")) == (130, 1), errors
    stopped = last_step(run_dir)
    wait_for(lambda: len(processes_of(run_dir)) == 2 and last_step(run_dir) >= stopped + 2, first)
    first.send_signal(signal.SIGTERM)
    said = [ended(command) for command in (first, second)]
    assert [status for status, _, _ in said] == [130, 130], said
    lines = said[0][2].splitlines()
    assert f"resuming from {os.path.relpath(run_dir, tmp_path)}/checkpoint-{stopped}" in lines, "nothing is repeated"
    assert all(errors.splitlines()[-1].startswith("grpo.train: stopped: SIGTERM after step ") for _, _, errors in said)


def test_fewer_machines_than_the_least_are_one_line_in_time(begin: Begin, tmp_path: Path) -> None:
    commands = [begin(node, "launch.timeout=45") for node in range(3)]
    run_dir = tmp_path / "run"
    wait_for(lambda: last_step(run_dir) >= 2, commands[0])
    workers, begun = processes_of(run_dir), time.monotonic()
    for node in (1, 2):
        cut_power(commands[node], workers[node])
    status, _, errors = ended(commands[0])
    assert status == 1
    assert time.monotonic() - begun < 90
    line = (
        f"grpo.train: failed: launch.nodes=2:3: fewer than 2 machines came to {RENDEZVOUS} within launch.timeout=45 s"
    )
    assert errors.splitlines()[-1].startswith(line), errors
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "failed"


def test_a_process_that_dies_on_its_own_ends_the_run_everywhere(begin: Begin, tmp_path: Path) -> None:
    commands = [begin(node) for node in range(3)]
    run_dir = tmp_path / "run"
    wait_for(lambda: last_step(run_dir) >= 2, commands[0])
    processes_of(run_dir)[2].kill()
    said = [ended(command) for command in commands]
    assert [status for status, _, _ in said] == [1, 1, 1], said
    assert "process 2 was killed by SIGKILL" in said[2][2].splitlines()[-1]
