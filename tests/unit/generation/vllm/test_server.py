import json
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch
from accelerate import Accelerator
from omegaconf import DictConfig
from requests.adapters import HTTPAdapter
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation.vllm_client import VLLMClient
from urllib3.util import Retry

from grpo import serve as launcher
from grpo.config.batch import longest_request
from grpo.config.resolve import resolve
from grpo.config.schema import ROOT
from grpo.generation.vllm import server
from grpo.generation.vllm.engine import PolicyEngine
from grpo.generation.vllm.server import check_room, check_server, check_vllm, is_taken, server_url, started_at
from grpo.generation.vllm.server_key import KEY
from grpo.serve import command, serve
from grpo.utils.errors import ConfigError, GenerationError, RunError
from tests.servers import free_port

Compose = Callable[..., DictConfig]
SERVER = "generation=vllm_server"


def check(config: DictConfig) -> None:
    check_server(config.train, config.model.model_name_or_path, longest_request(config.task, config.train))


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
@pytest.mark.parametrize("generation", ["vllm_colocate", "vllm_server"])
def test_vllm_that_is_not_installed_is_one_line(composed: Compose, generation: str) -> None:
    with pytest.raises(ConfigError, match="vLLM is not installed: `make vllm` does it"):
        check_vllm(composed(f"generation={generation}").train, can_send=True)


@pytest.fixture
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether vLLM is installed does not matter."""
    monkeypatch.setattr(server, "find_spec", lambda name: name)


@pytest.mark.usefixtures("_vllm")
def test_a_server_without_a_gpu_to_send_weights_from_is_refused(composed: Compose) -> None:
    with pytest.raises(ConfigError, match="there is none here; use peft=lora, of which the adapter travels alone, gen"):
        check_vllm(composed(SERVER).train, can_send=False)


def test_quantized_weights_need_the_plugin(composed: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "find_spec", lambda name: name if name == "vllm" else None)
    with pytest.raises(ConfigError, match=r"vLLM needs vllm-bnb-plugin: `make vllm` installs it; or use peft=lora"):
        check_vllm(composed("generation=vllm_colocate").train, can_send=True, quantized=True)


@pytest.mark.usefixtures("_vllm")
def test_a_server_that_does_not_run_is_told_at_once(composed: Compose) -> None:
    port = free_port()
    with pytest.raises(ConfigError, match=f"no vLLM server answers at http://127.0.0.1:{port}: start one with launch/"):
        check_vllm(composed(SERVER, f"train.vllm_server_port={port}").train, can_send=True)


class Handler(BaseHTTPRequestHandler):
    """A healthy server that knows nothing else, as vLLM's without its development endpoints."""

    info = 404

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else self.info)
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def healthy() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


@pytest.mark.usefixtures("_vllm")
def test_a_server_without_development_endpoints_takes_no_weights(composed: Compose, healthy: int) -> None:
    config = composed(SERVER, f"train.vllm_server_port={healthy}")
    check_vllm(config.train, can_send=True)
    with pytest.raises(ConfigError, match="as VLLM_SERVER_DEV_MODE=1 was not set"):
        check(config)


@pytest.mark.usefixtures("_vllm")
def test_what_is_no_vllm_server_is_told(composed: Compose, healthy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "info", 200)
    with pytest.raises(ConfigError, match="is no vLLM server that this run can use"):
        check(composed(SERVER, f"train.vllm_server_port={healthy}"))


def test_the_server_gets_what_trl_needs_and_stays_local(composed: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "installed_vllm", lambda: ("vllm", "0.31.0"))
    words = command(resolve(composed("+gpu=h100", SERVER, "train.vllm_server_port=8123", "peft=none"), None))
    options = dict(pairwise(words))
    assert options["--host"] == "127.0.0.1"
    assert options["--port"] == "8123"
    assert json.loads(options["--weight-transfer-config"]) == {"backend": "nccl"}
    assert options["--logprobs-mode"] == "processed_logprobs"
    assert options["--dtype"] == "bfloat16"
    assert int(options["--max-model-len"]) == 384 + 786
    assert "Qwen/Qwen3-14B" in words
    assert "--trust-remote-code" not in words


@pytest.mark.parametrize(("peft", "quantization"), [("lora", None), ("qlora", "bitsandbytes")])
def test_a_server_for_adapters_takes_their_rank_and_no_weights(
    composed: Compose, monkeypatch: pytest.MonkeyPatch, peft: str, quantization: str | None
) -> None:
    monkeypatch.setattr(launcher, "installed_vllm", lambda: ("vllm", "0.31.0"))
    words = command(resolve(composed("+gpu=h100", SERVER, f"peft={peft}", "peft.r=20"), None))
    options = dict(pairwise(words))
    assert "--enable-lora" in words
    assert options["--max-lora-rank"] == "32"
    assert options.get("--quantization") == quantization
    assert "--weight-transfer-config" not in words


def test_an_address_in_full_goes_before_host_and_port(composed: Compose) -> None:
    assert server_url(composed(SERVER, "train.vllm_server_base_url=http://gpu7:9000/").train) == "http://gpu7:9000"


def test_a_port_in_use_is_one_line(composed: Compose, healthy: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"port {healthy} of 127.0.0.1 is in use: choose another with train.vllm_ser"):
        serve(resolve(composed(SERVER, f"train.vllm_server_port={healthy}"), None), tmp_path / "log")


def test_vllm_options_without_dashes_fail_with_one_line() -> None:
    done = subprocess.run(
        [ROOT / "launch" / "vllm_server.sh", "--enforce-eager"], capture_output=True, text=True, timeout=60
    )
    said = "launch/vllm_server.sh: --enforce-eager: options for `vllm serve` go after a --"
    assert (done.returncode, done.stderr.splitlines()) == (2, [said])


# With a real server.


@pytest.fixture(scope="module")
def served(composed: Compose, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DictConfig, psutil.Process]]:
    """A server for the embedded policy, as `launch/vllm_server.sh` starts it, and its process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setattr(launcher, "more_options", ["--enforce-eager"])
        config = composed(SERVER, f"train.vllm_server_port={free_port()}")
        patch.setenv(KEY, "a secret of this test")
        process = psutil.Process(serve(resolve(config, None), tmp_path_factory.mktemp("server") / "log"))
        yield config, process
    if process.is_running():
        process.terminate()


def changed(settings: dict[str, Any], of: str) -> Callable[..., Any]:
    """`requests.get` of a server that was started with one other option."""
    get = requests.get

    def other(url: str, **options: Any) -> Any:
        answer = get(url, **options)
        if url.endswith("/server_info"):
            content = answer.json()
            (content["vllm_config"][of] if of else content["vllm_config"]).update(settings)
            answer.json = lambda: content  # type: ignore[method-assign]
        return answer

    return other


@pytest.mark.vllm
def test_the_server_that_the_launcher_starts_is_as_trl_needs_it(served: tuple[DictConfig, Any]) -> None:
    check(served[0])
    assert started_at(server_url(served[0].train)).startswith("process_start_time_seconds")
    check_room(served[0].train, 88)
    with pytest.raises(ConfigError, match="has room for 88 tokens, a prompt and its completion take 89"):
        check_room(served[0].train, 89)


@pytest.mark.vllm
@pytest.mark.parametrize("path", ["health", "v1/models", "server_info", "sleep", "collective_rpc", "update_weights"])
def test_the_server_answers_nobody_without_its_key(served: tuple[DictConfig, Any], path: str) -> None:
    answer = requests.get(f"{server_url(served[0].train)}/{path}", timeout=60)
    assert answer.status_code == (200 if path == "health" else 401)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("settings", "of", "says"),
    [
        (
            dict.fromkeys(("model", "served_model_name"), "Qwen/Qwen3-4B"),
            "model_config",
            r"has the model Qwen/Qwen3-4B, this run .*/grpo/builtin/tiny: start it with",
        ),
        ({"max_model_len": 80}, "model_config", "has room for 80 tokens, a prompt and its completion take 88: start"),
        ({"logprobs_mode": "raw_logprobs"}, "model_config", "has --logprobs-mode raw_logprobs, its log-probabilities"),
        ({"weight_transfer_config": None}, "", "cannot take weights, without --weight-transfer-config: start it"),
    ],
)
def test_a_faulty_server_fails_with_one_line_on_how_to_start_it(
    served: tuple[DictConfig, Any], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], of: str, says: str
) -> None:
    monkeypatch.setattr(requests, "get", changed(settings, of))
    with pytest.raises(ConfigError, match=says) as caught:
        check(served[0])
    assert "\n" not in str(caught.value)


@pytest.mark.vllm
def test_a_group_port_in_use_is_told_before_the_policy_loads(served: tuple[DictConfig, Any], composed: Compose) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        assert is_taken("", port)
        options = (f"train.vllm_server_port={served[0].train.vllm_server_port}", f"train.vllm_group_port={port}")
        with pytest.raises(ConfigError, match=f"train.vllm_group_port={port} is in use"):
            check(composed(SERVER, *options))


@pytest.mark.vllm
def test_a_server_that_cannot_come_up_says_why(
    composed: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "100000")  # GiB
    monkeypatch.setattr(launcher, "more_options", ["--enforce-eager"])
    with pytest.raises(RunError, match=r"the server ended with status 1: .*is less than requested memory for kv"):
        serve(resolve(composed(SERVER, f"train.vllm_server_port={free_port()}"), None), tmp_path / "log")


@pytest.mark.vllm
def test_a_server_that_goes_away_ends_the_run_with_a_reason(
    served: tuple[DictConfig, psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, process = served
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda self, device: None)  # what needs a GPU on both sides
    name = config.model.model_name_or_path
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name, dtype="float32"), AutoTokenizer.from_pretrained(name)
    url = server_url(config.train)
    engine = PolicyEngine(model, Accelerator(), tokenizer, mode="server", server_base_url=url)
    _, completions, logps, _ = engine.generate([[5, 6, 7]] * 4, None, 4)
    assert len(completions) == 4
    for row, found in zip(completions, logps, strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([[5, 6, 7, *row]])).logits[0, 2:-1].log_softmax(-1)
        expected = scores[torch.arange(len(row)), torch.tensor(row)]
        assert torch.allclose(torch.tensor([first for first, *_ in found]), expected, atol=1e-4)

    family = [process, *process.children(recursive=True)]
    assert len(family) > 1
    process.terminate()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    engine.vllm_client.session.mount("http://", HTTPAdapter(max_retries=Retry(total=2, backoff_factor=0.1)))
    with pytest.raises(GenerationError, match=f"the vLLM server at {url} went away while it generated") as caught:
        engine.generate([[5, 6, 7]] * 4, None, 4)
    assert "\n" not in str(caught.value)
