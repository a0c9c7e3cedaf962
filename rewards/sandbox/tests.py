"""The process that runs the tests of a completion: `tests.py MEMORY SECONDS IN OUT`, with the line to that of its code.

Started by `rewards.code`, in a sandbox of its own. The code of the completion never runs here: its functions and
objects are called at the other end of the line, and only plain values come back. `assert double(3) == 6` thus compares
two numbers of this process. An object that stays at the other end equals no plain value, whatever it claims.
"""

import ast
import builtins
import faulthandler
import importlib
import io
import itertools
import json
import operator
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

sys.path.insert(0, __file__.rpartition("/")[0])  # the interpreter runs isolated and without this project
from answer import BINARY, BUILT_IN, ITEMS, UNARY, limit  # type: ignore[import-not-found]
from wire import IMMUTABLE, MUTABLE, Gone, NotPlain, Peer  # type: ignore[import-not-found]

ABSENT = ("np", "numpy", "pd", "pandas", "scipy", "sympy", "torch", "pytest")
"""Names of missing packages; the code's objects with these names do not replace them."""


class Unusable(Exception):
    """Tests that no code can pass, or that any code passes."""


class Remote:
    """An object of the completion's code, which has a number at the other end.

    The content of an instance of a subclass of `kind`, `list` or the like, can be compared.
    """

    def __init__(self, peer: Peer, number: int, kind: str | None = None) -> None:
        vars(self).update(__peer=peer, __number=number, __kind=kind)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return {kind.__name__: kind for kind in MUTABLE}.get(vars(self)["__kind"], Remote)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return vars(self)["__peer"].ask("call", self, *arguments, **keywords)

    def __instancecheck__(self, instance: Any) -> bool:
        return number_of(instance) is not None and ask(instance, "isinstance", self) is True

    def __contains__(self, item: Any) -> Any:
        if type(item) is Remote:
            return ask(self, "contains", item)
        if not vars(self)["__kind"]:
            raise TypeError("the tests look for a value of theirs in an object of the code, which may claim anything")
        return item in ask(self, "copy")

    def __enter__(self) -> Any:
        return ask(self, "getattr", "__enter__")()

    def __exit__(self, *error: Any) -> Any:
        return ask(self, "getattr", "__exit__")(None, None, None)


def ask(remote: Any, operation: str, *arguments: Any) -> Any:
    """Return the result of an operation on an object of the code."""
    try:
        return vars(remote)["__peer"].ask(operation, remote, *arguments)
    except NotPlain as error:  # only arguments of calls are a matter of the tests
        raise TypeError(str(error)) from None


def number_of(value: Any) -> int | None:
    """Return the number of an object of the code, or of its copy; None for any other value."""
    attributes = getattr(type(value), "__dict__", {})
    return vars(value)["__number"] if type(value) is Remote or "__copy" in attributes else None


def copy_of(peer: Peer, number: int, value: Any) -> Any:
    """Return a value that was an instance of a subclass, such as a named tuple; its other attributes are requested."""
    attributes = {"__getattr__": special("getattr"), "__copy": True}
    copy = type(type(value).__name__, (type(value),), attributes)(value)
    vars(copy).update(__peer=peer, __number=number)
    return copy


def special(operation: str) -> Callable[..., Any]:
    """Return a special method of `Remote`; an operator of it and a value of the tests takes only a copy of it."""

    def method(self: Remote, *arguments: Any) -> Any:
        if operation not in BINARY or type(arguments[0]) is Remote:
            return ask(self, operation, *arguments)
        return getattr(operator, operation)(ask(self, "copy"), *arguments) if vars(self)["__kind"] else NotImplemented

    return method


for operation in (*BUILT_IN, *ITEMS, *UNARY, *BINARY):
    setattr(Remote, f"__{operation.strip('_')}__", special(operation))


class Names(dict[str, Any]):
    """The names of the tests: their own, then Python's and its modules', then those of the completion's code.

    If the tests call the name of a module, it means a function of the code; so does `entry_point`, even if Python has
    it.
    """

    def __init__(self, peer: Peer, tests: ast.Module, entry_point: str | None) -> None:
        super().__init__(__name__="__main__", __builtins__=builtins)
        nodes = list(ast.walk(tests))
        called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        self.peer, self.modules = peer, sys.stdlib_module_names - called - {entry_point}
        self.entry_point, self.taken = entry_point, list[str]()
        for node in nodes:  # in the body of a class the interpreter does not ask for missing names
            for name in ast.walk(node) if isinstance(node, ast.ClassDef) else ():
                if isinstance(name, ast.Name) and not hasattr(builtins, name.id) and name.id not in self.modules:
                    try:
                        self[name.id] = peer.ask("name", name.id)
                    except NameError:
                        continue

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) and name != self.entry_point:
            raise KeyError(name)  # the interpreter then takes its own
        if name in ABSENT:
            raise Unusable(f"the tests use {name}, which they do not import and there is none of")
        if name in self.modules:
            return importlib.import_module(name)
        value = self.peer.ask("name", name)
        if type(value) is not Remote:
            self.taken.append(name)
        return value

    def were_used(self) -> bool:
        """Return whether the tests have used something of the code, and not only named it."""
        return bool(self.taken or self.peer.asked - {"run", "name"})


class Tests(Peer):
    """The tests' end of the connection, which requests operations of the code."""

    def __init__(self, incoming: Any, outgoing: Any) -> None:
        super().__init__(incoming, outgoing, {"call": self.call})
        self.remote, self.functions = dict[int, Remote](), dict[int, Callable[..., Any]]()

    def call(self, number: int, *arguments: Any, **keywords: Any) -> Any:
        return self.functions[number](*arguments, **keywords)

    def keep(self, value: Any) -> dict[str, Any]:
        number = number_of(value)
        if number is not None:
            return {"object": number}
        if isinstance(value, tuple(IMMUTABLE)):  # of a class of the tests: a plain copy is enough
            return {}
        if isinstance(value, Iterator):
            return {"iterator": self.encode(list(itertools.islice(value, 100_000)))}
        if callable(value):
            self.functions[id(value)] = value
            return {"function": id(value)}
        raise NotPlain(f"the tests give the code a {type(value).__name__}, which is not plain data")

    def find(self, kind: str, content: Any) -> Any:
        if kind == "module" and content in sys.stdlib_module_names:
            return importlib.import_module(content)  # ours, not what the code has made of its own
        if kind == "copy":
            return copy_of(self, int(content[0]), self.decode(content[1]))
        number, container = content if kind == "container" else (content, None)
        return self.remote.setdefault(int(number), Remote(self, int(number), container))


def run(peer: Peer, program: str, tests: str, entry_point: str | None) -> None:
    """Run the program and its tests; whatever they raise is a failure, unless the tests are at fault.

    Raises:
        Unusable, NotPlain: they are.
    """
    try:
        tree = ast.parse(tests)
        compiled = compile(tree, "tests", "exec")
    except (SyntaxError, ValueError) as error:
        raise Unusable(f"the tests cannot be compiled: {error}") from error
    peer.ask("run", program)
    names = Names(peer, tree, entry_point)
    try:
        exec(compiled, names)
        if entry_point and "check" in names and not names.were_used():  # as HumanEval has it
            names["check"](names[entry_point])
    except ModuleNotFoundError as error:
        if error.__traceback__ and error.name and error.name not in sys.stdlib_module_names:
            problem = f"the tests need the package {error.name}, and there is only the standard library"
            raise Unusable(problem) from error
        raise
    if not names.were_used():
        raise Unusable("the tests call nothing of the code: functions and classes of tests have to be called too")


def main() -> None:
    """Run the tests; the last line of the output is the secret word and the verdict."""
    limit(int(sys.argv[1]), int(sys.argv[2]))
    start = json.load(sys.stdin)
    verdict = os.fdopen(os.dup(1), "w")
    sys.stdin, sys.stdout = (io.TextIOWrapper(io.BytesIO()) for _ in range(2))
    sys.__stdin__, sys.__stdout__ = sys.stdin, sys.stdout  # type: ignore[misc]
    with open(int(sys.argv[3]), "rb") as incoming, open(int(sys.argv[4]), "wb") as outgoing:
        peer = Tests(incoming, outgoing)
        peer.ask("len", "")  # the other process is there: time begins
        peer.asked.clear()
        print(f"{start['word']} began", file=verdict, flush=True)

        def late(number: int, frame: Any) -> None:
            """End, whatever runs, with the time of the processor that was used, and whether the code was awaited."""
            awaited = frame.f_code is Peer.receive.__code__
            print(f"\n{start['word']} late {time.process_time()} {awaited:d}", file=verdict, flush=True)
            os._exit(0)

        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, start["seconds"])
        faulthandler.dump_traceback_later(start["seconds"] + 1, exit=True)  # no handler runs within a function of C
        result = "passed"
        try:
            run(peer, start["program"], start["tests"], start["entry_point"])
        except (NotPlain, Unusable) as error:
            result = " ".join(str(error).split())
        except (Exception, Gone):
            result = "failed"
    print(f"\n{start['word']} {result}", file=verdict, flush=True)


if __name__ == "__main__":
    main()
