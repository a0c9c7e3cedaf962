"""The process of tools or of an environment: `python -m grpo.tools.worker TRAINER LINE`.

It loads the functions or the class once, and forks for each requested set of tools or environment: an instance that
hangs, dies or exhausts memory does not affect the others.
"""

import inspect
import io
import os
import re
import signal
import sys
import typing
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from types import SimpleNamespace
from typing import Any

from rewards.isolation.call import awaited, in_this_process, plain, valid_text
from rewards.isolation.loader import load, what_and_where
from rewards.isolation.supervisor import reap, supervise
from rewards.isolation.worker import serve

LONGEST = 100_000
"""Characters of a tool's result; the rest is cut."""
PLACE = re.compile(r" \([^()]*, line \d+\)$")
"""File and line of an exception, which are for people and not for the policy."""
NOT_TOOLS = ("reset", "get_reward")
"""Methods of an environment that TRL calls itself."""


def main() -> None:
    """Load and describe the named functions or class, and fork for each line from the trainer."""
    trainer, line = map(int, sys.argv[1:])
    supervise(trainer, line)
    connection = Connection(line)
    names, is_environment, (first, named) = connection.recv()
    try:
        loaded = {name: load(name, name, "grpo.tools") for name in names}
        is_environment = inspect.isclass(loaded[names[0]]) if is_environment is None else is_environment
        make = (
            partial(loaded[names[0]], *first, **named) if is_environment else lambda: SimpleNamespace(**by_name(loaded))
        )
        description, problem = described(make(), is_environment), None
    except ValueError as error:
        description, problem = {}, str(error)
    except Exception as error:
        description, problem = {}, f"{names[0]}: {what_and_where(error)}"
    connection.send((problem, description))
    if problem is None:
        fork_for(connection, make)


def fork_for(connection: Connection, make: Callable[[], Any]) -> None:
    """Fork for each line that the trainer sends, and end the forked processes whose numbers it sends."""
    children: set[int] = set()
    while True:
        try:
            asked = connection.recv()
            children -= reap().keys()
            if asked in children:  # until it is reaped, no other process has its number
                os.kill(asked, signal.SIGKILL)
            if asked != "fork":
                continue
            handle = recv_handle(connection)
        except (EOFError, OSError):
            return
        try:
            process, refused = os.fork(), None
        except OSError as error:
            process, refused = None, error.strerror
        if process == 0:
            connection.close()
            serve_instance(Connection(handle), make)
            os._exit(0)
        os.close(handle)
        children |= {process} if process else set()
        connection.send((process, refused))


def by_name(loaded: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return functions by their own names.

    Raises:
        ValueError: two functions have the same name, or a function is a class.
    """
    functions: dict[str, Callable[..., Any]] = {}
    for place, function in loaded.items():
        if not inspect.isfunction(function):
            raise ValueError(f"{place}: a tool is a function; a class with tools is an environment: task.environment")
        if function.__name__ in functions:
            raise ValueError(f"{place}: there is another tool of the name {function.__name__}")
        functions[function.__name__] = function
    return functions


def described(instance: Any, is_environment: bool) -> dict[str, Any]:
    """Return a description for model and TRL: class name, whether it scores, and each tool's docstring and signature.

    Raises:
        ValueError: an environment has no `reset`.
    """
    if not is_environment:
        return {"name": None, "tools": {name: signature(f) for name, f in vars(instance).items()}}
    kind = type(instance)
    methods = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
    if "reset" not in methods:
        raise ValueError(f"{kind.__name__} has no method reset, which begins an episode; it has: {', '.join(methods)}")
    tools = {name: signature(getattr(instance, name)) for name in methods if name not in NOT_TOOLS}
    return {"name": kind.__name__, "scores": "get_reward" in methods, "tools": tools}


def signature(function: Callable[..., Any]) -> tuple[str | None, inspect.Signature]:
    """Return docstring and signature, with types that are no text and defaults that another process can have."""
    hints, empty = typing.get_type_hints(function), inspect.Parameter.empty
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        default = empty if parameter.default is empty else plain(parameter.default)
        annotation = hints.get(parameter.name, empty)
        parameters.append(
            inspect.Parameter(parameter.name, parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)
        )
    return inspect.getdoc(function), inspect.Signature(parameters, return_annotation=hints.get("return", empty))


def serve_instance(connection: Connection, make: Callable[[], Any]) -> None:
    """Make an instance at the first call, and answer calls of its methods until the connection is closed."""
    instance = None

    def answer(run: Callable[..., Any], name: str | None, arguments: dict[str, Any]) -> tuple[Any, str, str]:
        nonlocal instance
        try:
            with in_this_process():
                instance = make() if instance is None else instance
                if name is None:
                    return plain({key: item for key, item in vars(instance).items() if not key.startswith("_")}), "", ""
                result = awaited(getattr(instance, name)(**arguments), run)
            if name == "get_reward":
                return plain(result), "", ""
            return as_text(result) if name == "reset" else as_result(result), "", ""
        except BaseException as error:  # SystemExit too
            where = valid_text(what_and_where(error))
            return None, PLACE.sub("", where)[:LONGEST], where

    serve(connection, answer)


def as_result(result: Any) -> str | list[dict[str, Any]] | None:
    """Return a tool's result for the model: text, or parts of a message where it is an image or has one.

    Images are pictures of PIL, alone, in a list with texts, or in parts of messages, and become the bytes of a PNG.

    Raises:
        ValueError: an image is no picture.
    """
    parts = result if isinstance(result, list | tuple) else [result]
    pictures = [part["image"] if is_part(part, "image") else part for part in parts]
    if not any(is_part(part, "image") or hasattr(part, "getexif") for part in parts):
        return as_text(result)
    texts = [part["text"] if is_part(part, "text") else part for part in parts]
    return [
        {"type": "image", "image": png(picture)}
        if hasattr(picture, "getexif") or is_part(part, "image")
        else {"type": "text", "text": as_text(text)}
        for part, picture, text in zip(parts, pictures, texts, strict=True)
    ]


def is_part(value: Any, kind: str) -> bool:
    """Whether a value is a part of a message, of text or with an image."""
    return isinstance(value, dict) and value.get("type") == kind and kind in value


def png(picture: Any) -> bytes:
    """Return a picture of PIL as the bytes of a PNG.

    Raises:
        ValueError: it is none.
    """
    if not hasattr(picture, "getexif"):
        raise ValueError(f"an image of a result is a picture of PIL, not {type(picture).__name__}")
    file = io.BytesIO()
    picture.convert("RGB").save(file, "PNG")
    return file.getvalue()


def as_text(result: Any) -> str | None:
    """Return a result as text for the model; None for a `reset` without text.

    Raises:
        ValueError: it is an image.
    """
    if result is None:
        return None
    if hasattr(result, "getexif"):
        raise ValueError("the text of a reset cannot be an image: return it from a tool, or have it in the prompt")
    text = valid_text(str(result))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


if __name__ == "__main__":
    main()
