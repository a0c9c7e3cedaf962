"""From the `fn` of a reward to its function."""

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from inspect import isclass, isfunction
from pathlib import Path
from types import ModuleType
from typing import Any

from rewards.isolation.extras import not_installed
from rewards.text import printable

GROUP = "group_id"
"""Argument of a reward that compares the completions of a group: for each completion, the number of its group."""
FROM_TRL = (
    *("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"),
    GROUP,
)


def load(fn: str, setting: str, group: str = "grpo.rewards") -> Callable[..., Any]:
    """Return the function or class of `package.module.function`, `path/to/file.py:function`, or an entry point's name.

    Args:
        setting: the key in the configuration, for messages.

    Raises:
        ValueError: the function cannot be loaded; a line with the file or module, the line number and the reason.
    """
    for entry in entry_points(group=group, name=fn):
        fn = entry.value
    place, separator, function = fn.rpartition(":" if ":" in fn else ".")
    if not separator or fn.endswith(".py"):
        forms = "package.module.function, path/to/file.py:function, or the name of an entry point of"
        raise ValueError(f"{setting}: write {forms} {group}")
    if place.endswith(".py") and not Path(place).is_file():
        raise ValueError(f"{setting}: there is no file {Path(place).absolute()}")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}."):
            raise ValueError(f"{setting}: {error}; a function in a file is path/to/file.py:function") from error
        raise ValueError(f"{setting}: {what_and_where(error)}") from error
    loaded = getattr(module, function, None)
    if not callable(loaded):
        values = [(key, value) for key, value in vars(module).items() if isfunction(value) or isclass(value)]
        names = [key for key, value in values if value.__module__ == module.__name__]
        raise ValueError(f"{setting}: no function {function} in {place}; it has: {', '.join(names)}")
    return loaded


def bind(function: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Return the function with `kwargs` bound; it accepts all columns and passes on those that the function names.

    A function's attribute `check`, if there is one, is called with `kwargs`, so that the function can check its
    requirements before the run.

    Raises:
        ValueError: the function does not take an argument of `kwargs`, or its `check` has raised it.
    """
    parameters = inspect.signature(function).parameters
    try:
        inspect.signature(function).bind_partial(**kwargs)
    except TypeError as error:
        known = ", ".join(key for key, parameter in parameters.items() if parameter.default is not parameter.empty)
        raise ValueError(f"reward.{name}.kwargs: {error}; it takes: {known}") from error
    for key in kwargs:
        close = difflib.get_close_matches(key, parameters, n=1)
        if key not in parameters and close:  # `**columns` would accept it without effect
            raise ValueError(f"reward.{name}.kwargs.{key}: did you mean {close[0]}?")
    try:
        if check := getattr(function, "check", None):
            check(**kwargs)
    except Exception as error:
        reason = error if isinstance(error, ValueError) else what_and_where(error)
        raise ValueError(f"reward.{name}: {reason}") from error
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def reward(**columns: Any) -> Any:
        taken = columns if takes_all else {key: value for key, value in columns.items() if key in parameters}
        return function(**{**taken, **kwargs})

    return reward


def needs(function: Callable[..., Any], kwargs: dict[str, Any]) -> list[str]:
    """Return the arguments without which the function cannot be called, and `environments` if it names them.

    A function's attribute `compares`, if there is one, names the argument that makes it compare the completions of a
    group.
    """
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in named if p.default is p.empty or p.name == "environments"]
    if kwargs.get(getattr(function, "compares", "")) and GROUP not in required:
        required.append(GROUP)
    return [key for key in required if key not in kwargs]


def what_and_where(error: BaseException) -> str:
    """Return kind, reason, file and line number of an exception, in a single line."""
    if isinstance(error, ModuleNotFoundError) and (missing := not_installed(error.name)):
        return missing
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    try:
        reason = " ".join(str(error).split())
    except Exception:  # of its own __str__
        reason = "it has no text"
    kind_and_reason = printable(f"{type(error).__name__}: {reason}")
    frames = traceback.extract_tb(error.__traceback__)
    return f"{kind_and_reason} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else kind_and_reason


def _from_file(path: Path) -> ModuleType:
    """Import a file under a name that hides no other module; it can import modules of its folder."""
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
