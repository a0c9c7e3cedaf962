"""Runs with the real vLLM, and servers for them."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from grpo.config.schema import ROOT
from tests.commands import Forked

SMALL = [
    "generation=vllm_colocate",
    "peft=lora",
    "train.max_steps=4",
    "train.per_device_train_batch_size=16",
    "train.num_generations=4",
    "task.eval.size=16",
]

FILTERS = ["train.top_k=10", "train.top_p=0.9", "train.min_p=0.01"]


def module(name: str, *arguments: object) -> tuple[subprocess.CompletedProcess[str], list[psutil.Process]]:
    """Run a module in a session of its own; return what it said, and which processes of the session are left."""
    process = Forked(
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
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return psutil.Process(int(re.findall(r"stop it with: kill (\d+)", done.stdout)[0]))


def ended(server: psutil.Process) -> None:
    """End a server and all of its processes."""
    family = [server, *server.children(recursive=True)]
    server.terminate()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
