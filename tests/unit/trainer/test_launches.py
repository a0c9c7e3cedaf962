"""Kernels that an update would start on a GPU, and places where the host would wait for it."""

import json
import re

import pytest
import torch

from benchmarks import launches
from grpo.config.schema import ROOT

RESULTS = json.loads((ROOT / "benchmarks" / "launches.json").read_text())["cases"]


@pytest.mark.parametrize("case", ["LoRA", "all weights"])
def test_an_update_never_waits_for_a_gpu_in_a_micro_batch(case: str) -> None:
    counts = launches.measure(launches.CASES[case])
    assert counts["waits"] == 0
    assert counts["waits_of_step"] <= 10
    assert counts["layer"] <= RESULTS[case]["layer"]
    assert counts["besides"] <= 1.02 * RESULTS[case]["besides"]


@pytest.mark.slow
def test_a_compiled_layer_has_half_of_the_kernels() -> None:
    (forward, backward) = launches.compiled(adapter=True)
    assert forward + backward <= 1.05 * RESULTS["LoRA"]["compiled_layer"]
    assert forward + backward <= 0.55 * RESULTS["LoRA"]["layer"]


def test_waits_and_kernels_are_seen() -> None:
    weights, batch = torch.ones(4), torch.arange(4.0)
    seen = launches.Launches([weights, batch])
    with seen.watching():
        total = (weights * batch.view(2, 2).flatten()).sum()
        total.item()
        batch[batch > 1].tolist()
        torch.zeros(3).sum().item()  # in host memory
    assert sorted(+seen.kernels) == ["aten::gt", "aten::mul", "aten::sum"]
    assert [re.sub(" in .*", "", place) for place in seen.waits] == [
        "aten::_local_scalar_dense",
        "aten::index",
        "tolist",
    ]


def test_the_page_has_the_counts_of_the_benchmark() -> None:
    page = (ROOT / "docs" / "exact_update.md").read_text()
    for case, row in RESULTS.items():
        compiled = row["compiled_layer"] or "–"
        assert f"| {case} | {row['layer']} | {compiled} | {row['besides']} | {row['waits']} |" in page
