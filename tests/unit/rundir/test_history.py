"""Which tasks have been run in a folder."""

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from grpo.rundir.files import write_json
from grpo.rundir.history import has_been_run, name_of


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
