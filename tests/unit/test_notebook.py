"""The cell of the notebook that installs the project where it is not, as in Colab."""

import importlib.util
import subprocess
import sys
from unittest.mock import Mock

import nbformat
import pytest

from grpo.config.schema import ROOT

CELLS = [cell.source for cell in nbformat.read(ROOT / "examples" / "demo.ipynb", as_version=4).cells]
(INSTALL,) = (source for source in CELLS if "REPOSITORY" in source)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The calls of programs."""
    monkeypatch.setattr(subprocess, "run", calls := Mock())
    return calls


def test_nothing_is_installed_where_the_project_is(run: Mock) -> None:
    exec(INSTALL, {})
    assert not run.called


def test_colab_installs_from_the_address_that_is_typed(run: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AssertionError, match="type the address"):
        exec(INSTALL, {})
    exec(INSTALL.replace('REPOSITORY = ""', 'REPOSITORY = "https://hub.example/me/grpo.git"'), {})
    line = [sys.executable, "-m", "pip", "install", "-q", "git+https://hub.example/me/grpo.git"]
    run.assert_called_once_with(line, check=True)
