"""Features together with the real vLLM, in a process of its own (`with_vllm.py`)."""

import json
import os
import sys
from pathlib import Path

import pytest

from grpo.config.schema import ROOT
from grpo.extras.testing.commands import finished


@pytest.mark.vllm
def test_the_gradient_with_vllm_is_stock_trls(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "tests.combinations.with_vllm", str(tmp_path)]
    done = finished(line, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT)
    assert (tmp_path / "found.json").exists(), done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) >= 8
    assert {row: error for row, error in found.items() if error} == {}
