"""Runs with the real vLLM on whatever machine this is, each as its user would start it."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas
import psutil
import pytest

from grpo.config.schema import ROOT

pytestmark = pytest.mark.vllm
SMALL = [
    "generation=vllm_colocate",
    "peft=lora",
    "train.max_steps=4",
    "train.per_device_train_batch_size=16",
    "train.num_generations=4",
    "task.eval.size=16",
]


def module(name: str, *arguments: object) -> tuple[subprocess.CompletedProcess[str], list[psutil.Process]]:
    """Run a module in a session of its own; return what it said, and which processes of the session are left."""
    process = subprocess.Popen(
        [sys.executable, "-m", name, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    out, said = process.communicate(timeout=300)
    left = [
        other for other in psutil.process_iter() if session(other) == process.pid and other.status() != "zombie"
    ]  # a zombie has ended, and waits for a parent to look
    return subprocess.CompletedProcess(process.args, process.returncode, out, said), left


def session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


def result(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def test_the_demo_learns_with_vllm_and_leaves_no_process(tmp_path: Path) -> None:
    overrides = ["train.max_steps=24", "task.eval.size=64", f"hydra.run.dir={tmp_path}/run"]
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


def test_a_run_that_breaks_keeps_the_steps_that_were_done_and_goes_on_with_vllm(adapted: Path) -> None:
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


def test_each_of_two_processes_has_an_engine_with_the_policy(tmp_path: Path) -> None:
    overrides = ["launch.processes=2", "train.max_steps=2", "task.eval.size=7", f"hydra.run.dir={tmp_path}/run"]
    done, left = module("grpo.train", *SMALL, *overrides)
    assert done.returncode == 0, done.stderr
    assert not left
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["engine/is_policy"] == 1
    assert result(tmp_path / "run" / "summary.json")["completions_a_step"] == 32
    assert result(tmp_path / "run" / "evaluation.json")["after"]["samples"] == 7


@pytest.mark.skipif(find_spec("vllm_bnb_plugin") is None, reason="make vllm")
def test_an_engine_beside_a_quantized_policy_is_the_policy(tmp_path: Path) -> None:
    half = ["peft=qlora", "model.dtype=bfloat16", "train.bf16=true", "train.use_cpu=true"]
    done, left = module("grpo.train", *SMALL, *half, f"hydra.run.dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    assert not left
    assert "and has frozen weights of its own: vLLM packs quantized weights" in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert rows[0]["engine/logp_difference"] < 0.02
    assert max(row["sampling/sampling_logp_difference/mean"] for row in rows) < 0.02


# A server on this machine's CPU, which gets adapters.


def started(folder: Path, port: int, *overrides: str) -> psutil.Process:
    """A server as its launcher starts it, with a small cache."""
    line = ["generation=vllm_server", "peft=lora", f"train.vllm_server_port={port}", f"hydra.run.dir={folder}"]
    line += overrides
    done = subprocess.run(
        [ROOT / "launch" / "vllm_server.sh", *line, "--", "--enforce-eager"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return psutil.Process(int(re.findall(r"stop it with: kill (\d+)", done.stdout)[0]))


def ended(server: psutil.Process) -> None:
    """End a server and all of its processes."""
    family = [server, *server.children(recursive=True)]
    server.terminate()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_a_server_without_a_gpu_gets_adapters_is_started_again_and_serves_the_next_run(tmp_path: Path) -> None:
    port = free_port()
    line = [*SMALL[1:], "generation=vllm_server", f"train.vllm_server_port={port}"]
    server = started(tmp_path / "server", port)
    try:
        done, _ = module("grpo.train", *line, f"hydra.run.dir={tmp_path}/run", "train.max_steps=2")
        assert done.returncode == 0, done.stderr
        assert "; it gets the adapter before each generation" in done.stderr
        wrong, _ = module("grpo.train", *line, f"hydra.run.dir={tmp_path}/wrong", "peft.r=64")
        assert wrong.returncode == 2
        assert "takes adapters up to rank 16, this run has peft.r=64: start it with" in wrong.stderr
    finally:
        ended(server)
    server = started(tmp_path / "again", port)
    try:
        again = [f"hydra.run.dir={tmp_path}/run", "train.resume_from_checkpoint=auto"]
        done, left = module("grpo.train", *line, *again)
        assert done.returncode == 0, done.stderr
        assert not left
        overlap = ["engine.staleness=1", "train.learning_rate=1e-2"]
        done, left = module("grpo.train", *line, *overlap, f"hydra.run.dir={tmp_path}/ahead")
        assert done.returncode == 0, done.stderr
        assert not left
    finally:
        ended(server)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-4
    assert not [*Path("/dev/shm").glob("adapter-*")]
    ahead = [json.loads(line) for line in (tmp_path / "ahead" / "metrics.jsonl").read_text().splitlines()]
    assert [row["sampling/staleness"] for row in ahead] == [0, 0, 1, 1]
    differences = [row["sampling/sampling_logp_difference/mean"] for row in ahead]
    assert max(differences[:2]) < 1e-4 < 1e-3 < min(differences[2:]), "old rollouts are of the policy before the update"
    assert [prompts(tmp_path / "ahead", step) for step in (1, 2, 3, 4)] == [
        prompts(tmp_path / "run", step) for step in (1, 2, 3, 4)
    ], "the order of the data is the same"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("generation", ["vllm_colocate", "vllm_server"])
def test_vllm_writes_the_turns_of_a_conversation_with_tools(generation: str, tmp_path: Path) -> None:
    port = free_port()
    line = ["+experiment=calculator", *SMALL[1:], f"generation={generation}", f"train.vllm_server_port={port}"]
    server = started(tmp_path / "server", port, "+experiment=calculator") if generation == "vllm_server" else None
    try:
        done, left = module("grpo.train", *line, "train.learning_rate=1e-3", f"hydra.run.dir={tmp_path}/run")
    finally:
        if server:
            ended(server)
    assert done.returncode == 0, done.stderr
    assert not left
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert min(row["tools/calculator/calls"] for row in rows) > 0
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-4
    summary = result(tmp_path / "run" / "summary.json")
    assert summary["accuracy_before"] is not None


def prompts(run: Path, step: int) -> list[str]:
    return pandas.read_parquet(run / "completions" / f"completions_{step:05d}.parquet")["prompt"].map(str).tolist()


class FreezeServer(threading.Thread):
    """Stop all processes of a server once the first step of a run is done, so that it hangs."""

    def __init__(self, server: psutil.Process, metrics: Path) -> None:
        super().__init__(daemon=True)
        self.server, self.metrics = server, metrics

    def run(self) -> None:
        while not (self.metrics.exists() and self.metrics.read_text()):
            time.sleep(0.1)
        for process in [*self.server.children(recursive=True), self.server]:
            process.suspend()


def test_a_run_whose_server_hangs_ends_with_a_reason_and_a_checkpoint(tmp_path: Path) -> None:
    port = free_port()
    line = [*SMALL[1:], "generation=vllm_server", f"train.vllm_server_port={port}", "train.max_steps=200"]
    server = started(tmp_path / "server", port)
    try:
        FreezeServer(server, tmp_path / "run" / "metrics.jsonl").start()
        done, left = module("grpo.train", *line, f"hydra.run.dir={tmp_path}/run")
        assert done.returncode == 1, done.stderr
        assert not left
        assert f"the vLLM server at http://127.0.0.1:{port} went away while it" in done.stderr.splitlines()[-1]
        assert result(tmp_path / "run" / "summary.json")["steps"] >= 1
        assert [*(tmp_path / "run").glob("checkpoint-*")]
    finally:
        for process in [server, *server.children(recursive=True)]:
            process.kill()
