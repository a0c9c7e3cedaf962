"""The longest completion: its methods by machine, and the committed table, which is as long as others claim."""

import json
from typing import Any

import pytest

from benchmarks.longest import CLAIMS, FILE, beside, lengths
from grpo.config.schema import ROOT
from grpo.extras.plan_tables.longest import LENGTH, methods
from grpo.extras.plan_tables.table import METHODS
from grpo.planning import machine
from grpo.planning.advice import Planner

CONTENT = json.loads(FILE.read_text())


NAMES = ["full", "full, offloaded", "LoRA", "LoRA, offloaded", "QLoRA", "QLoRA, offloaded"]
EIGHT_BIT = {"+ 8-bit AdamW", "+ gradients offloaded to CPU", "+ paged AdamW"}


@pytest.fixture(autouse=True)
def no_gpu(composed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_gpu_memory", lambda processes: None)


@pytest.mark.parametrize(
    ("line", "left", "refused"),
    [
        (["+gpu=h100"], NAMES, set()),
        (["+gpu=rtx3090_x2"], NAMES, EIGHT_BIT),  # FSDP2
        (["+gpu=h100", "launch.processes=2", "shard=zero3"], NAMES, EIGHT_BIT - {"+ 8-bit AdamW"}),
        (["+gpu=apple", "gpu.memory_gb=64"], NAMES[::2], EIGHT_BIT),
    ],
)
def test_each_machine_plans_the_methods_it_can_run(line: list[str], left: list[str], refused: set[str]) -> None:
    planner = Planner([*line, "generation=transformers", f"{LENGTH}=256"])
    chosen = methods(planner.config({}))
    assert list(chosen) == NAMES
    assert [name for name, change in chosen.items() if planner.plan(change)] == left
    assert {name for name, change in METHODS.items() if planner.plan(change) is None} == refused


def test_the_configured_optimizer_is_planned() -> None:
    planner = Planner(["+gpu=h100", "train.optim=lion_32bit"])
    assert planner.config(methods(planner.config({}))["LoRA"]).train.optim == "lion_32bit"


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(CLAIMS)))
def test_a_plan_is_as_long_as_the_claim_of_a_peer(place: int) -> None:
    found = beside(*CLAIMS[place])
    assert found == CONTENT["claims"][place]
    assert found["planned"] >= found["tokens"]


@pytest.mark.long
@pytest.mark.slow
def test_the_committed_lengths_are_what_is_planned() -> None:
    (row,) = [row for row in CONTENT["rows"] if row["memory_gb"] == 24]
    assert lengths(row["profiles"][0]) == row["longest"]
    for model, longest in row["longest"].items():
        for method in ("full", "LoRA", "QLoRA"):
            assert longest[f"{method}, offloaded"] >= 2 * longest[method], model


def test_the_docs_have_the_committed_lengths() -> None:
    text = (ROOT / "docs" / "memory.md").read_text()
    for one in CONTENT["claims"]:
        assert f"| {one['tokens']:,} | {one['planned']:,} |" in text
