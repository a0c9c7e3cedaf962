"""`task.thinking` in the words of a chat template: each family has its own argument for it."""

import re
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment
from jinja2.meta import find_undeclared_variables
from omegaconf import DictConfig

from grpo.config.mixture import single_tasks
from grpo.utils.errors import ConfigError

KEY = "task.thinking"
ARGUMENTS: dict[str, tuple[type, str]] = {
    "enable_thinking": (bool, "true or false"),
    "thinking": (bool, "true or false"),
    "reasoning_effort": (str, "low, medium or high"),
}
"""Arguments of chat templates, with their types and what `task.thinking` may be for them."""
MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Tags of transformers' own, which are not Jinja's."""


def template_of(config: DictConfig) -> dict[str, Any]:
    """Return the arguments of the chat template, `train.chat_template_kwargs`, and `task.thinking` under that name.

    Where all prompts are plain there is no template to tell that it should not think.
    """
    thinking = config.task.get("thinking")  # runs of earlier versions lack it
    if thinking is False and not any(single.conversational for single in single_tasks(config.task).values()):
        thinking = None
    return {**(config.train.get("chat_template_kwargs") or {}), **({} if thinking is None else {KEY: thinking})}


def named_as_in(chat_template: Any, template: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return arguments with `task.thinking` under the name that a chat template has for it.

    Args:
        chat_template: of the tokenizer or the processor, or several by their names.
        template: of `template_of`.
        name: of the model.

    Raises:
        ConfigError: the template has no such argument for a policy to think, it takes other values, or it is given.
    """
    arguments = dict(template)
    if KEY not in arguments:
        return arguments
    thinking = arguments.pop(KEY)
    typed = f"{KEY}={str(thinking).lower()}"
    template_here = f"{typed}: the chat template of {name}"
    texts = chat_template.values() if isinstance(chat_template, Mapping) else [chat_template or ""]
    read: set[str] = set().union(*map(arguments_of, texts))
    known = [argument for argument in ARGUMENTS if argument in read]
    if not known and thinking is False:  # as `model=qwen3_4b` says of another model's folder, too
        return arguments
    if not known:
        raise ConfigError(f"{template_here} has none of {', '.join(ARGUMENTS)}; give {KEY}=null")
    if twice := [argument for argument in known if argument in arguments]:
        raise ConfigError(f"{typed}: train.chat_template_kwargs has {twice[0]}: leave it out there, or give {KEY}=null")
    for argument in known:
        if isinstance(thinking, ARGUMENTS[argument][0]):
            return arguments | {argument: thinking}
    raise ConfigError(f"{template_here} takes {ARGUMENTS[known[0]][1]} ({known[0]})")


def arguments_of(chat_template: str) -> set[str]:
    """Return the names of the arguments that a chat template reads."""
    jinja = Environment(extensions=["jinja2.ext.loopcontrols"])
    return find_undeclared_variables(jinja.parse(MARKS.sub("", chat_template)))
