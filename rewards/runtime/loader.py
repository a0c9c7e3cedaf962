"""From the `fn` of a reward to the function that it names."""

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from rewards.text import printable

GROUP = "grpo.rewards"
FORMS = "write package.module.function, path/to/file.py:function, or the name of an entry point of grpo.rewards"
FROM_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def load(fn: str, name: str) -> Callable[..., Any]:
    """Return the reward function that `fn` names.

    Args:
        fn: `package.module.function`, `path/to/file.py:function`, or the name of an entry point of `grpo.rewards`.
        name: the reward's key in the configuration, for what is said about it.

    Raises:
        ValueError: one line that says which file or module, which line and why.
    """
    asked = f"reward.{name}.fn={fn}"
    for entry in entry_points(group=GROUP, name=fn):
        fn = entry.value
    place, separator, function = fn.rpartition(":" if ":" in fn else ".")
    if not separator or fn.endswith(".py"):
        raise ValueError(f"{asked}: {FORMS}")
    if place.endswith(".py") and not Path(place).is_file():
        raise ValueError(f"{asked}: there is no file {Path(place).absolute()}")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{asked}: {what_and_where(error)}") from error
    found = getattr(module, function, None)
    if not callable(found):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise ValueError(f"{asked}: no function {function} in {place}; it has: {', '.join(own)}")
    return found


def bind(function: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Return the function with `kwargs` bound; it takes TRL's arguments and every column, and uses those that it names.

    Raises:
        ValueError: the function does not take one of `kwargs`.
    """
    parameters = inspect.signature(function).parameters
    try:
        inspect.signature(function).bind_partial(**kwargs)
    except TypeError as error:
        known = ", ".join(key for key, parameter in parameters.items() if parameter.default is not parameter.empty)
        raise ValueError(f"reward.{name}.kwargs: {error}; it takes: {known}") from error
    for key in kwargs:
        close = difflib.get_close_matches(key, parameters, n=1)
        if key not in parameters and close:  # `**columns` would take it, and it would do nothing
            raise ValueError(f"reward.{name}.kwargs.{key}: did you mean {close[0]}?")
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def reward(**columns: Any) -> Any:
        taken = columns if takes_all else {key: value for key, value in columns.items() if key in parameters}
        return function(**{**taken, **kwargs})

    return reward


def needs(function: Callable[..., Any], kwargs: dict[str, Any]) -> list[str]:
    """Return the arguments without which the function cannot be called."""
    parameters = inspect.signature(function).parameters.values()
    must = [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [key for key in must if key not in kwargs]


def what_and_where(error: BaseException) -> str:
    """Return kind, reason, file and line of what was raised, on one line."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    what = printable(f"{type(error).__name__}: {' '.join(str(error).split())}")
    frames = traceback.extract_tb(error.__traceback__)
    return f"{what} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else what


def _from_file(path: Path) -> ModuleType:
    """Import a file under a name that hides no other module, with its folder where its imports are looked for."""
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
