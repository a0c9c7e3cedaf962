"""Each fault of an adapter's way to a vLLM server is found at the first step after it, at a learning rate of 1e-6."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from grpo.extras.testing.commands import finished
from tests.e2e.vllm_runs import result
from tests.servers import ended, free_port, started

pytestmark = [pytest.mark.vllm, pytest.mark.long]
HALF = ["model.dtype=bfloat16", "train.bf16=true", "train.use_cpu=true"]
FAULTS = ["skipped", "one layer skipped", "to the wrong name", "of the step before", "applied twice", "not applied"]
FAULTS += ["the base again, after a restart"]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder, port = tmp_path_factory.mktemp("faults"), free_port()
    server = started(folder / "server", port, *(HALF if request.param == "bfloat16" else []))
    try:
        line = [sys.executable, "-m", "tests.e2e.served_faults", str(folder), str(port), request.param]
        done = finished(line, timeout=200)
        assert done.returncode == 0, done.stderr
        yield result(folder / "found.json")
    finally:
        ended(server)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_adapter_that_a_server_lacks_is_found_at_once(found: dict[str, Any], fault: str) -> None:
    wanted = (
        "without the policy's adapter" if fault == "not applied" else "the engine does not hold the policy's weights"
    )
    assert wanted in found[fault]
    assert "\n" not in found[fault]


def test_asking_a_server_changes_no_completion(found: dict[str, Any]) -> None:
    before, after = found["completions"]
    assert before == after


def test_a_server_of_another_launcher_is_only_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from grpo.generation.vllm import server

    monkeypatch.setattr(server, "settings_of", lambda url: {"parallel_config": {"worker_extension_cls": ""}})
    assert not server.can_be_asked("http://127.0.0.1:9")
    assert "cannot say which weights it holds" in caplog.text
