"""Environments at a real server of OpenEnv: sessions, rewards, errors, and a server that is not there."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import mean

import pytest

from grpo.config.schema import ROOT
from grpo.extras.testing.commands import command
from grpo.tools.processes import Source
from grpo.tools.running import environment_of

SERVER = ROOT / ".venv" / "openenv"
OPENENV = "grpo.extras.environments.openenv.OpenEnv"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SERVER.is_dir(), reason="`make extras` installs the server of OpenEnv"),
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = [sys.executable, str(ROOT / "examples" / "environments" / "openenv_server.py"), str(port)]
    with subprocess.Popen(line, env={**os.environ, "PYTHONPATH": str(SERVER)}) as server:
        until = time.monotonic() + 120
        while time.monotonic() < until and server.poll() is None:
            with socket.socket() as line:
                if line.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
        server.kill()


def test_sessions_are_apart_and_have_rewards(address: str) -> None:
    given = ((address,), {"observation": "text"})
    with closing(Source([OPENENV], True, 20.0, subprocess.DEVNULL, given)) as source:
        first, second = environment_of(source)(), environment_of(source)()
        asked = first.reset(seed=3, prompt=[])
        assert asked.startswith("\n")
        assert second.reset(seed=4) != asked == second.reset(seed=3)
        start, bought = [int(word) for word in asked.split() if word.isdigit()][:2]
        assert first.step(action=f"{start} + {bought}").endswith("The episode has ended.")
        with pytest.raises(RuntimeError, match="the episode has ended"):
            first.step(action="1")
        with pytest.raises(RuntimeError, match="invalid syntax"):
            second.step(action="import os")
        assert second.step(action="1 + 1").startswith("2")
        assert second.get_reward() == 0.0


def test_all_of_an_observation_is_shown_as_json(address: str) -> None:
    with closing(Source([OPENENV], True, 20.0, subprocess.DEVNULL, ((address,), {}))) as source:
        assert '"text":' in environment_of(source)().reset(seed=3)


def test_a_server_that_is_not_there_is_one_line() -> None:
    for address, says in (("http://127.0.0.1:9", "no server answers"), ("localhost", "the address of a server")):
        with pytest.raises(ValueError, match=says) as caught:
            Source([OPENENV], True, 20.0, subprocess.DEVNULL, ((address,), {}))
        assert "\n" not in str(caught.value)


def test_a_policy_is_trained_at_the_server(address: str, tmp_path: Path) -> None:
    line = ["task=openenv", f"task.environment_id={address}", "task.environment_args={observation: text}"]
    line += ["task.environment=examples/environments/word_client.py:Calculator", "task.prompt=''", "train.max_steps=3"]
    done = command("grpo.train", "+experiment=word_problems", *line, f"hydra.run.dir={tmp_path}", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    earned = [row["rewards/Calculator/mean"] for row in rows if "rewards/Calculator/mean" in row]
    assert len(earned) == 3
    assert 0.1 < mean(earned) < 0.6
    assert sum(row.get("tools/reset/errors", 0) for row in rows) == 0
