"""Requests and replies between the process of a completion's code and the process of its tests, as lines of JSON.

Plain values are copied. Any other object stays in its process and is known to the other one by a number. Reading a
message never runs code.
"""

import builtins
import json
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import ModuleType
from typing import Any, BinaryIO

LONGEST = 16 * 2**20
"""Limit on the length of a message, bytes."""
MUTABLE = (list, dict, set, bytearray)
MAKE: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "bytes": bytes,
    "bytearray": bytearray,
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*parts),
    "fraction": lambda parts: Fraction(*parts),
    "decimal": Decimal,
    "iterator": iter,
}
NUMBERS_AND_TEXT: dict[type, Callable[[Any], Any]] = {int: int.__index__, float: float.__float__, str: str.__str__}


class NotPlain(TypeError):
    """A value of the tests that the code cannot get."""


class Peer:
    """One end of the line: it asks the other end, and answers what the other end asks in the meantime.

    Args:
        incoming: messages of the other end.
        outgoing: messages to it.
        operations: functions that the other end may ask for, by name.
        keep: name of an object that stays here, by which the other end asks for it, or an exception if it must not.
        find: object for what `keep` of the other end, or of this one, has returned.
        printed: text that has been printed since the last call.
    """

    def __init__(
        self,
        incoming: BinaryIO,
        outgoing: BinaryIO,
        operations: dict[str, Callable[..., Any]],
        keep: Callable[[Any], dict[str, Any]],
        find: Callable[[str, Any], Any],
        printed: Callable[[], str] = str,
    ) -> None:
        self.incoming, self.outgoing, self.operations = incoming, outgoing, operations
        self.keep, self.find, self.printed = keep, find, printed

    def ask(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        """Return the result of an operation at the other end.

        Raises:
            Exception: what was raised there, as the nearest built-in exception.
            ConnectionError: the other end has gone.
        """
        self.send({"ask": operation, "arguments": self.encode(arguments), "keywords": self.encode(keywords)})
        while "ask" in (message := self.receive()):
            self.answer(message)
        print(message["printed"], end="")
        for argument, tree in zip(arguments, message["changed"], strict=False):
            if tree is not None:
                replace(argument, self.decode(tree))
        if "raised" in message:
            raise nearest(message["raised"], message["text"])
        return self.decode(message["result"])

    def serve(self) -> None:
        """Answer until the other end has gone."""
        while True:
            self.answer(self.receive())

    def answer(self, message: dict[str, Any]) -> None:
        """Do what a message asks for and send the result, or what it raised."""
        arguments: Any = ()
        reply: dict[str, Any] = {}
        try:
            arguments = self.decode(message["arguments"])
            result = self.operations[message["ask"]](*arguments, **self.decode(message["keywords"]))
            reply = {"result": self.encode(result)}
        except ConnectionError:
            raise
        except BaseException as error:  # SystemExit too
            reply = {"raised": [cls.__name__ for cls in type(error).__mro__], "text": describe(error)}
        before = message["arguments"]["tuple"]
        after = [self.encode(value) if isinstance(value, MUTABLE) else None for value in arguments]
        changed = [new if new != old else None for new, old in zip(after, before, strict=False)]
        self.send({**reply, "changed": changed, "printed": self.printed()})

    def send(self, message: dict[str, Any]) -> None:
        """Send a message."""
        self.outgoing.write(json.dumps(message).encode() + b"\n")
        self.outgoing.flush()

    def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            ConnectionError: there is none, or it is too long.
        """
        line = self.incoming.readline(LONGEST)
        if not line.endswith(b"\n"):
            raise ConnectionError("the other process has ended, or says too much")
        return json.loads(line)

    def encode(self, value: Any) -> Any:
        """Return a value as what JSON can hold: a plain one as a copy, another as its number."""
        if value is None or isinstance(value, bool):
            return value
        for kind, plain in NUMBERS_AND_TEXT.items():
            if isinstance(value, kind):
                return plain(value)
        if isinstance(value, list):
            return [self.encode(item) for item in value]
        for group in (tuple, set, frozenset, bytes, bytearray):
            if isinstance(value, group):
                return {group.__name__: [self.encode(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [self.encode(pair) for pair in value.items()]}
        return self.encode_rare(value)

    def encode_rare(self, value: Any) -> dict[str, Any]:
        """Return other plain values, modules, and what is named because it is not plain."""
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, range):
            return {"range": [value.start, value.stop, value.step]}
        if isinstance(value, Fraction):
            return {"fraction": [value.numerator, value.denominator]}
        if isinstance(value, Decimal):
            return {"decimal": str(value)}
        if isinstance(value, ModuleType):
            return {"module": value.__name__}
        if isinstance(value, type) and value.__module__ == "builtins" and hasattr(builtins, value.__name__):
            return {"type": value.__name__}
        return self.keep(value)

    def decode(self, tree: Any) -> Any:
        """Return the value of what `encode` of the other end has made."""
        if isinstance(tree, list):
            return [self.decode(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = tree.items()
        if kind == "type":
            found = getattr(builtins, content)
            return found if isinstance(found, type) else None
        return MAKE[kind](self.decode(content)) if kind in MAKE else self.find(kind, content)


def replace(value: Any, by: Any) -> None:
    """Give a mutable value the content of another."""
    if isinstance(value, list | bytearray):
        value[:] = by
    elif isinstance(value, dict | set):
        value.clear()
        value.update(by)


def nearest(names: list[str], text: str) -> Exception:
    """Return the nearest built-in exception of the classes with these names."""
    for name in names:
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
