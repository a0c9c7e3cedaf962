"""`python -m grpo.measure` from its command line to its file, on the CPU."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from grpo.extras.measuring.record import read_record
from grpo.extras.testing.commands import Command, command


@pytest.mark.slow
@pytest.mark.long
def test_the_first_cases_are_measured_and_drawn(tmp_path: Path) -> None:
    done = command("grpo.measure", "--device", "cpu", "--cases", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "measure-cpu.json" in done.stdout
    for case in read_record(tmp_path / "measure-cpu.json")["cases"]:
        assert case["outcome"] == "measured"
        assert case["oom_retries"] == 0
        measured, planned = case["measured_gb"], case["planned_gb"]
        assert measured["peak"] == max(measured.values())
        assert 0 < measured["generate"] < measured["logprobs"] < measured["update"]
        assert all(0.8 < planned[phase] / measured[phase] < 1.5 for phase in measured)
    drawn = command("benchmarks.measured", tmp_path, "--output", tmp_path / "measured.png", cwd=Path.cwd())
    assert drawn.returncode == 0, drawn.stderr
    assert "no GPU has been measured yet" in drawn.stdout
    assert (tmp_path / "measured.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.long
def test_ctrl_c_keeps_the_cases_so_far(tmp_path: Path) -> None:
    running = Command("grpo.measure", "--device", "cpu", cwd=tmp_path)
    file, until = tmp_path / "measure-cpu.json", time.monotonic() + 120
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.1)
    os.kill(running.pid, signal.SIGINT)
    done = running.wait()
    assert done.returncode == 130
    cases = json.loads(file.read_text())["cases"]
    assert f"interrupted; measure-cpu.json has the first {len(cases)} cases" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda"], "no GPU was found"),
        (["--output", "missing"], "no such folder"),
        (["--output", "/proc/self"], "cannot be written"),
        (["--minute", "0"], "--minutes=0: a positive number"),
        (["--cases", "0"], "--cases=0: a positive number"),
        (["--gpu"], "unrecognized arguments: --gpu"),
    ],
)
def test_a_wrong_argument_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = command("grpo.measure", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("grpo.measure: ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_lists_the_options(tmp_path: Path) -> None:
    done = command("grpo.measure", "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert all(option in done.stdout for option in ("--device", "--minutes", "--cases", "--output"))
