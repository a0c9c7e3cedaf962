"""A run of two processes is continued by four and by one, with each feature that does not refuse it."""

import os
import sys
from pathlib import Path

import pytest

from grpo.config.schema import ROOT
from grpo.extras.testing.commands import finished
from tests.combinations.at_another_size import SAVED_BY


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("shard", "numbers"), [("none", (4, 1)), ("fsdp2", (4,))])
def test_other_processes_continue_each_feature(tmp_path: Path, shard: str, numbers: tuple[int, ...]) -> None:
    for processes in (SAVED_BY, *numbers):
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        line += ["-m", "tests.combinations.at_another_size", str(tmp_path), shard]
        done = finished(line, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr[-3000:]
