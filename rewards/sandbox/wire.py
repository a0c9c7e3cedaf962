"""Requests and replies between the process of a completion's code and the process of its tests, as lines of JSON.

Plain values are copied. Any other object stays in its process, and the other process refers to it by a number. Reading
a message never runs code.
"""

import builtins
import datetime
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import ModuleType
from typing import Any, BinaryIO

LONGEST = 16 * 2**20
"""Limit on the length of a message, bytes."""
MUTABLE = (list, dict, set, bytearray, deque)
IMMUTABLE: dict[type, Callable[[Any], Any]] = {
    int: int.__index__,
    float: float.__float__,
    str: str.__str__,
    tuple: lambda value: tuple(tuple.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    bytes: lambda value: bytes(bytes.__iter__(value)),
}
"""Types of which a copy never grows old, and the plain value of an instance of a subclass."""
MAPPINGS: dict[type, str] = {dict: "dict", defaultdict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
SEQUENCES = (tuple, set, frozenset, bytes, bytearray, deque)
MAKE: dict[str, Callable[[Any], Any]] = {
    **{kind.__name__: kind for kind in (*SEQUENCES, dict, OrderedDict)},
    "Counter": lambda pairs: Counter(dict(pairs)),
    "iterator": iter,
}
"""Values of several values, from a list of these."""
NUMBERS = (complex, Fraction, Decimal)
DATES = (datetime.datetime, datetime.date, datetime.time)
PARTS: dict[type, Callable[[Any], list[Any]]] = {
    complex: lambda value: [value.real, value.imag],
    Fraction: lambda value: [value.numerator, value.denominator],
    Decimal: lambda value: [str(value)],
    **dict.fromkeys((range, slice), lambda value: [value.start, value.stop, value.step]),
    **dict.fromkeys(DATES, lambda value: [value.isoformat()]),
    datetime.timedelta: lambda value: [value.days, value.seconds, value.microseconds],
}
"""Arguments of which the other end makes the value of a type."""
FROM_PARTS: dict[str, Callable[..., Any]] = {kind.__name__: kind for kind in PARTS}
FROM_PARTS |= {kind.__name__: kind.fromisoformat for kind in DATES}


class NotPlain(TypeError):
    """A value of the tests that the code cannot get."""


class Gone(Exception):
    """The other end has ended, or does not keep to the form of messages."""


class Peer:
    """An end of the connection: it requests operations of the other end, and answers that end's requests meanwhile."""

    def __init__(self, incoming: BinaryIO, outgoing: BinaryIO, operations: dict[str, Callable[..., Any]]) -> None:
        self.incoming, self.outgoing, self.operations = incoming, outgoing, operations
        self.asked: set[str] = set()
        """Number of operations that this end has requested."""

    def keep(self, value: Any) -> dict[str, Any]:
        """Return the name by which the other end refers to an object that stays here; or refuse the object."""
        raise NotImplementedError

    def find(self, kind: str, content: Any) -> Any:
        """Return the object for a name that `keep` of this end or the other end has returned."""
        raise NotImplementedError

    def printed(self) -> str:
        """Return the text that has been printed since the last call."""
        return ""

    def ask(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        """Return the result of an operation at the other end.

        Raises:
            Exception: the exception of the other end, as the nearest built-in exception.
            Gone: the other end has ended.
        """
        self.asked.add(operation)
        self.send({"ask": operation, "arguments": self.encode(arguments), "keywords": self.encode(keywords)})
        while "ask" in (message := self.receive()):
            self.answer(message)
        print(message["printed"], end="")
        for argument, tree in zip(arguments, message["changed"], strict=False):
            if tree is not None:
                replace(argument, self.decode(tree))
        if "raised" in message:
            raise nearest(message["raised"], message["text"], iterating=operation == "next")
        return self.decode(message["result"])

    def answer(self, message: dict[str, Any]) -> None:
        """Execute the request of a message and send the result or the exception."""
        arguments: Any = ()
        reply: dict[str, Any] = {}
        try:
            arguments = self.decode(message["arguments"])
            result = self.operations[message["ask"]](*arguments, **self.decode(message["keywords"]))
            reply = {"result": self.encode(result)}
        except Gone:
            raise
        except BaseException as error:  # SystemExit too
            reply = {"raised": [cls.__name__ for cls in type(error).__mro__], "text": describe(error)}
        before = message["arguments"]["tuple"]
        after = [self.encode(value) if type(value) in MUTABLE else None for value in arguments]
        changed = [new if new != old else None for new, old in zip(after, before, strict=False)]
        self.send({**reply, "changed": changed, "printed": self.printed()})

    def send(self, message: dict[str, Any]) -> None:
        """Send a message."""
        self.outgoing.write(json.dumps(message).encode() + b"\n")
        self.outgoing.flush()

    def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            Gone: there is none, or it is too long.
        """
        line = self.incoming.readline(LONGEST)
        if not line.endswith(b"\n"):
            raise Gone
        return json.loads(line)

    def encode(self, value: Any) -> Any:
        """Return a value for JSON: a plain value as a copy, another object as its number, some objects as both."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind in MAPPINGS:
            return {MAPPINGS[kind]: [self.encode(pair) for pair in value.items()]}
        if kind is list or kind in SEQUENCES:
            items = [self.encode(item) for item in value]
            return items if kind is list else {kind.__name__: items}
        for base, plain in IMMUTABLE.items():  # a subclass, such as a named tuple
            if isinstance(value, base):
                number, copy = self.keep(value).get("object"), self.encode(plain(value))
                return {"copy": [number, copy]} if number else copy
        for base in (kind, *NUMBERS):
            if base in PARTS and isinstance(value, base):
                return {base.__name__: [self.encode(part) for part in PARTS[base](value)]}
        if isinstance(value, ModuleType):
            return {"module": value.__name__}
        if isinstance(value, type) and value.__module__ == "builtins" and hasattr(builtins, value.__name__):
            return {"type": value.__name__}
        return self.keep(value)

    def decode(self, tree: Any) -> Any:
        """Return the value that `encode` of the other end has encoded."""
        if isinstance(tree, list):
            return [self.decode(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = tree.items()
        if kind == "type":
            builtin = getattr(builtins, content)
            return builtin if isinstance(builtin, type) else None
        if kind in FROM_PARTS:
            return FROM_PARTS[kind](*self.decode(content))
        return MAKE[kind](self.decode(content)) if kind in MAKE else self.find(kind, content)


def replace(value: Any, by: Any) -> None:
    """Give a mutable value the content of another."""
    if type(value) in (list, bytearray):
        value[:] = by
    elif type(value) in MUTABLE:
        value.clear()
        value.extend(by) if type(value) is deque else value.update(by)


def nearest(names: list[str], text: str, iterating: bool) -> Exception:
    """Return the nearest built-in exception of the classes with these names.

    An exception that ends a loop ends only loops over an iterator of the other end, as in generators (PEP 479).
    """
    for name in names if iterating or not {"StopIteration", "StopAsyncIteration"} & {*names} else ():
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(text)
            except TypeError:  # of those that need more arguments
                continue
    return RuntimeError(text)


def describe(error: BaseException) -> str:
    """Return the text of an exception, whatever its class makes of that."""
    try:
        return str(error)[:10_000]
    except Exception:
        return ""
