"""The table of the runs in a directory."""

import contextlib
import json
import os
import sys
from pathlib import Path

import pytest

from grpo import report
from grpo.rundir.lock import LOCK, take


def begin(
    folder: str, when: int, status: str = "completed", accuracy: float | None = None, task: str = "words"
) -> Path:
    """Write what the table reads of a run that was started `when` seconds after the epoch."""
    run = Path(folder)
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "config.yaml").write_text("model:\n  model_name_or_path: ${project:grpo/builtin/tiny}\n")
    (run / ".hydra" / "hydra.yaml").write_text(
        f"hydra:\n  overrides:\n    task: []\n  runtime:\n    choices:\n      task: {task}\n"
    )
    (run / "summary.json").write_text(json.dumps({"status": status, "accuracy_after": accuracy}))
    os.utime(run / ".hydra", (when, when))
    return run


def printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[list[list[str]], str]:
    """Return the cells of the printed table, or the line on stderr."""
    monkeypatch.setattr(sys, "argv", ["report", *words])
    monkeypatch.setenv("COLUMNS", "160")
    with contextlib.suppress(SystemExit):
        report.main()
    said = capsys.readouterr()
    return [line.split() for line in said.out.splitlines()], said.err


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begin("outputs/2026-01-01/12-00-00", 10, accuracy=0.75)
    begin("outputs/mine", 30, "failed", task="gsm8k")
    begin("multirun/2026-01-01/12-00-00/0", 20, accuracy=0.5)
    (tmp_path / "outputs" / "preflight" / "1a" / ".hydra").mkdir(parents=True)
    resolved = (
        "model:\n  model_name_or_path: Qwen/Qwen3-0.6B\nreward:\n  model:\n    kwargs:\n      model_name_or_path: x\n"
    )
    Path("outputs/mine/resolved_config.yaml").write_text(resolved)


@pytest.mark.usefixtures("runs")
def test_runs_are_listed_with_the_newest_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, _ = printed(monkeypatch, capsys, "outputs", "multirun")
    assert rows[0] == ["run", "status", "accuracy", "task", "model", "date"]
    assert [row[:4] for row in rows[1:]] == [
        ["outputs/mine", "failed", "gsm8k", "Qwen/Qwen3-0.6B"],
        ["multirun/2026-01-01/12-00-00/0", "completed", "50.0%", "words"],
        ["outputs/2026-01-01/12-00-00", "completed", "75.0%", "words"],
    ]
    assert rows[2][4] == "tiny"


@pytest.mark.usefixtures("runs")
def test_rows_are_sorted_and_filtered_by_a_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("outputs", "multirun", "--sort", "accuracy")
    rows, _ = printed(monkeypatch, capsys, *words)
    assert [row[1] for row in rows[1:]] == ["completed", "completed", "failed"]
    assert [row[2] for row in rows[1:3]] == ["75.0%", "50.0%"]
    rows, _ = printed(monkeypatch, capsys, *words, "--filter", "status=COMP", "--filter", "run=multirun")
    assert [row[0] for row in rows[1:]] == ["multirun/2026-01-01/12-00-00/0"]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("outputs", "--filter", "status"), "--filter=status: write one of run, status, accuracy, task, model, date"),
        (("outputs", "--filter", "lr=1"), "--filter=lr=1: write one of run, "),
        (("outputs", "--filter", "task=x"), "there is no run with task=x"),
        (("outputs", "--sort", "loss"), "argument --sort: invalid choice: 'loss'"),
        (("outputs", "outputs/mine"), "outputs: a directory of runs is listed, and not beside a run; name it alone"),
        (("outputs", "multirun/none"), "multirun/none: there is no such directory"),
        (("outputs/mine", "--sort", "date"), "--sort, --filter: for a directory of runs, as outputs; "),
        (("outputs/preflight",), "outputs/preflight: neither a run nor a sweep is in it; "),
    ],
)
def test_a_wrong_listing_is_a_line(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, error = printed(monkeypatch, capsys, *words)
    assert rows == []
    (line,) = error.splitlines()
    assert line.startswith(f"grpo.report: {message}")


def test_a_killed_run_is_not_listed_as_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (begin("outputs/a", 10, "running") / LOCK).touch()
    take(begin("outputs/b", 20, "running", task="x\x1b[31m"))
    rows, _ = printed(monkeypatch, capsys, "outputs")
    assert [row[:2] for row in rows[1:]] == [["outputs/b", "running"], ["outputs/a", "killed"]]
    assert "\x1b" not in str(rows)
