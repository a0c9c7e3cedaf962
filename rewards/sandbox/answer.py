"""The process that runs the code of a completion and calls it for the process of the tests: `answer.py MEMORY SECONDS`.

Started by `rewards.code`, in a sandbox. Nothing in here is trusted once the code has run.
"""

import contextlib
import io
import operator
import resource
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

sys.path.insert(0, __file__.rpartition("/")[0])  # the interpreter runs isolated and without this project
from wire import MUTABLE, Gone, Peer  # type: ignore[import-not-found]

UNARY = ("abs", "neg", "pos", "invert")
BINARY = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow")
BITWISE = ("and_", "or_", "xor", "lshift", "rshift")


def limit(memory_mb: int, seconds: int) -> None:
    """Limit the memory (MiB), the processor time (seconds), the files and the open files of this process."""
    for what, value in {
        resource.RLIMIT_AS: memory_mb * 2**20,
        resource.RLIMIT_CPU: seconds + 1,
        resource.RLIMIT_FSIZE: 2**20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }.items():
        resource.setrlimit(what, (value, value))
    sys.set_int_max_str_digits(0)


def copy(value: Any) -> Any:
    """Return the content of an instance of a subclass of `list` and the like."""
    kind = next(base for base in MUTABLE if isinstance(value, base))
    return dict(dict.items(value)) if kind is dict else kind(kind.__iter__(value))


def operations(names: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return what the tests may ask for."""

    def run(program: str) -> None:
        exec(compile(program, "completion", "exec"), names)

    def name(key: str) -> Any:
        if key not in names:
            raise NameError(f"name '{key}' is not defined")
        return names[key]

    def call(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    simple = (
        getattr,
        setattr,
        delattr,
        len,
        iter,
        next,
        reversed,
        hash,
        bool,
        str,
        repr,
        format,
        int,
        float,
        isinstance,
    )
    items = (operator.getitem, operator.setitem, operator.delitem)
    arithmetic = [getattr(operator, one) for one in (*UNARY, *BINARY, *BITWISE, "contains")]
    return {function.__name__: function for function in (run, name, call, copy, *simple, *items, *arithmetic)}


def main() -> None:
    """Answer until the process of the tests has gone."""
    limit(int(sys.argv[1]), int(sys.argv[2]))
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    sys.stdin, sys.stdout = io.StringIO(), (said := io.StringIO())
    kept: dict[int, Any] = {}
    module = sys.modules["completion"] = ModuleType("completion")

    def keep(value: Any) -> dict[str, Any]:
        kept[id(value)] = value
        kind = next((base.__name__ for base in MUTABLE if isinstance(value, base)), None)
        return {"container": [id(value), kind]} if kind else {"object": id(value)}

    def find(kind: str, number: Any) -> Any:
        if kind in ("object", "copy"):
            return kept[number if kind == "object" else number[0]]
        return lambda *arguments, **keywords: peer.ask(
            "call", number, *arguments, **keywords
        )  # a function of the tests

    def printed() -> str:
        text = said.getvalue()
        said.seek(0)
        said.truncate()
        return text

    peer = Peer(incoming, outgoing, operations(vars(module)), keep, find, printed)
    with contextlib.suppress(Gone):
        peer.serve()


if __name__ == "__main__":
    main()
