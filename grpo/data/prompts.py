"""The prompts of rows: `task.prompt` with columns in braces or a column of messages, the system prompt, examples."""

import ast
import json
import re
import string
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from grpo.utils.errors import ConfigError

if TYPE_CHECKING:  # a script that trains needs no configuration
    from omegaconf import DictConfig

BRACES = re.compile(r"(\\[a-zA-Z]+)?(?<!\{)\{([^{}]*)\}(?!\})")
"""A pair of braces, with the LaTeX command before it."""
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "observation": "tool"}
"""Roles of ShareGPT's data sets, by TRL's."""
Row = Mapping[str, Any]
Prompt = str | list[dict[str, Any]]


def template_of(task: "DictConfig", columns: Container[str]) -> str:
    """Return `task.prompt` with columns in braces; the name of a column alone stands for that column."""
    return f"{{{task.prompt}}}" if task.prompt in columns else _with_text(task.prompt, columns, "task.prompt")


def _with_text(template: str, columns: Container[str], key: str) -> str:
    r"""Return a template with doubled braces where they are text: around no name, and behind a command, `\boxed{}`.

    Raises:
        ConfigError: the name of a column stands behind a command, which may mean the text or the column.
    """

    def doubled(braces: re.Match[str]) -> str:
        command, name = braces[1] or "", re.split("[:!]", braces[2])[0]
        is_column = column_of(name, columns) in columns
        if command and is_column:
            raise ConfigError(
                f"{key}={template!r}: write {command}{{{{{{{name}}}}}}} for the column, or {command}{{{{{name}}}}} for "
                "this text"
            )
        is_text = command or not (is_column or re.match(r"[^\W\d]\w*\s*(?:[.\[]|\Z)", name))
        return f"{command}{{{{{braces[2]}}}}}" if is_text else braces[0]

    return BRACES.sub(doubled, str(template))


def columns_of(template: str, columns: Container[str]) -> list[str]:
    """Return the columns that a template names: `{question}`, `{row[name]}`, `{table.name}`."""
    return [column_of(name, columns) for _, name, _, _ in string.Formatter().parse(template) if name is not None]


def column_of(name: str, columns: Container[str]) -> str:
    """Return the column of a name such as `table.name`."""
    return name if name in columns else re.split(r"[.\[]", name)[0]


def value_of(row: Row, name: str) -> Any:
    """Return a value of a row: of a column, or of a field in it, as in `table.name` and `row[name]`."""
    if name in row:
        return row[name]
    first, *path = re.findall(r"[^.\[\]]+", name)
    value = row[first]
    for field in path:
        value = value if value is None else value[int(field)] if isinstance(value, list) else value[field]
    return value


def _filled(template: str, row: Row, key: str) -> str | None:
    """Return a template with the values of a row, None without one; ConfigError if a field is missing or unsuitable."""
    parts = []
    with _field_errors(key, template):
        for literal, name, form, conversion in string.Formatter().parse(template):
            parts.append(literal)
            if name is not None:
                value = value_of(row, name)
                if value is None:
                    return None
                parts.append(format(string.Formatter().convert_field(value, conversion), form or ""))
    return "".join(parts)


@contextmanager
def _field_errors(key: str, template: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, IndexError, ValueError, TypeError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"{key}={template!r}: {reason}; it names columns in braces, and braces that are text are doubled, {{{{ }}}}"
        ) from error


def prompts_from(task: "DictConfig", columns: Container[str]) -> Callable[[Row], Prompt | None]:
    """Return a function that builds the prompt of a row with these columns; None of a row without a question.

    Raises:
        ConfigError: an example or a row lacks a field that `task.prompt` names, or messages have another form.
    """
    template, system = template_of(task, columns), task.system_prompt
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    alone = names[0] if template in (f"{{{name}}}" for name in names) else None
    shots = [_example(task, template, example) for example in task.few_shot.examples]
    before = (f"{system}\n\n" if system else "") + "".join(asked + answer for asked, answer in shots)
    turns = [
        {"role": role, "content": text}
        for shot in shots
        for role, text in zip(("user", "assistant"), shot, strict=True)
    ]

    def prompt(row: Row) -> Prompt | None:
        with _field_errors("task.prompt", template):
            value = value_of(row, alone) if alone else None
        messages = messages_of(value, str(alone))
        if messages and not task.conversational:
            raise ConfigError(f"task.prompt={alone}: a column of messages, which needs task.conversational=true")
        if messages is None:
            text = _filled(template, row, "task.prompt")
            if text is None or (names and not task.images and not any(str(value_of(row, n)).strip() for n in names)):
                return None
            if not task.conversational:
                return before + text
            messages = [{"role": "user", "content": text}]
        while messages and messages[-1]["role"] == "assistant":  # the answer, which the policy is to give
            messages.pop()
        contents = [message["content"] for message in messages]
        asked = task.images or (task.environment and not names)  # by an image, or by the environment
        if not messages or None in contents or not (asked or str(contents[-1]).strip()):
            return None
        has_system = messages[0]["role"] == "system"  # in place of the task's
        first = [messages.pop(0)] if has_system else [{"role": "system", "content": system}] if system else []
        return [*first, *turns, *messages] if messages else None

    return prompt


def _example(task: "DictConfig", template: str, example: Any) -> tuple[str, str]:
    """Return the question and the answer of an example of `task.few_shot`."""
    completion = _with_text(task.few_shot.completion, example, "task.few_shot.completion")
    for name in (*columns_of(template, example), *columns_of(completion, example)):
        if name not in example:
            raise ConfigError(f"task.few_shot.examples: {example} lacks {name!r}, which task.prompt names")
    asked, answer = _filled(template, example, "task.prompt"), _filled(completion, example, "task.few_shot.completion")
    return asked or "", answer or ""


def messages_of(value: Any, name: str) -> list[dict[str, Any]] | None:
    """Return the messages in a value, also in ShareGPT's form or as JSON; None if it is text or another plain value.

    Raises:
        ConfigError: a list or a dictionary holds no messages.
    """
    if isinstance(value, str) and re.match(r"\s*\[\s*\{", value):
        parsed = _parsed(value)
        is_chat = isinstance(parsed, list) and all(isinstance(message, dict) for message in parsed)
        value = parsed if is_chat and all({"role", "from"} & message.keys() for message in parsed) else value
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list):
        return None
    try:
        pairs = [(message.get("role") or message["from"], _content(message)) for message in messages]
        return [{"role": ROLES.get(role.lower(), role.lower()), "content": content} for role, content in pairs]
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"task.prompt={name}: a list of messages with `role` and `content`, or `from` and `value`, is needed, not "
            f"{value!r:.80}"
        ) from error


def _parsed(text: str) -> Any:
    """Return the value of JSON, or of Python's own notation, which CSV files have; None if it is neither."""
    try:
        return json.loads(text)
    except ValueError:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None


def _content(message: dict[str, Any]) -> Any:
    """Return the content of a message, of parts that are all text as one text."""
    content = message["value"] if message.get("content") is None and "value" in message else message["content"]
    if isinstance(content, list) and content and all(part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    return content
