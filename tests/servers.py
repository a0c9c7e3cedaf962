"""vLLM servers on this machine, for adapters of the built-in policy."""

import os
import re
import socket
import subprocess
from pathlib import Path

import psutil

from grpo.config.schema import ROOT


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
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
