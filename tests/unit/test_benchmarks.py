"""The benchmarks measure what they say: fair turns, and engines that do not see each other."""

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer

from benchmarks import engine_check, update


def test_updates_discard_a_round_and_alternate_who_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real = update.update

    def noted(trainer: GRPOTrainer, *args: Any) -> tuple[float, float, Any]:
        order.append("trl" if type(trainer) is GRPOTrainer else "ours")
        return len(order), 1.0, real(trainer, *args)[2]

    monkeypatch.setattr(update, "update", noted)
    result = update.measure("a", argparse.Namespace(model="toy", device="cpu", rows=16, repeats=3, budget="auto"))
    assert order == ["trl", "ours", "ours", "trl", "trl", "ours", "ours", "trl"]
    assert result["seconds"] == {"trl": [4, 5, 8], "ours": [3, 6, 7]}
    assert 0 < result["gradient_difference"] <= 1e-5


def test_each_engine_has_a_process_of_its_own() -> None:
    processes = {os.getpid(), engine_check.in_process(os.getpid), engine_check.in_process(os.getpid)}
    assert len(processes) == 3


def test_the_engine_check_makes_no_engine_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def answered(case: partial[dict[str, Any]]) -> dict[str, Any]:
        assert case.func is engine_check.check
        return {"checks": 1, "largest_difference": 0.0, "tolerance": 0.1, "stopped_after_step": None}

    (tmp_path / "benchmarks").mkdir()
    for name, value in {"ROOT": tmp_path, "smollm2": lambda: "", "in_process": answered}.items():
        monkeypatch.setattr(engine_check, name, value)
    engine_check.main()
    written = json.loads((tmp_path / "benchmarks" / "engine_check.json").read_text())
    known = json.loads((Path(engine_check.__file__).with_suffix(".json")).read_text())
    for policy in ("built-in policy", "smollm2"):
        assert written[policy].keys() == known[policy].keys()
