"""Secrets come from the environment: typed into a configuration they would be written into each run directory."""

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpo.utils.errors import ConfigError

NAME = re.compile(
    r"token$|(api|access|auth|secret|hf)_?tokens$|(^|_)(secrets?|passwords?|passwd|pwd|passphrase|credentials?|cookies?)$"
    r"|(^|_)(authorization|bearer)$|(api|access|auth|private|secret|account|openai|anthropic|wandb|hf|azure)_?keys?$|^key$"
)
"""Last parts of keys whose value is a secret."""
GROUP = re.compile(r"(^|\.)(secrets|passwords|credentials|tokens|api_keys)\.")
"""Parts of keys whose values are always secrets."""
NAMED_BY_USERS = re.compile(r"^[+.]*(reward|task\.tasks)\.[^.]*\.?")
"""Beginnings of keys with a name that the user has chosen: `reward.tokens` says nothing about the keys below it."""
NUMBERS = re.compile(r"(^|_)(secret|password|passwd|pwd|passphrase)s?$")
"""Last parts of keys whose value may be a number and a secret."""
OF_A_TOKENIZER = re.compile(r"^<.*>$|^\[.*\]$|^\W*$")
"""Values that are special tokens or separators of a tokenizer."""
NO_SECRETS = ("", "???", "null", "none", "true", "false", "empty")
"""Values, in lower case, that mean "no secret"; `EMPTY` is the API key of a server without keys."""
WELL_KNOWN = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|\bsk-[\w-]{20,}"  # OpenAI, Anthropic, OpenRouter
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\bglpat-[\w-]{20,}"  # GitHub, GitLab
    r"|\bxox[abeoprs]-[\w-]{10,}|\bnvapi-[\w-]{20,}|\bAIza[\w-]{35}"  # Slack, NVIDIA, Google
    r"|\b(AKIA|ASIA)[0-9A-Z]{16}\b"  # Amazon
    r"|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\."  # JSON Web Tokens (RFC 7519)
    r"|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:@]*:[^/\s:@$]+@|://[^/\s:@$]{16,}@"  # PEM; a password in an address
    r"|[?&](api_?key|token|secret|password)=[^&\s$]+"
)
INTERPOLATION = re.compile(r"\$\{[^{},]*\}")
"""A reference without a default."""
PAIR = re.compile(r"[\"']?([\w-]+)[\"']?\s*:\s*(\"[^\"]*\"|'[^']*'|\$\{[^}]*\}|[^,{}\s]+)")
"""A key and its value in a dictionary that was typed."""
COPIES = re.compile(r"hydra\.(overrides|job\.override_dirname)")
"""Keys under which Hydra keeps the command line."""
FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:([^,}]+)")


def refuse_secrets(config: DictConfig, overrides: list[str]) -> None:
    """Refuse a configuration with a typed secret.

    Args:
        config: the composed, unresolved configuration.
        overrides: typed overrides; in a multirun, the values of all jobs.

    Raises:
        ConfigError: there is a typed secret; the line has its key, not its value.
    """
    plus = {key.lstrip("+"): key for key in (text.partition("=")[0] for text in overrides)}
    typed = [(key.lstrip("+~"), value) for key, equals, value in (text.partition("=") for text in overrides) if equals]
    composed = [(key, value) for key, value in leaves(OmegaConf.to_container(config)) if not COPIES.match(key)]
    inside = [(f"{key}.{name}", inner) for key, value in typed for name, inner in PAIR.findall(value) if "{" in value]
    for key, value in [*typed, *inside, *composed]:
        if is_secret(key, value) and not is_from_elsewhere(value):
            name = re.sub(r"\W", "_", key.rpartition(".")[2]).upper()
            variable = name if "_" in name else f"MY_{name}"
            raise ConfigError(
                f"{key}: a secret that is typed would be written to disk; put it into the environment and type "
                f"'{plus.get(key, key)}=${{oc.env:{variable}}}'"
            )


def without_secrets(config: DictConfig) -> DictConfig:
    """Return a resolved configuration that can be written: secrets stay the interpolations that they are."""
    raw, resolved = (OmegaConf.to_container(config, resolve=resolve) for resolve in (False, True))
    return OmegaConf.create(as_typed(raw, resolved, ""))


def as_typed(raw: Any, resolved: Any, key: str) -> Any:
    """Return a resolved value, or for a secret the typed reference."""
    if isinstance(raw, dict) and isinstance(resolved, dict):
        return {name: as_typed(raw[name], value, f"{key}.{name}") for name, value in resolved.items()}
    if isinstance(raw, list) and isinstance(resolved, list):
        return [as_typed(typed, value, key) for typed, value in zip(raw, resolved, strict=True)]
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
    """Return whether a value is a secret, by its key or by its own form."""
    key = NAMED_BY_USERS.sub("", key)
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key.rpartition(".")[2]).lower().replace("-", "_")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(NUMBERS.search(name))
    if not isinstance(value, str) or value.strip("'\"").lower() in NO_SECRETS:
        return False
    named = NAME.search(name) or GROUP.search(key.lower())
    return bool(WELL_KNOWN.search(value) or (named and not OF_A_TOKENIZER.search(value)))


def is_from_elsewhere(value: Any) -> bool:
    """Return whether all of a value but a scheme is interpolated: `${oc.env:TOKEN}`, `Bearer ${oc.env:TOKEN}`."""
    rest, count = INTERPOLATION.subn("", str(value).strip("'\""))
    return count > 0 and rest.strip().lower() in ("", "bearer", "basic", "token")
