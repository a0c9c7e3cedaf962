"""The process that runs the tests of a completion against the process of its code: `tests.py MEMORY SECONDS IN OUT`.

Started by `rewards.code`, in a sandbox of its own. The code of the completion never runs here: its functions and
objects are called at the other end of the line, and only plain values come back. `assert double(3) == 6` thus compares
two numbers of this process. An object that stays at the other end equals no plain value, whatever it claims.
"""

import builtins
import importlib
import io
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

sys.path.insert(0, __file__.rpartition("/")[0])  # the interpreter runs isolated and without this project
from answer import BINARY, BITWISE, UNARY, limit  # type: ignore[import-not-found]
from wire import NotPlain, Peer  # type: ignore[import-not-found]


class Remote:
    """An object of the completion's code."""

    def __init__(self, peer: Peer, number: int) -> None:
        vars(self).update(_peer=peer, _number=number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._peer.ask("call", self, *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self, name, value)

    def __instancecheck__(self, instance: Any) -> bool:
        return type(instance) is Remote and self._peer.ask("isinstance", instance, self) is True

    def __contains__(self, item: Any) -> Any:
        if type(item) is not Remote:
            raise TypeError("the tests look for a value of theirs in an object of the code, which may claim anything")
        return self._peer.ask("contains", self, item)

    def __hash__(self) -> int:
        return self._number


def ask_for(operation: str) -> Callable[..., Any]:
    """Return a special method of `Remote`."""
    return lambda self, *arguments: self._peer.ask(operation, self, *arguments)


def ask_for_two(operation: str) -> Callable[..., Any]:
    """Return an operator of `Remote`, for two objects of the code; with a value of the tests it is not answered."""

    def method(self: Remote, other: Any) -> Any:
        return self._peer.ask(operation, self, other) if type(other) is Remote else NotImplemented

    return method


for one in ("getitem", "setitem", "delitem", "len", "iter", "next", "bool", "str", "repr", "int", "float", *UNARY):
    setattr(Remote, f"__{one}__", ask_for(one))
for one in (*BINARY, *BITWISE):
    setattr(Remote, f"__{one.strip('_')}__", ask_for_two(one))


class Names(dict[str, Any]):
    """The names of the tests: their own, then Python's, then those of the completion's code.

    Args:
        peer: the process of the code.
        entry_point: name that is the code's even if Python has it too.
    """

    def __init__(self, peer: Peer, entry_point: str | None) -> None:
        super().__init__(__name__="tests", __builtins__=builtins)
        self.peer, self.entry_point = peer, entry_point

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) and name != self.entry_point:
            raise KeyError(name)  # the interpreter then takes its own
        return self.peer.ask("name", name)


def connect(incoming: Any, outgoing: Any) -> Peer:
    """Return the line to the process of the code."""
    remote: dict[int, Remote] = {}
    functions: dict[int, Callable[..., Any]] = {}

    def keep(value: Any) -> dict[str, Any]:
        if type(value) is Remote:
            return {"object": value._number}
        if isinstance(value, Iterator):
            return {"iterator": peer.encode(list(itertools.islice(value, 100_000)))}
        if callable(value):
            functions[id(value)] = value
            return {"function": id(value)}
        raise NotPlain(f"the tests give the code a {type(value).__name__}, which is not plain data")

    def find(kind: str, content: Any) -> Any:
        if kind == "module" and content in sys.stdlib_module_names:
            return importlib.import_module(content)  # ours, not what the code has made of its own
        number = int(content)
        return remote.setdefault(number, Remote(peer, number))

    def call(number: int, *arguments: Any, **keywords: Any) -> Any:
        return functions[number](*arguments, **keywords)

    peer = Peer(incoming, outgoing, {"call": call}, keep, find)
    return peer


def main() -> None:
    """Run the tests; the last line of the output is the secret word and the verdict."""
    limit(int(sys.argv[1]), int(sys.argv[2]))
    start, verdict = json.loads(sys.stdin.readline()), sys.stdout
    sys.stdin, sys.stdout = io.StringIO(), io.StringIO()
    with open(int(sys.argv[3]), "rb") as incoming, open(int(sys.argv[4]), "wb") as outgoing:
        peer = connect(incoming, outgoing)
        try:
            peer.ask("run", start["program"])
            exec(compile(start["tests"], "tests", "exec"), Names(peer, start["entry_point"]))
        except NotPlain as error:
            print(start["word"], error, file=verdict, flush=True)
        else:
            print(start["word"], "passed", file=verdict, flush=True)


if __name__ == "__main__":
    main()
