"""Every two features work together, with stock TRL's gradient, or are refused before a step."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from grpo.config.schema import ROOT
from tests.combinations.array import Row, name, pairs, plain, possible, rows, rows_of
from tests.combinations.comparisons import check
from tests.combinations.document import FILE, page
from tests.combinations.features import REFUSED
from tests.combinations.trainings import ours

ROWS = rows()
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs `make deepspeed`")
EVERY = 6
"""Of so many rows one is in `make test`, the others in `make test-all`."""


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=name(row)) for row in ROWS[::EVERY]]
    + [pytest.param(row, id=name(row), marks=pytest.mark.slow) for row in ROWS if row not in ROWS[::EVERY]],
)
def test_each_pair_has_the_gradient_of_stock_trl(row: Row, tmp_path: Path) -> None:
    check(row, tmp_path)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", "fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
def test_each_pair_works_on_two_processes(tmp_path: Path, shard: str) -> None:
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    line += ["-m", "tests.combinations.on_two_processes", str(tmp_path), shard]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for _ in range(3):  # gloo and FSDP2 on CPUs were seen to die once of a corrupted heap
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=900, check=False)
        if (tmp_path / "found.json").exists():
            break
    assert (tmp_path / "found.json").exists(), done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == {name(row) for row in rows_of(shard)}
    assert {row: error for row, error in found.items() if error} == {}


@pytest.mark.parametrize(("pair", "reason"), REFUSED, ids=str)
def test_a_pair_that_does_not_work_is_refused(pair: Row, reason: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=reason):
        ours(plain(**pair), tmp_path)


def test_every_pair_that_can_work_is_in_a_row() -> None:
    assert {pair for row in ROWS for pair in pairs(row)} == possible()


def test_the_page_of_combinations_is_that_of_the_features() -> None:
    assert FILE.read_text() == page()
