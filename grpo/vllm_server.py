"""The vLLM server of `generation=vllm_server`: start one as TRL needs it, and say what is wrong with the one there is.

`launch/vllm_server.sh` takes the arguments of `grpo.train`, and behind a `--` more options for `vllm serve`.
"""

import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import hydra
import requests
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from grpo.check import check
from grpo.cli import WANTS_TRACEBACK, leave, start
from grpo.config import ROOT, ConfigError, RunError

PROGRAM = "launch/vllm_server.sh"
INSTEAD = "generation=vllm_colocate or generation=transformers"
more_options: list[str] = []
"""What stands behind `--` on the command line."""


def check_vllm(config: DictConfig, has_gpu: bool) -> None:
    """Check that vLLM is here, or that its server answers where one is used.

    Raises:
        ConfigError: with what is wrong first and how to go on.
    """
    if not config.train.use_vllm:
        return
    if find_spec("vllm") is None:
        raise ConfigError("train.use_vllm: vLLM is not installed: `make vllm` does it; or use generation=transformers")
    if config.train.vllm_mode == "server":
        if not has_gpu:
            raise ConfigError(
                f"generation=vllm_server: weights go to a server from GPU to GPU, and there is none here; use {INSTEAD}"
            )
        wait_for(server_url(config.train), config.train.vllm_server_timeout)


def server_url(train: DictConfig) -> str:
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
                f"no vLLM server answers at {url}: start one with {PROGRAM} and the arguments of this run, wait for it "
                f"with train.vllm_server_timeout=600, or use {INSTEAD}"
            )
        time.sleep(1)


def check_server(config: DictConfig) -> None:
    """Check that the server has this run's model and is set up as TRL needs it.

    Raises:
        ConfigError: naming the option that it lacks.
    """
    url = server_url(config.train)
    again = f"start it with {PROGRAM} and the arguments of this run"
    answer = requests.get(f"{url}/server_info", params={"config_format": "json"}, timeout=60)
    if answer.status_code == 404:
        raise ConfigError(f"the server at {url} cannot take weights, as VLLM_SERVER_DEV_MODE=1 was not set: {again}")
    settings = answer.json()["vllm_config"]
    model, wanted = settings["model_config"], config.model.model_name_or_path
    if not same_model(model["model"], wanted):
        raise ConfigError(f"the server at {url} has the model {model['model']}, this run {wanted}: {again}")
    if settings["weight_transfer_config"] is None:
        raise ConfigError(f"the server at {url} cannot take weights, without --weight-transfer-config: {again}")
    needed = config.task.max_prompt_length + config.train.max_completion_length
    if model["max_model_len"] < needed:
        raise ConfigError(
            f"the server at {url} has room for {model['max_model_len']} tokens, a prompt and its completion take "
            f"{needed}: {again}, or lower task.max_prompt_length or train.max_completion_length"
        )
    if config.train.vllm_importance_sampling_correction and model["logprobs_mode"] != "processed_logprobs":
        raise ConfigError(
            f"the server at {url} has --logprobs-mode {model['logprobs_mode']}, its log-probabilities are not those of "
            f"the policy at this temperature: {again}, or train.vllm_importance_sampling_correction=false"
        )
    images = model["multimodal_config"] is not None
    if images and requests.get(f"{url}/v1/chat/completions/render", timeout=60).status_code == 404:
        raise ConfigError(f"the server at {url} cannot take images, without --enable-scale-out: {again}")
    if is_taken("", config.train.vllm_group_port):
        raise ConfigError(f"train.vllm_group_port={config.train.vllm_group_port} is in use: choose another port")


def same_model(one: str, other: str) -> bool:
    """Whether two names, of a folder or on the hub, mean the same."""
    return one == other or (Path(one).is_dir() and Path(other).is_dir() and Path(one).samefile(other))


def is_taken(host: str, port: int) -> bool:
    """Whether something listens on a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def command(config: DictConfig) -> list[str]:
    """Return the command that serves the model of a configuration as TRL 1.16 needs it."""
    try:
        importlib.metadata.version("vllm")
        program = [str(Path(sys.executable).parent / "vllm"), "serve"]
    except importlib.metadata.PackageNotFoundError:  # the CPU build has another name, at which its own program stumbles
        program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    dtype = "bfloat16" if config.train.bf16 else "float16" if config.train.fp16 else config.model.dtype
    options = {
        "revision": config.model.model_revision,
        "dtype": dtype,
        "max-model-len": config.task.max_prompt_length + config.train.max_completion_length,
        "host": config.train.vllm_server_host,
        "port": config.train.vllm_server_port,
        "weight-transfer-config": '{"backend": "nccl"}',
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": -1,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*program, config.model.model_name_or_path, *words, "--enable-scale-out", *more_options]


def serve(config: DictConfig, log: Path) -> int:
    """Start a server, wait until it answers, and return its process; it goes on when this one ends.

    Raises:
        RunError: it did not come up, with the last thing that it said.
    """
    host, port = config.train.vllm_server_host, config.train.vllm_server_port
    if is_taken(host, port):
        raise ConfigError(f"port {port} of {host} is in use: choose another with train.vllm_server_port={port + 1}")
    with log.open("w") as output:
        environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
        server = subprocess.Popen(
            command(config), stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    url = server_url(config.train)
    print(f"starting a vLLM server for {config.model.model_name_or_path}, which may take minutes; see {log}")
    try:
        while not answers(url):
            if server.poll() is not None:
                raise RunError(f"the server ended with status {server.returncode}: {last_error(log)} (more in {log})")
            time.sleep(1)
    except BaseException:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        raise
    print(f"it answers at {url}; stop it with: kill {server.pid}")
    return server.pid


def last_error(log: Path) -> str:
    """Return the last line of a log that names an error, with the line after it."""
    lines = log.read_text().splitlines()
    where = max((number for number, line in enumerate(lines) if "Error" in line), default=len(lines) - 1)
    return " ".join(" ".join(lines[max(where, 0) : where + 2]).split())[:400] or "it said nothing"


@hydra.main(config_path=str(ROOT / "conf"), config_name="config", version_base="1.3")
def job(config: DictConfig) -> None:
    """Serve the model of one command line."""
    try:
        check(config)
        if find_spec("vllm") is None:
            raise ConfigError("vLLM is not installed: `make vllm` does it")
        if not config.train.use_vllm or config.train.vllm_mode != "server":
            raise ConfigError("generation: a server is for generation=vllm_server, which is the choice here by itself")
        if config.model.gguf_file:
            from grpo.policy import make_available

            make_available(config.model)
        folder = Path(HydraConfig.get().runtime.output_dir)
        serve(config, Path(os.path.relpath(folder / "vllm_server.log")))
    except (ConfigError, RunError) as error:
        if WANTS_TRACEBACK:
            raise
        leave(error, PROGRAM)


def main() -> None:
    """Run the command line."""
    if "--" in sys.argv:
        where = sys.argv.index("--")
        more_options[:] = sys.argv[where + 1 :]
        del sys.argv[where:]
    if not any(word.startswith("generation=") for word in sys.argv):
        sys.argv.insert(1, "generation=vllm_server")
    start(job, PROGRAM)


if __name__ == "__main__":
    main()
