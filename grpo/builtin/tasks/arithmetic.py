"""The built-in task: endless word problems of one or two steps, without a download.

A problem starts with a count, and one or two things happen to it::

    Mia has 12 apples. She buys 7 more. She gives away 5. How many apples does she have now?

Every intermediate result is an integer from 1 to 99, so that a policy of one million parameters can learn to compute
it; only the words determine the operation.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from grpo.builtin.tasks.splits import of_split

LARGEST = 99
PRONOUNS = {"Mia": "She", "Ada": "She", "Zoe": "She", "Ben": "He", "Tom": "He", "Sam": "He"}
ITEMS = ["apples", "books", "coins", "stamps", "shells", "cards", "pens", "eggs"]
EVENTS = {
    "+": ["{she} buys {n} more.", "{she} finds {n} more.", "A friend brings {n} more."],
    "-": ["{she} gives away {n}.", "{she} loses {n}.", "{she} sells {n} of them."],
    "*": ["{she} swaps each of them for {n} others.", "Soon there are {n} times as many."],
    "/": ["{she} makes {n} equal parts and keeps one part.", "{she} shares them equally among {n} people."],
}


@dataclass(frozen=True)
class Problem:
    """A word problem with its calculation."""

    question: str
    """Text of the problem."""
    start: int
    """Count that the problem starts with."""
    steps: tuple[tuple[str, int], ...]
    """Changes of the count: pairs of an operation and a number."""

    @property
    def answer(self) -> int:
        """Count after the last step."""
        value = self.start
        for operation, number in self.steps:
            value = calculate(value, operation, number)
        return value


def calculate(value: int, operation: str, number: int) -> int:
    """Return the result of one step, or 0 if it is not an integer from 1 to `LARGEST`."""
    if operation == "/":
        return value // number if value % number == 0 else 0
    result = {"+": value + number, "-": value - number, "*": value * number}[operation]
    return result if 1 <= result <= LARGEST else 0


def draw_problem(rng: random.Random) -> Problem:
    """Draw one problem: operations are equally likely, numbers are drawn until every result is allowed."""
    operations = rng.choices("+-*/", k=rng.choice([1, 2, 2]))
    while True:
        value = start = rng.randint(2, 80)
        steps = []
        for operation in operations:
            number = rng.randint(2, 40) if operation in "+-" else rng.randint(2, 9)
            value = calculate(value, operation, number)
            steps.append((operation, number))
            if not value:
                break
        else:
            return Problem(question(rng, start, steps), start, tuple(steps))


def question(rng: random.Random, start: int, steps: list[tuple[str, int]]) -> str:
    """Return the words of a problem: its start, its steps, and the question for the count after them."""
    name, item = rng.choice(list(PRONOUNS)), rng.choice(ITEMS)
    she = PRONOUNS[name]
    events = [rng.choice(EVENTS[operation]).format(she=she, n=number) for operation, number in steps]
    return f"{name} has {start} {item}. {' '.join(events)} How many {item} does {she.lower()} have now?"


def problems(split: str, seed: int = 0) -> Iterator[Problem]:
    """Yield problems of a split without end; numbers and operations decide which, not the words around them."""
    return of_split(draw_problem, lambda problem: (problem.start, problem.steps), split, seed)


def rows(split: str, size: int, seed: int) -> list[dict[str, str | int]]:
    """Return `size` rows of a split with `question`, `answer` and the number of `steps`."""
    drawn = islice(problems(split, seed), size)
    return [{"question": p.question, "answer": str(p.answer), "steps": len(p.steps)} for p in drawn]
