"""The benchmark for a machine with an NVIDIA GPU, at toy size without one, so that it runs when there is one."""

import json
from pathlib import Path

import pytest

from grpo.config.schema import ROOT
from grpo.extras.testing.commands import command

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize(
    ("arguments", "cells"),
    [(["--cells", "full 0.5B", "LoRA 14B"], ["full 0.5B", "LoRA 14B"]), (["--cap", "16"], ["rtx3080"])],
)
def test_cells_train_real_steps_and_are_saved_beside_their_plan(
    tmp_path: Path, arguments: list[str], cells: list[str]
) -> None:
    file = tmp_path / "memory.json"
    done = command("benchmarks.memory", "--toy", "--output", file, *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())["cells"]
    assert [result["cell"] for result in results] == cells
    for result in results:
        assert "error" not in result
        assert result["allocated_gb"] > 0.1
        assert result["oom_retries"] == 0
        assert result["phases_gb"].keys() == {"generate", "logprobs", "update"}
