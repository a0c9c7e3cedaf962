"""Which tasks have been run in a folder."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from grpo.rundir.files import write_json
from grpo.rundir.history import has_been_run, name_of, named_run
from grpo.utils.errors import ConfigError
from rewards.probing.runs import LATEST


def test_a_task_is_named_by_its_data(composed: Callable[..., DictConfig]) -> None:
    assert name_of(composed().task) == "grpo.builtin.tasks.arithmetic.rows"
    assert name_of(composed("task=gsm8k").task) == "openai/gsm8k main"


@pytest.mark.parametrize(
    "file", ["outputs/2026-01-01/12-00-00/summary.json", "outputs/preflight/1a/preflight.json", "mine/summary.json"]
)
def test_a_run_or_a_forecast_is_found(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).parent.mkdir(parents=True)
    write_json(tmp_path / file, {"task": "openai/gsm8k main"})
    (tmp_path / "outputs" / "other" / "broken").mkdir(parents=True)
    (tmp_path / "outputs" / "other" / "broken" / "summary.json").write_text('["half of')
    assert has_been_run("openai/gsm8k main", tmp_path / "mine")
    assert not has_been_run("openai/gsm8k", tmp_path / "mine")
    assert not has_been_run("openai/gsm8k main", tmp_path / "other") or not file.startswith("mine")


def begin(run_dir: str, when: int, summary: bool = True) -> None:
    """Write what a run has at its beginning, `when` seconds after the epoch."""
    config = Path(run_dir) / ".hydra" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.touch()
    os.utime(config, (when, when))
    if summary:
        write_json(Path(run_dir) / "summary.json", {"status": "running"})


def test_latest_is_the_run_or_job_that_was_started_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    begin("outputs/2026-01-01/12-00-00", 20)
    begin("outputs/2026-01-02/12-00-00", 10)  # begun before, and continued never
    begin("outputs/preflight/1a", 50, summary=False)
    assert named_run(LATEST) == Path("outputs/2026-01-01/12-00-00")
    assert capsys.readouterr().err == "latest: outputs/2026-01-01/12-00-00\n"
    begin("outputs/mine", 30)
    assert named_run(LATEST) == Path("outputs/mine")
    begin("multirun/2026-01-01/12-00-00/1", 40)
    assert named_run(LATEST) == Path("multirun/2026-01-01/12-00-00/1")
    assert named_run(LATEST, besides="multirun/2026-01-01/12-00-00/1") == Path("outputs/mine")
    assert named_run("outputs/other") == Path("outputs/other")
    (tmp_path / "latest").symlink_to("outputs/2026-01-02/12-00-00")
    assert named_run(LATEST) == Path("latest"), "a link of the user"


def test_latest_without_a_run_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begin("outputs/preflight/1a", 50, summary=False)
    with pytest.raises(
        ConfigError, match="latest: there is no run in outputs/ or multirun/ of this folder; name a run"
    ):
        named_run(LATEST)
