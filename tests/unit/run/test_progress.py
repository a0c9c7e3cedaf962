import io
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import TrainerState

from grpo.run import progress
from grpo.run.progress import ProgressBar
from grpo.utils.limits import GB

LOGS = {"reward": 0.25, "rewards/correctness/mean": 0.5, "step_time": 1.25}
ALL = LOGS | {"step_time": 1234.25, "rollout/problems": 32}
READINGS = ["reward 0.25", "accuracy 50 %", "1.25 s/step", "memory 3.1/16.0 GiB"]


@pytest.fixture(autouse=True)
def used_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "host_memory", lambda: (3.1 * GB, 16.0 * GB))


def state(step: int, steps: int = 100) -> TrainerState:
    return TrainerState(global_step=step, max_steps=steps)


def shown(console: Console, logs: dict[str, Any] = LOGS, steps: int = 100, **options: Any) -> str:
    """What a terminal has shown of three logged steps."""
    with ProgressBar(console, **options) as bar:
        bar.on_train_begin(None, state(0, steps), None)
        for step in (steps // 10, steps // 10 + 1, steps // 5):
            bar.on_step_end(None, state(step, steps), None)
            bar.on_log(None, state(step, steps), None, logs=dict(logs))
        bar.on_train_end(None, state(steps // 5, steps), None)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40, _environ={"TERM": "xterm"})


def screens(text: str) -> list[list[str]]:
    """The lines that a terminal has shown, before each of its changes and at the end."""
    plain = re.sub(r"\x1b\[[0-9;?]*[ml]|\x1b\[\?25h", "", text)
    return [screen.strip("\r\n").split("\n") for screen in re.split(r"\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)*", plain)]


@pytest.mark.parametrize("width", [8, 20, 40, 80, 200])
def test_progress_has_two_lines_on_a_terminal_of_any_width(width: int) -> None:
    errors = [SimpleNamespace(errors=Counter(raised=1234))]
    text = shown(terminal(width), ALL, steps=1_000_000, rewards=errors)
    for screen in screens(text):
        assert len(screen) <= 2
        assert all(len(line) <= width for line in screen)
    ups = re.findall(r"(?:\x1b\[1A\x1b\[2K)+", text)
    assert ups
    assert all(each.count("\x1b[1A") == 1 for each in ups), "the second line is drawn over the first and no other"


def test_a_terminal_of_80_columns_shows_all_readings() -> None:
    first, second = screens(shown(terminal(80)))[-1]
    assert "20/100" in first
    assert re.search(r"\d:\d\d:\d\d left", first)
    assert second == "  ".join(READINGS)


def test_a_narrow_terminal_shows_whole_readings() -> None:
    _, second = screens(shown(terminal(40)))[-1]
    assert second == "  ".join(READINGS[:3])


def test_reward_errors_are_shown_before_the_memory() -> None:
    errors = [SimpleNamespace(errors=Counter(raised=2, timeout=1))]
    _, second = screens(shown(terminal(80), ALL | {"step_time": 1.25}, rewards=errors))[-1]
    assert second == "reward 0.25  accuracy 50 %  reward errors 3  1.25 s/step  memory 3.1/16.0 GiB"


def test_a_pipe_gets_a_line_per_logged_step() -> None:
    output = Console(file=io.StringIO(), width=40)
    lines = shown(output, ALL | {"step_time": 1.25}).splitlines()
    assert lines == [f"step {step}/100  reward 0.25  accuracy 50 %  1.25 s/step  32 problems" for step in (10, 11, 20)]


def test_a_terminal_that_moves_no_cursor_gets_lines() -> None:
    output = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert "step 20/100  reward 0.25" in shown(output)


def test_the_time_left_is_known_where_a_step_takes_minutes() -> None:
    clock, console = [0.0], terminal(80)
    bar = ProgressBar(console)
    assert bar.bar
    bar.bar.get_time = lambda: clock[0]
    with bar:
        bar.on_train_begin(None, state(0), None)
        for step in range(1, 11):
            clock[0] += 120
            bar.on_step_end(None, state(step), None)
        assert bar.bar.tasks[0].time_remaining == 90 * 120


def test_the_terminal_is_as_before_when_a_training_fails() -> None:
    console = terminal(80)
    bar = ProgressBar(console)
    with pytest.raises(ZeroDivisionError), bar:
        raise ZeroDivisionError(bar.on_train_begin(None, state(0), None))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().endswith("\x1b[?25h"), "the cursor is visible"


def test_what_libraries_print_does_not_go_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console = terminal(80)
    with ProgressBar(console) as bar:
        bar.on_train_begin(None, state(0), None)
        print("a table of completions")
    assert isinstance(console.file, io.StringIO)
    assert "a table" not in console.file.getvalue()
    assert "a table" in capsys.readouterr().out


def test_a_step_without_a_single_reward_is_shown_as_one() -> None:
    logs = {**LOGS, "reward": None, "rewards/correctness/mean": None}
    assert "reward none  1.25 s/step" in shown(Console(file=io.StringIO()), logs)


def test_memory_is_that_of_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=16 * GB))
    assert progress.memory({"memory/peak_reserved_gb": 3.14}) == "memory 3.1/16.0 GiB"


def test_memory_is_compared_with_the_limit_of_the_run() -> None:
    assert progress.memory({}, host_gb=8) == "memory 3.1/8.0 GiB"
