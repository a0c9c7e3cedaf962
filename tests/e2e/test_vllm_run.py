"""Runs with the real vLLM on whatever machine this is, each as its user would start it."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.vllm_runs import FILTERS, SMALL, module, result
from tests.servers import ended, free_port, started

pytestmark = [pytest.mark.vllm, pytest.mark.long]


def test_the_demo_learns_with_vllm_and_leaves_no_process(tmp_path: Path) -> None:
    overrides = ["train.max_steps=16", "train.seed=1", "task.eval.size=64", f"hydra.run.dir={tmp_path}/run"]
    done, left = module("grpo.train", "generation=vllm_colocate", *overrides)
    assert done.returncode == 0, done.stderr
    assert not left
    summary = result(tmp_path / "run" / "summary.json")
    assert summary["status"] == "completed"
    assert summary["accuracy_before"] < 0.35
    assert summary["accuracy_after"] > 0.55
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-4
    assert all(row["time/generate"] > 0 for row in rows)
    settings = result(tmp_path / "run" / "plan.json")["settings"]
    assert settings["train.vllm_max_model_length"] == 88
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of LoRA with vLLM that a reward breaks in its third step."""
    folder = tmp_path_factory.mktemp("adapted")
    (folder / "mine.py").write_text(
        "calls = 0\ndef mine(completions):\n    global calls\n    calls += 1\n"
        "    if calls == 3:\n        raise ValueError('enough')\n    return [1.0 * len(text) for text in completions]\n"
    )
    mine = f"+reward.mine={{fn: '{folder}/mine.py:mine', on_error: raise}}"
    done, left = module("grpo.train", mine, f"hydra.run.dir={folder}/run", *SMALL)
    assert done.returncode == 1, done.stderr
    assert not left
    assert "grpo.train: failed: " in done.stderr.splitlines()[-1]
    return folder / "run"


def test_a_broken_run_keeps_its_steps_and_resumes_with_vllm(adapted: Path) -> None:
    assert result(adapted / "summary.json")["status"] == "failed"
    assert (adapted / "checkpoint-2" / "trainer_state.json").exists()
    done, left = module("grpo.train", "train.resume_from_checkpoint=auto", f"hydra.run.dir={adapted}", *SMALL)
    assert done.returncode == 0, done.stderr
    assert not left
    assert (result(adapted / "summary.json")["status"], result(adapted / "summary.json")["steps"]) == ("completed", 4)
    steps = [json.loads(line)["step"] for line in (adapted / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


def test_an_adapter_is_evaluated_by_vllm_as_by_transformers(adapted: Path, tmp_path: Path) -> None:
    said = {}
    for generation in ("transformers", "vllm_colocate"):
        where = [f"generation={generation}", f"hydra.run.dir={tmp_path}/{generation}", "evaluate.samples=0"]
        done, left = module("grpo.evaluate", adapted, *where)
        assert done.returncode == 0, done.stderr
        assert not left
        assert result(tmp_path / generation / "evaluation.json")["engine"] == generation.removesuffix("_colocate")
        lines = (tmp_path / generation / "completions.jsonl").read_text().splitlines()
        said[generation] = {(row["problem"], row["completion"]) for row in map(json.loads, lines)}
    assert said["vllm_colocate"] == said["transformers"]


def assert_is_corrected(rows: list[dict[str, Any]]) -> None:
    """Check that the importance ratio is 1, with a filter that has removed tokens."""
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-4
    assert all(0.5 < row["sampling/kept_mass"] < 0.9999 for row in rows)


def test_each_of_two_processes_has_an_engine_with_the_policy(tmp_path: Path) -> None:
    overrides = ["launch.processes=2", "train.max_steps=2", "task.eval.size=7", f"hydra.run.dir={tmp_path}/run"]
    done, left = module("grpo.train", *SMALL, *FILTERS, "rollout.dynamic_sampling=true", *overrides)
    assert done.returncode == 0, done.stderr
    assert not left
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["engine/is_policy"] == 1
    assert_is_corrected(rows)
    assert result(tmp_path / "run" / "summary.json")["completions_a_step"] == 32
    assert result(tmp_path / "run" / "evaluation.json")["after"]["samples"] == 7


@pytest.mark.skipif(find_spec("vllm_bnb_plugin") is None, reason="make vllm")
def test_an_engine_beside_a_quantized_policy_is_the_policy(tmp_path: Path) -> None:
    half = ["peft=qlora", "model.dtype=bfloat16", "train.bf16=true", "train.use_cpu=true"]
    done, left = module("grpo.train", *SMALL, *half, "train.top_k=10", f"hydra.run.dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    assert not left
    assert "and has frozen weights of its own: vLLM packs quantized weights" in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert rows[0]["engine/logp_difference"] < 0.02
    assert max(row["sampling/sampling_logp_difference/mean"] for row in rows) < 0.02


def test_vllm_generates_with_frozen_weights_in_eight_bits(tmp_path: Path) -> None:
    half = ["peft=lora", "model.dtype=bfloat16", "engine.quantization=fp8_per_channel", "train.seed=1"]
    done, left = module("grpo.train", *SMALL, *half, f"hydra.run.dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    assert not left
    assert "frozen weights of its own: vLLM packs quantized weights (engine.quantization)" in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 1e-3 < rows[0]["engine/logp_difference"] < rows[0]["engine/tolerance"] == 0.5
    assert all(row["sampling/importance_sampling_ratio/mean"] != 1 for row in rows), "the correction is on"


def test_a_cpu_quantizes_per_channel_alone(tmp_path: Path) -> None:
    half = ["peft=lora", "model.dtype=bfloat16", "engine.quantization=fp8"]
    done, _ = module("grpo.train", *SMALL, *half, f"hydra.run.dir={tmp_path}/run")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "grpo.train: engine.quantization=fp8: on a CPU vLLM quantizes per channel; use fp8_per_channel",
    )


@pytest.mark.parametrize("generation", ["vllm_colocate", "vllm_server"])
def test_vllm_writes_the_turns_of_a_conversation_with_tools(generation: str, tmp_path: Path) -> None:
    port = free_port()
    line = ["+experiment=calculator", *SMALL[1:], f"generation={generation}", f"train.vllm_server_port={port}"]
    server = started(tmp_path / "server", port, "+experiment=calculator") if generation == "vllm_server" else None
    try:
        done, left = module("grpo.train", *line, *FILTERS, "train.learning_rate=1e-3", f"hydra.run.dir={tmp_path}/run")
    finally:
        if server:
            ended(server)
    assert done.returncode == 0, done.stderr
    assert not left
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert min(row["tools/calculator/calls"] for row in rows) > 0
    assert_is_corrected(rows)
    summary = result(tmp_path / "run" / "summary.json")
    assert summary["accuracy_before"] is not None
