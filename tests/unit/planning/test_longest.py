"""The longest completion: the committed table is what is planned now, and as long as others claim."""

import json
from typing import Any

import pytest

from benchmarks.longest import CLAIMS, FILE, beside, lengths
from grpo.config.schema import ROOT
from grpo.planning import machine

pytestmark = pytest.mark.slow
CONTENT = json.loads(FILE.read_text())


@pytest.fixture(autouse=True)
def no_gpu(composed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_gpu_memory", lambda processes: None)


@pytest.mark.parametrize("place", range(len(CLAIMS)))
def test_a_plan_is_as_long_as_the_claim_of_a_peer(place: int) -> None:
    found = beside(*CLAIMS[place])
    assert found == CONTENT["claims"][place]
    assert found["planned"] >= found["tokens"]


def test_the_committed_lengths_are_what_is_planned() -> None:
    (row,) = [row for row in CONTENT["rows"] if row["memory_gb"] == 24]
    assert lengths(row["profiles"][0]) == row["longest"]
    for model, methods in row["longest"].items():
        for method in ("full", "LoRA", "QLoRA"):
            assert methods[f"{method}, offloaded"] >= 2 * methods[method], model


def test_the_docs_have_the_committed_lengths() -> None:
    text = (ROOT / "docs" / "memory.md").read_text()
    for one in CONTENT["claims"]:
        assert f"| {one['tokens']:,} | {one['planned']:,} |" in text
