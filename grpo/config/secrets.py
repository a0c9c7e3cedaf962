"""Secrets come from the environment: typed into a configuration they would be written into each run directory."""

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpo.errors import ConfigError

NAME = re.compile(
    r"(^|_)(token|secrets?|passwords?|passwd|passphrase|credentials?|authorization|(api|access|auth|private|secret|account)_?keys?)$|^key$"
)
"""Last parts of keys whose value is a secret."""
NUMBERS = re.compile(r"(^|_)(secret|password|passwd|passphrase)s?$")
"""Those whose value may be a number and a secret."""
OF_A_TOKENIZER = re.compile(r"^(bos|eos|pad|unk|sep|cls|mask|image|video|audio|vision|stop|start|end|special)_token$")
WELL_KNOWN = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|\bsk-[\w-]{20,}"  # OpenAI, Anthropic, OpenRouter
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\bglpat-[\w-]{20,}"  # GitHub, GitLab
    r"|\bxox[abeoprs]-[\w-]{10,}|\bnvapi-[\w-]{20,}|\bAIza[\w-]{35}"  # Slack, NVIDIA, Google
    r"|\b(AKIA|ASIA)[0-9A-Z]{16}\b"  # Amazon
    r"|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\."  # JSON Web Tokens (RFC 7519)
    r"|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:@]+:[^/\s:@]+@"  # PEM; a password in an address
)
COPIES = re.compile(r"hydra\.(overrides|job\.override_dirname)")
"""Keys under which Hydra keeps the command line."""
FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:([^,}]+)")


def refuse_secrets(config: DictConfig, overrides: list[str]) -> None:
    """Refuse a configuration with a secret in it that was typed.

    Args:
        config: composed, and not resolved.
        overrides: what was typed; in a multirun, the values of all jobs.

    Raises:
        ConfigError: there is one; the line has its key, not its value.
    """
    typed = [(key.lstrip("+~"), value) for key, equals, value in (text.partition("=") for text in overrides) if equals]
    composed = [(key, value) for key, value in leaves(OmegaConf.to_container(config)) if not COPIES.match(key)]
    for key, value in [*typed, *composed]:
        if is_secret(key, value) and not is_from_elsewhere(value):
            name = re.sub(r"\W", "_", key.rpartition(".")[2]).upper()
            variable = name if "_" in name else f"MY_{name}"
            raise ConfigError(
                f"{key}: a secret that is typed would be written to disk; put it into the environment and type "
                f"'{key}=${{oc.env:{variable}}}'"
            )


def without_secrets(config: DictConfig) -> DictConfig:
    """Return a resolved configuration that can be written: secrets stay the interpolations that they are."""
    raw, resolved = (OmegaConf.to_container(config, resolve=resolve) for resolve in (False, True))
    return OmegaConf.create(kept(raw, resolved, ""))


def kept(raw: Any, resolved: Any, key: str) -> Any:
    """Return a resolved value, and where it is a secret what was typed for it."""
    if isinstance(raw, dict) and isinstance(resolved, dict):
        return {name: kept(raw[name], value, f"{key}.{name}") for name, value in resolved.items()}
    if isinstance(raw, list) and isinstance(resolved, list):
        return [kept(one, value, key) for one, value in zip(raw, resolved, strict=True)]
    variables = FROM_ENVIRONMENT.findall(raw) if isinstance(raw, str) else []
    secret = is_secret(key, resolved) or any(is_secret(name, "any") for name in variables)
    return raw if secret and isinstance(raw, str) and "${" in raw else resolved


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested dictionaries and lists with their keys; those in a list have the key of the list."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, key)
    else:
        yield key, value


def is_secret(key: str, value: Any) -> bool:
    """Return whether a value is a secret, by the last part of its key or by its own form."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key.rpartition(".")[2]).lower().replace("-", "_")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(NUMBERS.search(name))
    if not isinstance(value, str) or value.lower() in ("", "???", "null", "none", "true", "false"):
        return False
    return bool(WELL_KNOWN.search(value) or (NAME.search(name) and not OF_A_TOKENIZER.search(name)))


def is_from_elsewhere(value: Any) -> bool:
    """Return whether a value is an interpolation alone, with nothing in it that has the form of a secret."""
    text = str(value).strip("'\"")
    return text.startswith("${") and text.endswith("}") and not WELL_KNOWN.search(text)
