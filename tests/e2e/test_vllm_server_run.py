"""Runs that get their completions from a vLLM server on this machine's CPU, which gets adapters."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pandas
import psutil
import pytest
import requests
from trl.generation.vllm_client import VLLMClient

from grpo.generation.vllm.server_requests import ServerRequests
from grpo.utils.errors import GenerationError
from tests.e2e.vllm_runs import FILTERS, SMALL, module, result
from tests.servers import ended, free_port, started

pytestmark = [pytest.mark.vllm, pytest.mark.long]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[psutil.Process, list[str], Path]]:
    """A server that was started a second time, what runs need to use it, and a run's first two steps with the first."""
    folder, port = tmp_path_factory.mktemp("served"), free_port()
    line = [*SMALL[1:], "generation=vllm_server", f"train.vllm_server_port={port}"]
    server = started(folder / "server", port)
    try:
        done, _ = module("grpo.train", *line, f"hydra.run.dir={folder}/run", "train.max_steps=2")
        assert done.returncode == 0, done.stderr
        assert "; it gets the adapter before each generation" in done.stderr
    finally:
        ended(server)
    server = started(folder / "again", port, "engine.staleness=2")
    yield server, line, folder
    for process in [server, *server.children(recursive=True)]:  # the last test has stopped them
        process.kill()


@pytest.fixture(scope="module")
def resumed(served: tuple[psutil.Process, list[str], Path]) -> Path:
    """The run, finished with the second server."""
    _, line, folder = served
    again = [f"hydra.run.dir={folder}/run", "train.resume_from_checkpoint=auto"]
    done, left = module("grpo.train", *line, *again)
    assert done.returncode == 0, done.stderr
    assert not left
    return folder / "run"


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_continues_with_a_server_that_was_started_again(resumed: Path) -> None:
    assert [row["step"] for row in metrics(resumed)] == [1, 2, 3, 4]
    assert max(row["sampling/sampling_logp_difference/max"] for row in metrics(resumed)) < 1e-4
    assert not [*Path("/dev/shm").glob("adapter-*")]


def test_a_server_refuses_an_adapter_of_a_higher_rank(served: tuple[psutil.Process, list[str], Path]) -> None:
    _, line, folder = served
    wrong, _ = module("grpo.train", *line, f"hydra.run.dir={folder}/wrong", "peft.r=64")
    assert wrong.returncode == 2
    assert "takes adapters up to rank 16, this run has peft.r=64: start it with" in wrong.stderr


def test_rollouts_in_flight_are_of_older_policies(
    served: tuple[psutil.Process, list[str], Path], resumed: Path
) -> None:
    _, line, folder = served
    ahead = [*FILTERS, "engine.staleness=2", "train.learning_rate=1e-2", f"hydra.run.dir={folder}/ahead"]
    done, left = module("grpo.train", *line, *ahead)
    assert done.returncode == 0, done.stderr
    assert not left
    rows = metrics(folder / "ahead")
    staleness = [row["sampling/staleness"] for row in rows]
    assert staleness[0] == 0 < min(staleness[1:]) <= max(staleness) <= 2
    differences = [row["sampling/sampling_logp_difference/mean"] for row in rows]
    assert differences[0] < 1e-4 < 1e-3 < min(differences[1:])
    assert all(row["sampling/kept_mass"] < 0.9999 for row in rows)
    both = ([one for step in (1, 2, 3, 4) for one in prompts(run, step)] for run in (folder / "ahead", resumed))
    assert sorted(next(both)) == sorted(next(both))
    wrong, _ = module("grpo.train", *line, *ahead[:-1], "engine.staleness=3", f"hydra.run.dir={folder}/more")
    assert wrong.returncode == 2
    assert "has --max-loras 4, and engine.staleness=3 needs 5" in wrong.stderr


def test_a_request_in_flight_can_be_paused_and_aborted(served: tuple[psutil.Process, list[str], Path]) -> None:
    _, line, _ = served
    client = VLLMClient(base_url=line[-1].replace("train.vllm_server_port=", "http://127.0.0.1:"))
    sends, answers = ServerRequests(client), Queue[Any]()

    def send(name: str) -> None:
        how = {"request_id": name, "ignore_eos": True}
        try:
            answers.put(sends.generate(prompts=[[5, 6]] * 16, n=32, max_tokens=64, generation_kwargs=how))
        except GenerationError as error:
            answers.put(error)

    def tokens() -> str:
        lines = requests.get(f"{client.base_url}/metrics", timeout=60).text.splitlines()
        return next(line for line in lines if line.startswith("vllm:generation_tokens_total"))

    for name in ("paused", "aborted"):
        threading.Thread(target=send, args=(name,), daemon=True).start()
        before = tokens()
        while tokens() == before:
            time.sleep(0.05)
        if name == "aborted":
            sends.abort(name)
        else:
            with sends.paused():
                held = tokens()
                time.sleep(1)
                assert tokens() == held
        answer = answers.get(timeout=120)
        if name == "aborted":
            assert str(answer) == "aborted has been aborted", "its completions would be truncated"
        else:
            assert sum(map(len, answer["completion_ids"])) == 16 * 32 * 64
    began = tokens()
    time.sleep(1)
    assert tokens() == began, "the server has stopped, too"
    with pytest.raises(GenerationError, match="aborted has been aborted"):
        sends.generate(prompts=[[5]], generation_kwargs={"request_id": "aborted"})


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


def test_a_run_whose_server_hangs_fails_with_a_checkpoint(
    served: tuple[psutil.Process, list[str], Path],
) -> None:
    """It is the last test of this server."""
    server, line, folder = served
    FreezeServer(server, folder / "hangs" / "metrics.jsonl").start()
    done, left = module("grpo.train", *line, "train.max_steps=200", f"hydra.run.dir={folder}/hangs")
    assert done.returncode == 1, done.stderr
    assert not left
    url = line[-1].replace("train.vllm_server_port=", "http://127.0.0.1:")
    assert f"the vLLM server at {url} went away while it" in done.stderr.splitlines()[-1]
    assert result(folder / "hangs" / "summary.json")["steps"] >= 1
    assert [*(folder / "hangs").glob("checkpoint-*")]
