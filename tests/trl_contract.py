"""What of TRL's source we rely on: methods that we override, call or reach by one of them, attributes, functions.

`python -m tests.trl_contract` prints a line for each, with a digest of its source, as
`tests/trl_contract.txt` has them.
"""

import ast
import functools
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from grpo.generation.vllm.engine import PolicyEngine
from grpo.trainer import ExactGRPOTrainer

FILE = Path(__file__).with_suffix(".txt")
PACKAGE = Path(__file__).parents[1] / "grpo"
FILES = [file for file in PACKAGE.rglob("*.py") if file.parent.name != "testing"]
"""What runs rely on; not what tests do."""
PAIRS = ((ExactGRPOTrainer, GRPOTrainer), (PolicyEngine, VLLMGeneration))
"""A class of ours, and the one of TRL that it is made of."""


def own_classes(ours: type, theirs: type) -> list[type]:
    return list(ours.__mro__[: ours.__mro__.index(theirs)])


def overridden(ours: type, theirs: type) -> set[str]:
    names = {name for kind in own_classes(ours, theirs) for name, value in vars(kind).items() if callable(value)}
    return {name for name in names if hasattr(theirs, name) and (name == "__init__" or not name.startswith("__"))}


@functools.cache
def parsed(kind: Any) -> tuple[str, ast.Module]:
    """The source of a class or a method, and its tree."""
    source = textwrap.dedent(inspect.getsource(kind))
    return source, ast.parse(source)


def attributes(kind: Any, written: bool) -> set[str]:
    """Names `x` in `self.x` of the source of a class or a method: those that it assigns, or all."""
    nodes = ast.walk(parsed(kind)[1])
    found = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    return {node.attr for node in found if node.value.id == "self" and (isinstance(node.ctx, ast.Store) or not written)}


def from_library(ours: type, theirs: type) -> set[str]:
    """The attributes that our classes, and what helps the trainer, use and our classes do not make themselves."""
    classes = own_classes(ours, theirs)
    inits = [vars(kind)["__init__"] for kind in classes if "__init__" in vars(kind)]
    made = set[str]().union(*(attributes(init, written=True) for init in inits))
    defined = {name for kind in classes for name in vars(kind)} - overridden(ours, theirs)
    used = set[str]().union(*(attributes(kind, written=False) for kind in classes))
    return (used | (of_a_trainer() if theirs is GRPOTrainer else set())) - made - defined


def digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def assignments(kind: type, name: str) -> str:
    """The statements of a class that assign `self.NAME`, one per line."""
    (source, tree), found = parsed(kind), []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        parts = [part for target in targets if target for part in ast.walk(target)]
        found_here = [part for part in parts if isinstance(part, ast.Attribute) and part.attr == name]
        if any(isinstance(part.value, ast.Name) and part.value.id == "self" for part in found_here):
            found.append(ast.get_source_segment(source, node) or "")
    return "\n".join(found)


def of_a_trainer() -> set[str]:
    """Names `x` in `trainer.x` of our modules, which help the trainer."""
    nodes = [node for file in FILES for node in ast.walk(ast.parse(file.read_text()))]
    found = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    return {node.attr for node in found if node.value.id == "trainer"}


def of_class(ours: type, theirs: type) -> Iterator[str]:
    """A line for each method and attribute of a class of TRL; those of transformers' classes are not TRL's."""
    kinds = [kind for kind in theirs.__mro__ if kind.__module__.startswith("trl.")]
    replaced, used = overridden(ours, theirs), from_library(ours, theirs)
    methods = (vars(kind)[name] for kind in kinds for name in (replaced | used) & vars(kind).keys())
    sources = [method for method in methods if inspect.isroutine(method)]
    reached = set().union(*(attributes(source, False) for source in sources))
    for name in sorted(replaced | used | reached):
        for kind in kinds:
            if inspect.isroutine(vars(kind).get(name)):
                how = "overrides" if name in replaced else "calls" if name in used else "reaches"
                yield f"{how} {kind.__name__}.{name} {digest(inspect.getsource(vars(kind)[name]))}"
                break
            if name in used and (made := assignments(kind, name)):
                yield f"uses {kind.__name__}.{name} {digest(made)}"
                break


def imported() -> Iterator[str]:
    """A line for each function and class that a module of ours imports from TRL."""
    found: dict[str, Any] = {}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl":
                module = importlib.import_module(node.module)
                found |= {f"{node.module}.{alias.name}": getattr(module, alias.name) for alias in node.names}
    ours = {theirs for _, theirs in PAIRS}
    for name, value in sorted(found.items()):
        if value not in ours and (inspect.isfunction(value) or inspect.isclass(value)):
            yield f"imports {name} {digest(inspect.getsource(value))}"


def relied_on() -> list[str]:
    """All lines."""
    return [*(line for pair in PAIRS for line in of_class(*pair)), *imported()]


if __name__ == "__main__":
    print("\n".join(relied_on()))
