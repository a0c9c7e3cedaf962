"""The benchmarks measure what they say: fair turns, and verdicts that are compared with runs."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer

from benchmarks import gpu_cells, preflight, update
from benchmarks.gpu_experiments import TOY
from benchmarks.peers import __main__ as peers
from benchmarks.peers.turns import Peer
from benchmarks.preflight_cases import cases
from grpo.config.schema import ROOT
from grpo.extras.testing.commands import command


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


def test_cells_of_a_gpu_update_and_generate_at_toy_size() -> None:
    cell = gpu_cells.CELLS["(c) Qwen2.5-1.5B"]
    result = gpu_cells.measure(cell._replace(by=("as they are", "trl")), TOY)
    assert result["as they are"]["tokens/s"] > 0 < result["trl"]["tokens/s"]
    ways = gpu_cells.tokens_of("smollm2_135m", 32, TOY)
    assert all(way["ms per token"] > 0 for way in ways.values())
    assert next(iter(gpu_cells.EXPERIMENTS)) == "Qwen3-4B LoRA, 16k"
    assert {"vllm awake", "OOM retries"} < gpu_cells.EXPERIMENTS.keys()


def test_a_cell_counts_matrix_products_and_attention() -> None:
    """A toy: 2 layers of 64 x (128 + 64 + 64) + 128 x 64 + 3 x 64 x 128 weights, and a head of 500 x 64."""
    workload = update.Workload("", lambda generator: 10, 4, 0.0, group=2, longest=10)
    cell = gpu_cells.Cell("toy", workload, 2, adapter=False)
    tokens, operations = gpu_cells.needed(update.build_policy("toy", "cpu"), cell)
    prompt = tokens - 20
    weights = 2 * (64 * 256 + 128 * 64 + 3 * 64 * 128) + 500 * 64
    pairs = prompt**2 / 2 + 2 * 10 * (prompt + 5)
    assert operations == 6 * weights * tokens + 3 * 4 * 2 * 4 * 32 * pairs


def test_prime_rls_figures_stand_beside_their_cells() -> None:
    figures = gpu_cells.published(gpu_cells.CELLS["Qwen3-4B LoRA, 16k"])
    assert figures == {"prime-rl gib, reserved": 23.303, "prime-rl s": 5.26}
    assert all(gpu_cells.published(cell) for cell in gpu_cells.CELLS.values() if cell.published)


@pytest.mark.long
@pytest.mark.slow
def test_trainers_in_their_own_processes_agree(tmp_path: Path) -> None:
    peers.prepare(tmp_path, "b", "toy", rows=16)
    started = peers.start(tmp_path, argparse.Namespace(workload="b", model="toy", rows=16, verl=None, swift=None))
    results = peers.measure(started, tmp_path, repeats=1)
    for peer in started.values():
        peer.close()
    assert list(results) == ["trl", "ours"]
    assert 0 < results["ours"]["gradient_difference"] <= 1e-5
    assert all(len(result["seconds"]) == 1 and result["peak_gib"][0] > 0 for result in results.values())


def test_a_trainer_that_ends_early_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no_such_trainer"):
        Peer(sys.executable, "no_such_trainer", tmp_path)


def test_a_rise_is_one_that_is_significant() -> None:
    assert preflight.sign_test(0, 0) == 1.0
    assert preflight.sign_test(5, 0) == preflight.sign_test(0, 5) == pytest.approx(2 / 32)
    assert preflight.sign_test(8, 1) == pytest.approx(2 * 10 / 512)


@pytest.mark.parametrize(
    ("status", "rose", "right"),
    [(0, True, True), (0, False, False), (1, False, True), (1, True, False), (2, False, True)],
)
def test_a_verdict_is_right_if_the_accuracy_says_the_same(status: int, rose: bool, right: bool) -> None:
    found = {"forecast": {"status": status, "value": 0.5, "interval": [0.4, 0.6]}, "run": {"rose": rose}}
    assert preflight.compared(found) == {"right": right}, "nothing was measured without training"
    found = preflight.compared(found | {"unchanged": {"value": 0.56}})
    assert (found["near"], found["in_interval"], found["right"]) == (False, True, right)


def test_a_third_of_the_runs_cannot_learn_and_all_differ() -> None:
    every = cases()
    others = [case for case in every if not case.kind.startswith("sweep")]
    assert 0.3 < sum(not case.can_learn for case in others) / len(others) < 0.4
    assert all(case.can_learn for case in every if case not in others), "at one of the rates"
    assert len({tuple(case.overrides[:5] + case.overrides[6:]) for case in every}) == len(every), "but for the seed"


@pytest.mark.long
@pytest.mark.slow
def test_a_run_is_compared_with_its_forecast_and_kept(tmp_path: Path) -> None:
    number = next(case.number for case in cases() if case.line == "arithmetic train.max_steps=1")
    line = ("benchmarks.preflight", "--output", tmp_path, "--only", number)
    done = command(*line, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "1/1 arithmetic train.max_steps=1" in done.stdout
    kept = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*/*.json")}
    assert kept["forecast"]["status"] in (0, 1)
    assert kept["unchanged"]["groups"] == 320
    assert abs(kept["unchanged"]["value"] - kept["forecast"]["value"]) < 0.15
    assert (kept["run"]["steps"], kept["run"]["status"]) == (1, "completed")
    again = command(*line, cwd=ROOT)
    assert again.stdout == done.stdout
