"""The last lines of a run: result, findings, page, next command."""

from pathlib import Path

import pytest

from grpo.rundir.files import write_json
from grpo.rundir.summary import last_lines

SUMMARY = {"status": "completed", "accuracy_before": 0.11, "accuracy_after": 0.985, "steps": 160, "wall_time_s": 93.4}
TITLES = ["Completions are truncated", "The GPU is idle"]


@pytest.mark.parametrize(
    ("titles", "line", "command"),
    [
        ([], "no issues found", "grpo.export 'a run'    # a folder for from_pretrained and vllm serve"),
        (TITLES[:1], "1 finding: Completions are truncated", "grpo.report --text 'a run'    # evidence and advice"),
        (TITLES, "2 findings, the first: Completions are truncated", "grpo.report --text 'a run'    # evidence"),
    ],
)
def test_the_last_lines_have_result_findings_page_and_command(
    titles: list[str], line: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "a run"
    (run / "model").mkdir(parents=True)
    (run / "report.html").touch()
    write_json(run / "report.json", {"findings": [{"title": title} for title in titles]})
    result, findings, page, after = last_lines(SUMMARY, run, links=False)
    assert result == "accuracy 11.0% -> 98.5%, 160 steps, 93 s"
    assert (findings, page) == (line, "page: a run/report.html")
    assert after.startswith(f"next: python -m {command}")
    assert last_lines(SUMMARY, run, links=True)[2] == f"page: {run.as_uri()}/report.html"


def test_a_run_without_page_and_evaluation_has_its_steps(tmp_path: Path) -> None:
    stopped = {"status": "stopped", "accuracy_before": None, "accuracy_after": None, "steps": 3, "wall_time_s": 2.0}
    assert last_lines(stopped, tmp_path, links=True) == ["3 steps, 2 s"]
    assert last_lines(stopped | {"accuracy_before": 0.5}, tmp_path, links=True) == ["accuracy 50.0%, 3 steps, 2 s"]
