"""Checks vLLM, and the server of `generation=vllm_server`, before the policy loads, with one-line errors."""

import errno
import logging
import socket
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import requests

from grpo.config.batch import longest_request
from grpo.config.facts import is_quantized
from grpo.config.transport import QUANTIZES
from grpo.generation.vllm.server_key import KEY, headers
from grpo.utils.errors import ConfigError

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from grpo.config.resolve import Resolved

LAUNCHER = "launch/vllm_server.sh"
EXTENSION = "grpo.generation.vllm.held_weights.TellsWeights"
"""Option of `vllm serve` for an extension of the server's workers, which digests their weights."""
INSTEAD = "generation=vllm_colocate or generation=transformers"
AGAIN = f"start it with {LAUNCHER} and the arguments of this run"


def check_vllm(train: "DictConfig", can_send: bool, quantized: bool = False) -> None:
    """Check that vLLM is installed if it generates, and that its server answers if there is one.

    Args:
        can_send: whether this machine can send the policy to a server: weights from GPU to GPU, or an adapter as a
            file.
        quantized: whether vLLM has to quantize as bitsandbytes does.

    Raises:
        ConfigError: the first problem, with a remedy.
    """
    if find_spec("vllm") is None:
        raise ConfigError("train.use_vllm: vLLM is not installed: `make vllm` does it; or use generation=transformers")
    if quantized and find_spec(QUANTIZES) is None:
        raise ConfigError("peft.quantization: vLLM needs vllm-bnb-plugin: `make vllm` installs it; or use peft=lora")
    if train.vllm_mode == "server":
        if not can_send:
            raise ConfigError(
                "generation=vllm_server: weights go to a server from GPU to GPU, and there is none here; use "
                f"peft=lora, of which the adapter travels alone, {INSTEAD}"
            )
        wait_for(server_url(train), train.vllm_server_timeout)


def server_url(train: "DictConfig") -> str:
    """Return the address of the server."""
    return (train.vllm_server_base_url or f"http://{train.vllm_server_host}:{train.vllm_server_port}").rstrip("/")


def answers(url: str) -> bool:
    """Whether a healthy server answers there."""
    try:
        return requests.get(f"{url}/health", timeout=10).status_code == 200
    except requests.RequestException:
        return False


def wait_for(url: str, seconds: float) -> None:
    """Wait until a server answers, and give up after so many seconds."""
    until = time.monotonic() + seconds
    while not answers(url):
        if time.monotonic() >= until:
            raise ConfigError(
                f"no vLLM server answers at {url}: start one with {LAUNCHER} and the arguments of this run, wait for "
                f"it with train.vllm_server_timeout=600, or use {INSTEAD}"
            )
        time.sleep(1)


def settings_of(url: str) -> dict[str, Any]:
    """Return how a server is set up.

    Raises:
        ConfigError: it does not say so.
    """
    answer = requests.get(f"{url}/server_info", params={"config_format": "json"}, headers=headers(), timeout=60)
    if answer.status_code == 401:
        raise ConfigError(f"the server at {url} asks for its key: set {KEY} to what it is where the server was started")
    if answer.status_code == 404:
        raise ConfigError(f"the server at {url} cannot take weights, as VLLM_SERVER_DEV_MODE=1 was not set: {AGAIN}")
    try:
        return answer.json()["vllm_config"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"what answers at {url} is no vLLM server that this run can use: {AGAIN}") from error


def check_server(
    train: "DictConfig", wanted: str, needed: int, peft: "DictConfig | None" = None, staleness: int = 0
) -> None:
    """Check that the server has this run's model and is set up as TRL needs it.

    Args:
        wanted: name of the model.
        needed: tokens of the longest prompt with its completion.
        peft: the adapter that it gets; None if it gets all weights.
        staleness: number of older adapters that requests may still use.

    Raises:
        ConfigError: naming the option that it lacks.
    """
    url = server_url(train)
    settings = settings_of(url)
    model = settings["model_config"]
    if not any(same_model(name, wanted) for name in (model["model"], model["served_model_name"])):
        raise ConfigError(f"the server at {url} has the model {model['model']}, this run {wanted}: {AGAIN}")
    if peft is not None:
        check_lora(url, settings, peft, staleness)
    elif settings["weight_transfer_config"] is None:
        raise ConfigError(f"the server at {url} cannot take weights, without --weight-transfer-config: {AGAIN}")
    if train.vllm_importance_sampling_correction and model["logprobs_mode"] != "processed_logprobs":
        raise ConfigError(
            f"the server at {url} has --logprobs-mode {model['logprobs_mode']}, its log-probabilities are not those of "
            f"the policy at this temperature: {AGAIN}, or train.vllm_importance_sampling_correction=false"
        )
    images = model["multimodal_config"] is not None
    if images and requests.get(f"{url}/v1/chat/completions/render", headers=headers(), timeout=60).status_code == 404:
        raise ConfigError(f"the server at {url} cannot take images, without --enable-scale-out: {AGAIN}")
    check_room(train, needed)
    if peft is None and is_taken("", train.vllm_group_port):
        raise ConfigError(
            f"train.vllm_group_port={train.vllm_group_port} is in use, perhaps by another run: a server serves "
            "one run, so give this one a server and ports of its own"
        )


def check_lora(url: str, settings: dict[str, Any], peft: "DictConfig", staleness: int) -> None:
    """Check that a server takes a run's adapters while it runs, on weights quantized as the run's are."""
    lora, rank = settings["lora_config"], peft.get("r", 8)
    if lora is None:
        raise ConfigError(f"the server at {url} cannot take adapters, without --enable-lora: {AGAIN}")
    if lora["max_lora_rank"] < rank:
        most = f"takes adapters up to rank {lora['max_lora_rank']}"
        raise ConfigError(f"the server at {url} {most}, this run has peft.r={rank}: {AGAIN}")
    if staleness and lora["max_loras"] < adapters(staleness):
        raise ConfigError(
            f"the server at {url} has --max-loras {lora['max_loras']}, and engine.staleness={staleness} needs "
            f"{adapters(staleness)}: {AGAIN}"
        )
    quantization = settings["model_config"]["quantization"]
    if peft.get("quantization") and quantization is None:
        raise ConfigError(f"the server at {url} has whole weights, this run peft.quantization: {AGAIN}")
    if requests.get(f"{url}/v1/load_lora_adapter", headers=headers(), timeout=60).status_code == 404:
        raise ConfigError(
            f"the server at {url} cannot take adapters, as VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 was not set: {AGAIN}"
        )


def adapters(staleness: int) -> int:
    """Return how many adapters a server holds at once: the newest, older ones in use, and one that is replaced."""
    return staleness + 2


def check_room(train: "DictConfig", needed: int) -> None:
    """Check that so many tokens, of a prompt and its completion, fit into the server's context."""
    url = server_url(train)
    room = settings_of(url)["model_config"]["max_model_len"]
    if room < needed:
        raise ConfigError(
            f"the server at {url} has room for {room} tokens, a prompt and its completion take {needed}: {AGAIN}, and "
            f"-- --max-model-len {needed} behind them"
        )


def same_model(name: Any, other: str) -> bool:
    """Whether two names, of a folder or on the hub, mean the same."""
    name = str(name)
    return name == other or (Path(name).is_dir() and Path(other).is_dir() and Path(name).samefile(other))


def is_taken(host: str, port: int) -> bool:
    """Whether something listens on a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def started_at(url: str) -> str:
    """Return when the process of a server was started, as its metrics say; nothing if they do not."""
    answer = requests.get(f"{url}/metrics", headers=headers(), timeout=60)
    answer.raise_for_status()
    lines = answer.text.splitlines()
    return next((line for line in lines if line.startswith("process_start_time_seconds")), "")


def can_be_asked(url: str) -> bool:
    """Return whether a server can digest its weights; otherwise warn that they are not checked."""
    with suppress(ConfigError):  # it does not say how it was started
        if settings_of(url).get("parallel_config", {}).get("worker_extension_cls") == EXTENSION:
            return True
    log.warning(
        f"the vLLM server at {url} cannot say which weights it holds, so a lost transfer is found by log-probabilities "
        f"alone, which may take hundreds of steps: start it with {LAUNCHER}"
    )
    return False


def check_run(settings: "Resolved") -> None:
    """Check that vLLM is installed, and that the server, if there is one, suits a run; a ConfigError otherwise."""
    import torch  # takes seconds, and the launcher of servers needs the rest of this file alone

    train, peft, by_adapter = settings.train, settings.peft, settings.transport.adapter
    has_gpu = torch.cuda.is_available() and not train.use_cpu
    check_vllm(train, has_gpu or by_adapter, is_quantized(peft))
    if settings.engine.quantization not in (None, "fp8_per_channel") and not has_gpu:
        raise ConfigError(
            f"engine.quantization={settings.engine.quantization}: on a CPU vLLM quantizes per channel; use "
            "fp8_per_channel"
        )
    if train.vllm_mode == "server":
        longest = longest_request(settings.task, train)
        options = (peft if by_adapter else None, settings.engine.staleness)
        check_server(train, settings.model.model_name_or_path, longest, *options)


def described(settings: "Resolved") -> str:
    """Return a line: where vLLM generates, and whether it gets adapter or weights, with the reason."""
    train, transport = settings.train, settings.transport
    where = {"colocate": "in this process", "server": f"on {server_url(train)}"}[train.vllm_mode]
    staleness = settings.engine.staleness
    ahead = f", for {staleness} further {'step' if staleness == 1 else 'steps'} at once" if staleness else ""
    line = f"vLLM generates, {where}{ahead}"
    if settings.peft is None:
        return line
    if not transport.adapter:
        gets = "all weights before each generation, with the adapter merged in"
        return f"{line}; it gets {gets}: {transport.merged_because}"
    line += "; it gets the adapter before each generation, and"
    if settings.engine.share_weights:
        return f"{line} the frozen weights exist once"
    reason = f": {transport.unshared_because}" if transport.unshared_because else ""
    return f"{line} has frozen weights of its own{reason}"
