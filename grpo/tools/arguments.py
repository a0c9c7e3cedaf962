"""Arguments for the check of a tool: valid arguments, likely mistakes of a policy, and hostile arguments."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXAMPLES: dict[str, list[Any]] = {
    "integer": [0, 1, 2, 5, 10, 50, 100, -1],
    "number": [0.0, 1.0, 2.5, -1.0, 100.0],
    "boolean": [True, False],
    "string": ["a", "1", "1 + 2", "hello", "yes"],
    "null": [None],
}
OTHERS: list[Any] = [None, "", "not a number", -1, 1e300, [], {}, ["a"], {"a": 1}, True]
"""Values of other types, and at their ends."""
ENDLESS = "9**9**9**9"
"""An expression that nothing calculates to its end."""


def parameters_of(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the schemas of a tool's parameters, by name."""
    return schema["function"]["parameters"].get("properties", {})


def valid(schema: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return random arguments of the types in a tool's schema."""
    required = schema["function"]["parameters"].get("required", [])
    parameters = parameters_of(schema).items()
    return {name: value(of, rng) for name, of in parameters if name in required or rng.random() < 0.5}


def value(of: dict[str, Any], rng: random.Random) -> Any:
    """Return a random value of a JSON schema."""
    if "enum" in of:
        return rng.choice(of["enum"])
    kind = of.get("type", "string")
    if isinstance(kind, list):
        kind = rng.choice(kind)
    if kind == "array":
        return [value(of.get("items", {}), rng) for _ in range(rng.randint(0, 3))]
    if kind == "object":
        return {name: value(part, rng) for name, part in of.get("properties", {}).items()}
    return rng.choice(EXAMPLES.get(kind, EXAMPLES["string"]))


def invalid(schema: dict[str, Any], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield likely mistakes of a policy: a missing argument, an additional argument, and arguments of other types."""
    arguments = valid(schema, rng)
    yield {}
    yield arguments | {"unknown": 1}
    yield from (arguments | {name: other} for name in parameters_of(schema) for other in OTHERS)


def hostile(schema: dict[str, Any], rng: random.Random, canary: Path) -> Iterator[dict[str, Any]]:
    """Yield arguments that do damage in a tool that executes, opens or repeats its arguments.

    The file `canary` exists after such an argument was executed as code or by a shell.
    """
    texts = [f"__import__('pathlib').Path({str(canary)!r}).touch()"]
    texts += [f"; touch {canary} #", f"$(touch {canary})", f"`touch {canary}`"]
    texts += ["../../../../../../etc/passwd", "/etc/passwd"]
    texts += [ENDLESS, "(" * 500 + "1" + ")" * 500, "\x00\x1b[2J\u202e", "a" * 1_000_000]
    arguments = valid(schema, rng)
    for name, of in parameters_of(schema).items():
        for text in texts if "string" in str(of.get("type", "string")) else ():
            yield arguments | {name: text}
        for number in (10**18, -(10**18), 10**400) if "integer" in str(of.get("type")) else ():
            yield arguments | {name: number}
