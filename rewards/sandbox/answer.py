"""The process that runs the code of a completion and calls it for the process of the tests: `answer.py MEMORY SECONDS`.

Started by `rewards.code`, in a sandbox. Nothing in here is trusted once the code has run.
"""

import builtins
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

ITEMS = ("getitem", "setitem", "delitem")
UNARY = ("abs", "neg", "pos", "invert")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow")
BINARY = (*COMPARISONS, *ARITHMETIC, "and_", "or_", "xor", "lshift", "rshift")
CONVERSIONS = ("hash", "bool", "str", "repr", "format", "int", "float")
BUILT_IN = ("getattr", "setattr", "len", "iter", "next", "reversed", *CONVERSIONS)
"""Functions of Python that call a special method of the same name."""


def limit(memory_mb: int, seconds: int) -> None:
    """Limit the memory (MiB), the processor time (seconds), the files and the open files of this process.

    macOS limits no memory: it refuses a limit below the addresses that every process has there.
    """
    of_memory = {resource.RLIMIT_AS: memory_mb * 2**20} if sys.platform != "darwin" else {}
    for kind, value in {
        **of_memory,
        resource.RLIMIT_CPU: seconds + 1,
        resource.RLIMIT_FSIZE: 2**20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }.items():
        resource.setrlimit(kind, (value, value))
    sys.set_int_max_str_digits(0)


class Code(Peer):
    """The code's end of the connection, which answers the tests; `names` are the names of the code's module."""

    def __init__(self, incoming: Any, outgoing: Any, names: dict[str, Any]) -> None:
        methods = {name: getattr(self, name) for name in ("run", "name", "call", "copy")}
        functions = {name: getattr(builtins, name) for name in (*BUILT_IN, "isinstance")}
        of_operator = {name: getattr(operator, name) for name in (*ITEMS, *UNARY, *BINARY, "contains")}
        super().__init__(incoming, outgoing, {**methods, **functions, **of_operator})
        self.names, self.output, self.objects = names, io.StringIO(), dict[int, Any]()

    def run(self, program: str) -> None:
        exec(compile(program, "completion", "exec"), self.names)

    def name(self, key: str) -> Any:
        if key not in self.names:
            raise NameError(f"name '{key}' is not defined")
        return self.names[key]

    def call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    def copy(self, value: Any) -> Any:
        """Return the content of an instance of a subclass of `list` and the like."""
        kind = next(base for base in MUTABLE if isinstance(value, base))
        return dict(dict.items(value)) if kind is dict else kind(kind.__iter__(value))

    def keep(self, value: Any) -> dict[str, Any]:
        self.objects[id(value)] = value
        kind = next((base.__name__ for base in MUTABLE if isinstance(value, base)), None)
        return {"container": [id(value), kind]} if kind else {"object": id(value)}

    def find(self, kind: str, content: Any) -> Any:
        if kind in ("object", "copy"):
            return self.objects[content if kind == "object" else content[0]]
        return lambda *arguments, **keywords: self.ask("call", content, *arguments, **keywords)  # one of the tests

    def printed(self) -> str:
        text = self.output.getvalue()
        self.output.seek(0)
        self.output.truncate()
        return text


def main() -> None:
    """Answer until the process of the tests has ended."""
    limit(int(sys.argv[1]), int(sys.argv[2]))
    module = sys.modules["completion"] = ModuleType("completion")
    peer = Code(sys.stdin.buffer, sys.stdout.buffer, vars(module))
    sys.stdin, sys.stdout = io.StringIO(), peer.output
    with contextlib.suppress(Gone):
        while True:
            peer.answer(peer.receive())


if __name__ == "__main__":
    main()
