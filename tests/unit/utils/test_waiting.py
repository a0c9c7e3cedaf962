"""Lines about work before the first step."""

import io
import logging

import pytest
from rich.console import Console

from grpo.generation.vllm.start import EngineStart
from grpo.utils import waiting
from grpo.utils.waiting import Waiting


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the machine, which the test moves."""
    now = [100.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    return now


def test_parts_of_vllms_start_are_shown_as_it_logs_them(clock: list[float]) -> None:
    console, log = Console(file=io.StringIO(), width=100), logging.getLogger("vllm.v1.worker")
    log.setLevel(logging.INFO)
    with EngineStart(console):
        for seconds, message in (
            (10, "Starting to load model Qwen/Qwen2.5-0.5B..."),
            (3, "Model loading took 0.93 GiB memory and 2.9 seconds"),
            (20, "GPU KV cache size: 120,149 tokens, "),
            (12, "Graph capturing finished in 12 secs, took 0.5 GiB"),
        ):
            clock[0] += seconds
            log.info(message)
        clock[0] += 1
    log.info("Starting to load model of a later one")
    parts = "loading weights 3 s, compiling and profiling 20 s, recording CUDA graphs 12 s, warming up 1 s"
    assert console.file.getvalue() == f"starting the engine took 46 s ({parts})\n"  # type: ignore[attr-defined]


def test_a_terminal_shows_what_is_under_way() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Waiting(console, "starting vLLM") as started:
        started.begin("loading weights")
        started.line.refresh()
        shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "starting vLLM: loading weights" in shown
    assert "took" not in console.file.getvalue(), "it was short"  # type: ignore[attr-defined]


def test_work_that_fails_says_no_more_than_its_error(clock: list[float]) -> None:
    console = Console(file=io.StringIO())

    def start() -> None:
        with Waiting(console, "starting vLLM") as waiting:
            waiting.begin("loading weights")
            clock[0] += 60
            raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        start()
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
