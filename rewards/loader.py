"""From `fn: package.module.function` or `fn: path/to/file.py:function` to a function that TRL can call."""

import importlib
import importlib.util
import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def load(fn: str, name: str, kwargs: dict[str, Any] | None = None) -> Callable[..., Any]:
    """Return the reward function that `fn` names, with `kwargs` bound and `name` as the name under which TRL logs it.

    Raises:
        ValueError: one line that says which file or module, which line and why.
    """
    place, separator, function = fn.rpartition(":" if ".py" in fn else ".")
    if not separator:
        raise ValueError(f"reward.{name}.fn={fn}: write package.module.function or path/to/file.py:function")
    if place.endswith(".py") and not Path(place).is_file():
        raise ValueError(f"reward.{name}.fn={fn}: there is no file {Path(place).absolute()}")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise ValueError(f"reward.{name}.fn={fn}: {_what_and_where(error)}") from error
    found = getattr(module, function, None)
    if not callable(found):
        offered = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise ValueError(f"reward.{name}.fn={fn}: no function {function} in {place}; it has: {', '.join(offered)}")
    return _bind(found, name, kwargs or {})


def _bind(function: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Bind `kwargs` in a function of its own: TRL would log a `functools.partial` under the inner function's name."""

    def reward(**columns: Any) -> Any:
        return function(**{**columns, **kwargs})

    async def awaited_reward(**columns: Any) -> Any:
        return await function(**{**columns, **kwargs})

    bound = awaited_reward if inspect.iscoroutinefunction(function) else reward
    bound.__name__ = name
    return bound


def _what_and_where(error: Exception) -> str:
    """Return kind, reason, file and line of an import that failed, on one line."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())} ({frame.filename}, line {frame.lineno})"


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
