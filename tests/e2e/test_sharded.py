"""FSDP2 and DeepSpeed's ZeRO on two processes over gloo: stock TRL's update, and runs that resume bit for bit."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo.config.schema import ROOT
from grpo.extras.testing.commands import finished
from tests.e2e.launched import RUN
from tests.e2e.sharded import CASES

pytestmark = [pytest.mark.slow, pytest.mark.long]

HERE = Path(__file__).parent
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs `make deepspeed`")
ZERO = [pytest.param(name, marks=needs_deepspeed) for name in ("zero2", "zero3")]
LORA = ("peft=lora", "peft.lora_dropout=0.0", "train.gradient_checkpointing=true")


def on_two_processes(*line: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}", *line]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return finished(command, env=environment, cwd=folder)


@pytest.fixture(scope="module", params=["fsdp2", *ZERO])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    done = on_two_processes(str(HERE / "sharded.py"), request.param, "found.json", folder=folder)
    assert done.returncode == 0, done.stderr[-5000:]
    return {"shard": request.param, **json.loads((folder / "found.json").read_text())}


def test_a_sharded_update_is_that_of_stock_trl(found: dict[str, Any]) -> None:
    for name in CASES:
        assert found[name]["sharding"] == ("FSDP" if found["shard"] == "fsdp2" else "DEEPSPEED")
        assert found[name]["change"] <= 1e-5, name
        for mine, stock in zip(found[name]["logs"], found[name]["trl"], strict=True):
            assert mine["grad_norm"] == pytest.approx(stock["grad_norm"], rel=1e-4), name


def test_cases_have_several_micro_batches_and_skip_completions(found: dict[str, Any]) -> None:
    assert found["uneven lengths"]["logs"][0]["update/microbatches"] >= 2
    assert found["zero variance on one process"]["logs"][0]["update/rows_skipped"] >= 16


def test_no_process_holds_whole_gradients_under_fsdp2(found: dict[str, Any]) -> None:
    if found["shard"] == "fsdp2":
        for name in CASES:
            assert len(found[name]["shares"]) > 2
            assert all(0.3 < share < 0.7 for share in found[name]["shares"])


def test_rank_0_alone_has_weights_before_fsdp2_divides_them(found: dict[str, Any]) -> None:
    if found["shard"] == "fsdp2":
        stock_and_ours, ours = ["cpu", "meta"] * len(CASES), ["meta"] * (len(found["out of memory"]) + 1)
        assert found["devices"] == [["cpu"] * len(stock_and_ours + ours), stock_and_ours + ours]


def test_fsdp2_repeats_a_step_after_an_oom_in_a_layer(found: dict[str, Any]) -> None:
    """In the second layer's forward pass, in its backward pass, and in the first one's in another micro-batch."""
    if found["shard"] == "fsdp2":
        (none, _), *failures = found["out of memory"]
        assert sum(none) == 0
        for retries, difference in failures:
            assert sum(retries) == 1
            assert difference <= 1e-5


def test_a_gradient_not_finite_changes_no_sharded_policy(found: dict[str, Any]) -> None:
    assert [row["update/steps_skipped"] for row in found["not finite"]["logs"]] == [1, 1]
    assert found["not finite"]["unchanged"]


def test_the_adapter_that_vllm_gets_is_whole(found: dict[str, Any]) -> None:
    assert found["adapter"] <= 1e-6


@pytest.mark.parametrize(
    ("shard", "options"),
    [
        ("fsdp2", ()),
        pytest.param("zero3_offload", (*LORA, "train.optim=adamw_8bit"), marks=needs_deepspeed),
    ],
)
def test_a_sharded_run_evaluates_resumes_and_saves_a_whole_model(
    shard: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    line = (str(HERE / "train_on_cpus.py"), *RUN, f"shard={shard}", *options, f"hydra.run.dir={run_dir}")
    done = on_two_processes(*line, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.count("GRPO run completed") == 1
    evaluation = json.loads((run_dir / "evaluation.json").read_text())
    assert [evaluation[when]["samples"] for when in ("before", "after")] == [7, 7]
    file = run_dir / "model" / ("adapter_model.safetensors" if options else "model.safetensors")
    model = load_file(file)
    if not options:
        loaded = AutoModelForCausalLM.from_pretrained(run_dir / "model")
        assert model.keys() == load_file(ROOT / "grpo" / "builtin" / "tiny" / "model.safetensors").keys()
        assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in model.items())

    shutil.rmtree(run_dir / "checkpoint-5")
    shutil.rmtree(run_dir / "model")
    (run_dir / "summary.json").write_text('{"status": "running", "reason": null}')
    done = on_two_processes(*line, "train.resume_from_checkpoint=auto", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "resuming from run/checkpoint-4" in done.stderr
    again = load_file(file)
    assert all(torch.equal(weight, again[name]) for name, weight in model.items())
    assert json.loads((run_dir / "evaluation.json").read_text()) == evaluation


def test_a_sharded_run_survives_an_oom_with_half_the_tokens(tmp_path: Path) -> None:
    line = (str(HERE / "train_on_cpus.py"), *RUN, "shard=fsdp2", "train.max_steps=2", "task.eval.size=0")
    line = (*line, "update.max_tokens_per_microbatch=60", f"hydra.run.dir={tmp_path / 'run'}")
    done = on_two_processes(*line, folder=tmp_path, OUT_OF_MEMORY=str(tmp_path / "marker"))
    assert done.returncode == 1
    (said,) = [text for text in done.stderr.splitlines() if text.startswith("grpo.train: ")]
    found = re.search(r"out of memory in the update, at (\d+) tokens at once, with sharded weights", said)
    assert found, said
    done = on_two_processes(*line, "train.resume_from_checkpoint=auto", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    rows = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["update/max_tokens_per_microbatch"] for row in rows] == [int(found[1]) // 2] * 2
