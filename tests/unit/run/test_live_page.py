"""The process that writes the page of a running run: real ones, beside a process that stands for the run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from transformers import TrainerState

from grpo.run import live_page
from grpo.run.live_page import LivePage
from grpo.run.outcome import write_outcome
from tests.page_fixtures import write_run

LIMIT = 60.0
"""Seconds after which a test fails; what it waits for takes a few."""


def until(found: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not found():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def state(first: bool = True) -> TrainerState:
    return TrainerState(global_step=1, max_steps=100, is_world_process_zero=first)


def add_row(folder: Path) -> None:
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(json.loads(rows[-1]) | {"step": len(rows) + 1}) + "\n")


def steps(folder: Path) -> int:
    """Logged steps of the page."""
    file = folder / "report.html"
    return int(re.search(r"in (\d+) logged steps", file.read_text())[1]) if file.exists() else 0


def looks_again(page: LivePage) -> None:
    """Wait until the process has slept several times between two looks at the metrics."""
    assert page.process
    process = psutil.Process(page.process.pid)
    slept = process.num_ctx_switches().voluntary
    until(lambda: process.num_ctx_switches().voluntary > slept + 5, "looks at the metrics")


@pytest.fixture
def run_dir(composed: Callable, tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "run", steps=3, groups=1, generations=2)
    (folder / "summary.json").write_text(json.dumps({"status": "running", "reason": None}))
    return folder


@pytest.fixture
def page(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LivePage]:
    """The page of a run whose training has begun; it is written at once, and again after a fifth of a second."""
    monkeypatch.setattr(live_page, "EVERY", 0.2)
    monkeypatch.setattr(live_page, "PORTION", 1.0)
    live = LivePage(run_dir)
    live.on_train_begin(None, state(), None)
    live.begun -= 1
    yield live
    live.end()


def test_the_page_of_a_running_run_follows_its_metrics(page: LivePage, run_dir: Path) -> None:
    page.on_log(None, state(), None)
    until(lambda: steps(run_dir) == 3, "the first page")
    html = (run_dir / "report.html").read_text()
    assert '<p class="about running"><strong>running</strong>' in html
    assert "data-written=" in html
    add_row(run_dir)
    until(lambda: steps(run_dir) == 4, "the page with a further step")


@pytest.mark.slow
def test_a_page_is_written_only_when_the_metrics_have_grown(page: LivePage, run_dir: Path) -> None:
    page.on_log(None, state(), None)
    until((run_dir / "report.html").exists, "the first page")
    assert page.process
    before = (run_dir / "report.html").stat()
    looks_again(page)
    assert (run_dir / "report.html").stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.slow
def test_a_page_is_written_completely_or_not_at_all(page: LivePage, run_dir: Path) -> None:
    page.on_log(None, state(), None)
    until((run_dir / "report.html").exists, "the first page")
    seen = set()
    while steps(run_dir) < 6:
        assert (run_dir / "report.html").read_text().endswith("</html>")
        time.sleep(0.01)
        seen.add((run_dir / "report.html").stat().st_ino)
        if steps(run_dir) == len((run_dir / "metrics.jsonl").read_text().splitlines()):
            add_row(run_dir)
    assert len(seen) > 1, "each page is a file of its own that takes the place of the last one"


@pytest.mark.slow
def test_a_run_that_is_killed_takes_its_page_process_along(run_dir: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from grpo.run import live_page; live_page.EVERY = 600\n"
        "print(live_page.start(Path(sys.argv[1])).pid, flush=True); time.sleep(600)"
    )
    run = subprocess.Popen([sys.executable, "-c", code, str(run_dir)], stdout=subprocess.PIPE, text=True)
    assert run.stdout
    page = psutil.Process(int(run.stdout.readline()))
    until((run_dir / "report.html").exists, "the first page")
    run.kill()
    run.communicate()
    until(lambda: not page.is_running() or page.status() == psutil.STATUS_ZOMBIE, "the end of the process")
    assert not list(run_dir.glob("*.partial-*"))


@pytest.mark.slow
def test_a_process_whose_parent_has_gone_writes_nothing(run_dir: Path) -> None:
    line = [sys.executable, "-m", "grpo.run.page_process", str(run_dir), "1", "0.2", "1"]
    assert subprocess.run(line, timeout=LIMIT, check=False).returncode == 0
    assert not (run_dir / "report.html").exists()


def test_nothing_is_written_after_the_last_page_of_a_run(page: LivePage, run_dir: Path) -> None:
    page.on_log(None, state(), None)
    until((run_dir / "report.html").exists, "the first page")
    process = page.process
    add_row(run_dir)
    assert process
    write_outcome({"status": "completed", "reason": None}, run_dir, page)
    assert process.returncode is not None, "it has ended before the last page"
    html = (run_dir / "report.html").read_text()
    assert "<strong>completed</strong>" in html
    assert "data-written=" not in html
    page.on_log(None, state(), None)
    assert page.process is None, "no other is started"


def test_a_process_that_does_not_end_is_killed(page: LivePage, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "END_LIMIT", 0.1)
    line = ["/bin/sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"]
    page.process = process = subprocess.Popen(line, stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    partial = run_dir / f"report.html.partial-{process.pid}"
    partial.touch()
    page.end()
    assert process.returncode == -signal.SIGKILL
    assert not partial.exists()


def test_a_run_that_is_over_starts_no_process(page: LivePage) -> None:
    page.end()
    page.on_log(None, state(), None)
    assert page.process is None


@pytest.mark.parametrize(("first", "seconds"), [(True, 29), (False, 31)], ids=["short run", "other rank"])
def test_a_short_run_and_other_ranks_start_no_process(run_dir: Path, first: bool, seconds: float) -> None:
    page = LivePage(run_dir)
    page.on_train_begin(None, state(first), None)
    if page.begun is not None:
        page.begun -= seconds
    page.on_log(None, state(first), None)
    assert page.process is None


def test_a_process_that_cannot_start_costs_one_warning(
    page: LivePage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    for _ in range(3):
        page.on_log(None, state(), None)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the page is not written while the run runs: " in caplog.text


def test_a_broken_file_costs_one_line_and_is_tried_again(page: LivePage, run_dir: Path) -> None:
    broken = "resolved_config.yaml" if (run_dir / "resolved_config.yaml").exists() else ".hydra/config.yaml"
    whole = (run_dir / broken).read_text()
    (run_dir / broken).write_text("{[\n")
    page.on_log(None, state(), None)
    log = run_dir / "train.log"
    until(lambda: log.exists() and log.read_text(), "the line in the log")
    looks_again(page)
    (run_dir / broken).write_text(whole)
    until((run_dir / "report.html").exists, "the page of the mended run")
    page.end()
    lines = [line for line in log.read_text().splitlines() if not line.startswith("skipped: ")]
    assert [line.startswith("the page is not written while the run runs: ") for line in lines] == [True]


def test_a_process_that_the_system_killed_costs_one_warning(page: LivePage, caplog: pytest.LogCaptureFixture) -> None:
    page.on_log(None, state(), None)
    assert page.process
    page.process.kill()
    page.process.wait()
    page.on_log(None, state(), None)
    page.end()
    page.end()
    assert [record.getMessage() for record in caplog.records] == [
        "the process that writes the page was killed by signal 9"
    ]


@pytest.mark.slow
def test_the_process_gives_way_and_ctrl_c_does_not_reach_it(page: LivePage, run_dir: Path) -> None:
    page.on_log(None, state(), None)
    until((run_dir / "report.html").exists, "the first page")
    assert page.process
    pid = page.process.pid
    assert os.sched_getscheduler(pid) == os.SCHED_IDLE
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
    assert os.getpgid(pid) != os.getpgrp()
    assert os.getsid(pid) == os.getsid(0), "another session would get as much time as the training"


@pytest.mark.slow
def test_the_process_imports_no_pytorch(run_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from grpo.run.page_process import write_if_grown\n"
        "assert write_if_grown(Path(sys.argv[1]), 0) > 0\n"
        "print([name for name in ('torch', 'transformers', 'trl') if name in sys.modules])"
    )
    line = [sys.executable, "-c", code, str(run_dir)]
    assert subprocess.run(line, capture_output=True, text=True, check=True).stdout == "[]\n"
