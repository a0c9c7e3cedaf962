"""`task.thinking` in the words of a chat template: each family has its own argument for it."""

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from grpo.utils.errors import ConfigError

ARGUMENTS: dict[str, tuple[type, str]] = {
    "enable_thinking": (bool, "true or false"),
    "thinking": (bool, "true or false"),
    "reasoning_effort": (str, "low, medium or high"),
}
"""Arguments of chat templates, with their types and what `task.thinking` may be for them."""


def template_of(config: DictConfig) -> dict[str, Any]:
    """Return the arguments of the chat template: `train.chat_template_kwargs`, and `task.thinking` as `thinking`."""
    thinking = config.task.get("thinking")  # runs of earlier versions lack it
    return {**(config.train.get("chat_template_kwargs") or {}), **({} if thinking is None else {"thinking": thinking})}


def named_as_in(chat_template: str | None, template: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return arguments with `thinking` under the name that a chat template has for it.

    Args:
        chat_template: of the tokenizer or the processor.
        template: of `template_of`.
        name: of the model.

    Raises:
        ConfigError: the template has no such argument, or it takes other values.
    """
    arguments = dict(template)
    if "thinking" not in arguments:
        return arguments
    thinking = arguments.pop("thinking")
    known = [argument for argument in ARGUMENTS if re.search(rf"\b{argument}\b", chat_template or "")]
    if not known:
        raise ConfigError(
            f"task.thinking={str(thinking).lower()}: the chat template of {name} has none of {', '.join(ARGUMENTS)}: "
            "leave it out"
        )
    for argument in known:
        if isinstance(thinking, ARGUMENTS[argument][0]):
            return arguments | {argument: thinking}
    raise ConfigError(
        f"task.thinking={str(thinking).lower()}: the chat template of {name} takes {ARGUMENTS[known[0]][1]} "
        f"({known[0]})"
    )
