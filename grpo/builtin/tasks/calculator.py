"""Word problems with numbers that nobody calculates in their head, and a calculator: the built-in task with a tool.

Mia has 412 apples. She buys 367 more. Soon there are 4 times as many. How many apples does she have now?
"""

import ast
import operator
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from grpo.builtin.tasks.arithmetic import question
from grpo.builtin.tasks.splits import of_split

LARGEST = 9999
LONGEST = 200
"""Characters of the longest expression."""
OPERATIONS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculator(expression: str) -> str:
    """Calculate the value of an arithmetic expression.

    Args:
        expression: Numbers, + - * / and parentheses, for example (412 + 367) * 4

    Returns:
        The value, or an error message.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters")
    value = value_of(ast.parse(expression.strip(), mode="eval").body)
    return str(int(value)) if value == int(value) else f"{value:.10g}"


def value_of(node: ast.AST) -> float:
    """Return the value of a parsed expression.

    Raises:
        ValueError: it has something other than numbers and the four operations.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value_of(node.operand))
    raise ValueError("only numbers, + - * / and parentheses")


@dataclass(frozen=True)
class Problem:
    """A word problem with its calculation."""

    question: str
    """Text of the problem."""
    expression: str
    """The calculation."""
    steps: int
    """Number of operations in it."""

    @property
    def answer(self) -> str:
        """Count after the last step."""
        return calculator(self.expression)


def draw_problem(rng: random.Random) -> Problem:
    """Draw one problem of one or two steps, whose counts are from 100 to `LARGEST`."""
    operations = rng.choices("+-*", k=rng.choice([1, 2]))
    while True:
        start = rng.randint(100, 999)
        expression, steps = str(start), list[tuple[str, int]]()
        for operation in operations:
            number = rng.randint(3, 9) if operation == "*" else rng.randint(100, 999)
            if operation == "*" and steps and steps[-1][0] != "*":
                expression = f"({expression})"
            expression = f"{expression} {operation} {number}"
            steps.append((operation, number))
            if not 100 <= int(calculator(expression)) <= LARGEST:
                break
        else:
            return Problem(question(rng, start, steps), expression, len(steps))


def problems(split: str, seed: int = 0) -> Iterator[Problem]:
    """Yield problems of a split without end; the calculation decides which, not the words around it."""
    return of_split(draw_problem, lambda problem: problem.expression, split, seed)


def rows(split: str, size: int, seed: int) -> list[dict[str, str | int]]:
    """Return `size` rows of a split with `question`, `answer` and the number of `steps`."""
    drawn = islice(problems(split, seed), size)
    return [{"question": p.question, "answer": p.answer, "steps": p.steps} for p in drawn]
