"""Two processes over gloo: the gradient of stock TRL on two, and nobody waits for one that ran out of memory."""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo import losses
from grpo.config.schema import ROOT
from grpo.extras.testing.commands import finished
from grpo.options import LOSS_MEANS

SCRIPT = Path(__file__).parent / "two_processes.py"
EXACT = (
    "unequal numbers",
    "one process has nothing to do",
    "nothing to do at all",
    "sequence level, KL, 4 slices, 2 iterations",
    "adaptive entropy",
    "bnpo",
    "mixture of experts",
    "undivided",
    *losses.NAMES,
    "dynamic sampling",
    "images, llava_next",
    "images, qwen2_vl",
    "images, qwen2_5_vl",
    "images, LoRA of the tower too",
    "images on one process at most",
    "out of memory, forward",
    "out of memory, backward",
    *(f"{loss_type} with correction" for loss_type in LOSS_MEANS),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("two") / "found.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = finished([*command, str(SCRIPT), str(file)], env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(file.read_text())


@pytest.mark.parametrize("case", EXACT)
def test_the_gradient_on_two_processes_is_exact(found: dict[str, Any], case: str) -> None:
    assert found[case]["gradient"] <= 1e-5


def test_the_cases_are_what_they_say(found: dict[str, Any]) -> None:
    assert found["one process has nothing to do"]["logs"][0]["update/rows_skipped"] >= 16
    assert found["nothing to do at all"]["logs"][0]["update/rows_skipped"] == 32
    assert found["nothing to do at all"]["logs"][0]["update/microbatches"] == 0
    for loss_type in LOSS_MEANS:
        first = found[f"{loss_type} with correction"]["logs"][0]
        assert (
            first["sampling/importance_sampling_ratio/min"]
            < 0.99
            < 1.01
            < (first["sampling/importance_sampling_ratio/max"])
        )


def test_a_process_with_short_completions_helps_the_others(found: dict[str, Any]) -> None:
    for case in ("unequal numbers", "images, llava_next"):
        balanced, alone = (found[name]["logs"][0]["update/microbatches"] for name in (case, f"{case}, not balanced"))
        assert balanced < alone


def test_metrics_are_over_all_processes(found: dict[str, Any]) -> None:
    case = found["sequence level, KL, 4 slices, 2 iterations"]
    for mine, stock in zip(case["logs"], case["trl"], strict=True):
        assert mine["loss"] == pytest.approx(stock["loss"], abs=1e-5)
        assert mine["kl"] == pytest.approx(stock["kl"], rel=0.2, abs=1e-6)  # TRL's is a mean of its slices' means
    adaptive = found["adaptive entropy"]
    for mine, stock in zip(adaptive["logs"], adaptive["trl"], strict=True):
        for name in ("entropy", "entropy_coef", "policy_loss", "clip_ratio/region_mean"):
            assert mine[name] == pytest.approx(stock[name], rel=1e-4, abs=1e-5), name


def test_a_retry_on_one_process_is_one_on_all(found: dict[str, Any]) -> None:
    for where in ("forward", "backward"):
        assert [row["update/oom_retries"] for row in found[f"out of memory, {where}"]["logs"]] == [2, 0]


def test_all_processes_end_when_one_row_of_one_does_not_fit(found: dict[str, Any]) -> None:
    assert "does not fit into memory" in found["does not fit"]


def test_a_step_not_finite_on_one_process_is_skipped_on_all(found: dict[str, Any]) -> None:
    assert [row["update/steps_skipped"] for row in found["not finite"]["logs"]] == [1, 1]
    assert found["weights equal"]
    assert 0 < len(found["not finite"]["rows"]) <= 32
