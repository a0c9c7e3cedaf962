"""The thread beside a run: phases that do not end, and how busy the GPU is."""

import io
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments

from grpo.run import monitor
from grpo.run.monitor import LONGER, STALLED, Monitor
from grpo.trainer.measurements import MemoryReadings


def watching(memory: MemoryReadings, folder: Path) -> tuple[Monitor, io.StringIO]:
    printed = io.StringIO()
    return Monitor(memory, None, folder, Console(file=printed, width=300)), printed


def test_a_phase_that_does_not_end_is_reported_once_with_stacks(tmp_path: Path) -> None:
    memory = MemoryReadings(on_gpu=False)
    watch, printed = watching(memory, tmp_path)
    with memory.of("generate"):
        began = memory.phase[1]
        watch.look(began + STALLED - 1)
        assert printed.getvalue() == ""
        for seconds in (1, 2, 900):
            watch.look(began + STALLED + seconds)
    (line,) = printed.getvalue().splitlines()
    assert line.startswith("no progress for 20 minutes, in the phase generate; the stacks of all threads are in ")
    stacks = (tmp_path / "stacks.txt").read_text()
    assert stacks.count("most recent call first") >= 1
    assert "test_monitor.py" in stacks


def test_what_took_long_before_may_take_long_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MemoryReadings(on_gpu=False)
    monkeypatch.setattr(monitor, "STALLED", 10.0)
    watch, printed = watching(memory, tmp_path)
    now = memory.phase[1]
    clock = iter([now + 100, now + 100])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    memory.note()  # the first phase took 100 seconds
    watch.look(now + 101)
    watch.look(now + 100 + 100 * LONGER - 1)
    assert printed.getvalue() == ""
    watch.look(now + 100 + 100 * LONGER + 1)
    assert "no progress for 8 minutes" in printed.getvalue()


def test_the_thread_looks_and_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "SECOND", 0.01)
    looked = threading.Event()
    percentages = iter([30.0, 50.0])

    def utilization() -> float | None:
        percentage = next(percentages, None)
        if percentage is None:
            looked.set()
        return percentage

    memory = MemoryReadings(on_gpu=False)
    with Monitor(memory, utilization, tmp_path, Console(file=io.StringIO())) as watch:
        assert looked.wait(10)
    logs = {"reward": 1.0}
    watch.on_log(TrainingArguments(str(tmp_path), use_cpu=True), TrainerState(), TrainerControl(), logs)
    assert logs == {"reward": 1.0, "gpu/utilization": 0.4}
    assert watch.ended.is_set()
