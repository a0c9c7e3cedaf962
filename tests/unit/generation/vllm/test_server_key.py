"""A server that other machines reach answers nobody without its key."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from grpo import serve as launcher
from grpo.config.resolve import resolve
from grpo.config.schema import ROOT
from grpo.generation.vllm import server
from grpo.generation.vllm.server import settings_of
from grpo.generation.vllm.server_key import KEY, MIDDLEWARE, KeyRequired, headers
from grpo.generation.vllm.watched_session import WatchedSession
from grpo.serve import command, serve
from grpo.utils.errors import ConfigError

Compose = Callable[..., DictConfig]


def asked(scope: dict[str, Any]) -> list[dict[str, Any]]:
    """What a server sends to a request; `passed` if it gets to vLLM."""
    sent: list[dict[str, Any]] = []

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "passed"})

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(KeyRequired(vllm)(scope, send, send))  # type: ignore[arg-type]
    return sent


@pytest.mark.parametrize("path", ["/v1/completions", "/update_weights", "/collective_rpc", "/server_info", "/metrics"])
def test_every_address_but_health_asks_for_the_key(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "s3cret")
    scope = {"type": "http", "path": path, "method": "POST"}
    for given in ([], [(b"authorization", b"Bearer other")], [(b"authorization", b"s3cret")]):
        assert asked({**scope, "headers": given})[0]["status"] == 401
    ours = [(name.lower().encode(), value.encode()) for name, value in headers().items()]
    assert asked({**scope, "headers": ours}) == [{"type": "passed"}]
    assert asked({**scope, "path": "/health", "headers": []}) == [{"type": "passed"}]
    assert asked({"type": "lifespan"}) == [{"type": "passed"}]
    assert asked({"type": "websocket", "path": "/v1/realtime", "headers": []})[0]["type"] == "websocket.close"


def test_a_run_sends_the_key_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    assert (headers(), "Authorization" in WatchedSession("http://gpu7:8000").headers) == ({}, False)
    monkeypatch.setenv(KEY, "s3cret")
    assert WatchedSession("http://gpu7:8000").headers["Authorization"] == "Bearer s3cret"


def test_a_server_that_other_machines_reach_needs_a_key(
    composed: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "installed_vllm", lambda: ("vllm", "0.31.0"))
    monkeypatch.delenv(KEY, raising=False)
    config = composed("generation=vllm_server", "train.vllm_server_host=0.0.0.0", "train.vllm_server_port=0")
    assert "--middleware" not in command(resolve(config, None))
    with pytest.raises(ConfigError, match=f"everyone who reaches it could replace the weights: set {KEY} to a secret"):
        serve(resolve(config, None), tmp_path / "log")
    monkeypatch.setenv(KEY, "s3cret")
    words = command(resolve(config, None))
    assert words[words.index("--middleware") + 1] == MIDDLEWARE == "grpo.generation.vllm.server_key.KeyRequired"
    assert not any("s3cret" in word for word in words), "everyone on the machine sees command lines"


def test_a_run_without_the_key_of_its_server_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = server.requests.Response()
    answer.status_code = 401
    monkeypatch.setattr(server.requests, "get", lambda url, **options: answer)
    with pytest.raises(ConfigError, match=f"the server at http://gpu7:8000 asks for its key: set {KEY} to what it is"):
        settings_of("http://gpu7:8000")


def test_slurm_gives_the_server_and_the_run_a_key_of_their_own(tmp_path: Path) -> None:
    programs = {
        "scontrol": "printf '%s\\n' trains serves",
        "srun": 'echo "$VLLM_API_KEY $*" >>"$SEEN"; [[ "$*" != *infinity* ]] || exec sleep 60',
        "scancel": "true",
    }
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    files = {tmp_path / name: text for name, text in programs.items()}
    answers = (
        f'[[ "$2" == *health* ]] || exec {sys.executable} "$@"\nuntil grep -q infinity "$SEEN"; do sleep 0.1; done'
    )
    files[tmp_path / ".venv" / "bin" / "python"] = answers
    for file, text in files.items():
        file.write_text(f"#!/usr/bin/env bash\n{text}\n")
        file.chmod(0o755)
    seen = tmp_path / "seen"
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "2", "SLURM_SUBMIT_DIR": str(tmp_path), "SERVER_NODE": "1"}
    environment = {**os.environ, **job, "SEEN": str(seen), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment.pop(KEY, None)
    keys = []
    for _ in range(2):
        line = [ROOT / "launch" / "slurm.sbatch", "+gpu=h100"]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        server, run = (said.split() for said in seen.read_text().splitlines())
        assert "--nodelist=serves" in server
        assert {"--nodelist=trains", "generation=vllm_server", "train.vllm_server_host=serves"} <= set(run)
        assert server[0] == run[0]
        assert len(run[0]) == 64
        keys.append(run[0])
        seen.unlink()
    assert keys[0] != keys[1]
