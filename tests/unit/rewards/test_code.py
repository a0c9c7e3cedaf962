"""`code` calls the code of a completion and judges plain values; what tests of real data sets do works."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rewards.code import code
from rewards.isolation.reward import Reward
from rewards.sandbox import bubblewrap
from rewards.sandbox.verdict import Busy, in_parallel

TESTS = ["assert double(3) == 6", "assert double(-1) == -2"]
CORRECT = "def double(x):\n    return 2 * x"
SANDBOXES = ["none", pytest.param("bubblewrap", marks=pytest.mark.skipif(not shutil.which("bwrap"), reason="no bwrap"))]
ACCOUNT = """
class Empty(ValueError):
    pass

class Account:
    opened = 0

    def __init__(self, owner, money=0):
        self.owner, self.money = owner, money
        Account.opened += 1

    def take(self, money):
        if money > self.money:
            raise Empty("not enough")
        self.money -= money
        return self

    def __eq__(self, other):
        return isinstance(other, Account) and self.money == other.money

    def __hash__(self):
        return self.money

    def __enter__(self):
        self.money += 1
        return self

    def __exit__(self, *error):
        self.money -= 1

    def __add__(self, other):
        return Account("both", self.money + other.money)

    def __len__(self):
        return self.money

    def __str__(self):
        return f"{self.owner} has {self.money}"
"""
DO_MORE = {  # what tests of data sets do beyond comparing numbers: the code, its tests
    "objects": (
        ACCOUNT,
        """
a, b = Account("A", 7), Account(owner="B", money=3)
assert a.take(4) == b and a.take(0) is a and a.owner == "A" and len(b) == 3 and str(b) == "B has 3"
assert (a + b).money == 6 and isinstance(a, Account) and not isinstance(3, Account) and Account.opened == 3
with a as entered:
    assert entered is a and a.money == 4
assert len({a, b}) == 1 and f"{a}" == "A has 3"
a.owner = "C"
assert [one.owner for one in (a, b)] == ["C", "B"] and {a: 1}[a] == 1 and a != 3
try:
    b.take(100)
except ValueError as error:
    assert str(error) == "not enough"
else:
    raise AssertionError
""",
    ),
    "values": (
        """
import enum
from decimal import Decimal
from fractions import Fraction

class N(enum.IntEnum):
    one = 1

def same(x):
    return x
""",
        """
from decimal import Decimal
from fractions import Fraction
values = [None, True, 2**80, 1.5, float("inf"), 1 + 2j, "ü\\ud800", b"\\xff", (1, [2]), {3}, {(4,): {5: None}}]
for x in values + [range(3), Fraction(1, 3), Decimal("0.1"), frozenset({6}), int, ValueError]:
    assert same(x) == x and type(same(x)) is type(x), x
assert N.one == 1 and same(same) and str(same(float("nan"))) == "nan" and list(same(iter("ab"))) == ["a", "b"]
""",
    ),
    "subclasses of built-in types": (
        """
import collections
import enum
from dataclasses import dataclass
from typing import NamedTuple

class Cache(collections.OrderedDict):
    def put(self, key, value):
        self[key] = value
        return self

class Stack(list):
    push = list.append

class Point(NamedTuple):
    x: int
    y: int = 2

class Color(enum.IntEnum):
    RED = 1

@dataclass
class Node:
    value: int
    left: "Node" = None

def count(text):
    return collections.Counter(text)
""",
        """
import collections
cache, stack = Cache(), Stack()
assert cache.put(1, 2) == {1: 2} and 1 in cache and cache[1] == 2 and len(cache) == 1 and isinstance(cache, dict)
stack.push(3)
stack.push(4)
assert stack == [3, 4] and [3, 4] == stack and stack.pop() == 4 and stack == [3]
assert 3 in stack and stack + [5] == [3, 5]
assert Point(1).x == 1 and Point(1) == (1, 2) and Point(1)._replace(y=5).y == 5 and isinstance(Point(1), tuple)
assert Color.RED.name == "RED" and Color.RED == 1 and Color.RED + 1 == 2 and isinstance(Color.RED, Color)
assert Node(1, Node(2)).left.value == 2 and Node(1) == Node(1)
assert count("aab").most_common(1) == [("a", 2)] and count("a") == collections.Counter("a")
""",
    ),
    "dates, slices, queues": (
        "import datetime, collections\ndef later(day):\n    return day + datetime.timedelta(days=1)\n"
        "class Row:\n    def __getitem__(self, key):\n        return list(range(10))[key]\n"
        "def turn(q):\n    q.rotate(1)\n",
        "from datetime import date\nimport collections\nq = collections.deque([1, 2, 3])\nturn(q)\n"
        "assert later(date(2024, 2, 28)) == date(2024, 2, 29) and Row()[2:4] == [2, 3] and list(q) == [3, 1, 2]",
    ),
    "a class of tests": (
        CORRECT,
        "import unittest\nclass Tests(unittest.TestCase):\n    cases = [(1, double(1))]\n    def test(self):\n"
        "        for one, two in self.cases:\n            self.assertEqual(one * 2, two)\n"
        "Tests('test').debug()",
    ),
    "as a script": (CORRECT, "if __name__ == '__main__':\n    assert double(2) == 4"),
    "in place": (
        "def order(x, y):\n    x.sort()\n    y['a'] = x[0]\n",
        "x, y = [3, 1, 2], {}\norder(x, y)\nassert x == [1, 2, 3] and y == {'a': 1}",
    ),
    "functions": (
        """
def twice(f, x):
    return f(f(x))

def adder(n):
    return lambda x: x + n

def squares():
    n = 0
    while True:
        yield n * n
        n += 1
""",
        """
import itertools
assert twice(lambda x: x + 1, 1) == 3 and twice(adder(2), 1) == 5 and adder(3)(4) == 7 and twice(str, 1) == "1"
assert list(itertools.islice(squares(), 4)) == [0, 1, 4, 9] and sum(x for x in map(adder(1), [1, 2])) == 5
""",
    ),
    "printing": (
        "def greet(name):\n    print('Hello,', name)\n",
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as said:\n    greet('Ada')\n"
        "assert said.getvalue() == 'Hello, Ada\\n'",
    ),
    "output that is put back": (
        "def greet():\n    print('Hello')\n",
        "import io, sys\nsys.stdout = io.StringIO()\ngreet()\nsaid = sys.stdout.getvalue()\n"
        "sys.stdout = sys.__stdout__\ngreet()\nassert said == 'Hello\\n'",
    ),
    "a function that checks": (CORRECT, "def check(candidate):\n    assert candidate(4) == 8\ncheck(double)"),
    "modules that the code imports": (
        f"import math\n{CORRECT}",
        "assert math.isclose(double(0.1), 0.2)",
    ),
}


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_code_that_passes_its_tests_is_correct_fenced_or_not(sandbox: str) -> None:
    fenced = f"First I tried:\n```python\nx = (\n```\nThen:\n```python\n{CORRECT}\n```\nDone."
    chat = [{"role": "assistant", "content": fenced}]
    correct: list[Any] = [CORRECT, fenced, chat, f"```\n{CORRECT}\n```"]
    incorrect = ["", "x = 1", "def double(x):\n    return 3 * x", "def double(x)\n    return 2 * x"]
    tests = [TESTS, "\n".join(TESTS)] * 4
    assert code(correct + incorrect, tests, sandbox=sandbox) == [1, 1, 1, 1, 0, 0, 0, 0]


def test_a_row_that_was_busy_is_scored_again_until_one_still_is() -> None:
    busy = Busy("busy")
    verdicts: list[list[float | Exception]] = [[1.0], [busy, 1.0], [busy, 0.0], [busy, busy], [busy]]
    assert in_parallel(lambda row: verdicts[row].pop(0), len(verdicts)) == [1.0, 1.0, 0.0, busy, busy]
    assert not any(verdicts)


def test_tests_use_the_code_as_if_it_were_theirs() -> None:
    codes, tests = zip(*DO_MORE.values(), strict=True)
    assert dict(zip(DO_MORE, code(codes, tests, sandbox="none"), strict=True)) == dict.fromkeys(DO_MORE, 1)
    assert code(["pass"] * len(tests), tests, sandbox="none") == [0] * len(tests)


def test_pythons_own_names_stay_unless_the_row_says_otherwise() -> None:
    program, tests = "def sum(a, b):\n    return a + b\ndef all(rows):\n    return True", "assert sum(1, 2) == 3"
    lazy = "assert all(sum(x, 1) == -1 for x in range(3))"
    rewards = code([program] * 3, [tests, tests, lazy], entry_point=[None, "sum", "sum"], sandbox="none")
    assert rewards == [0, 1, 0]


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (  # which would end the loop of the tests
            "def double(x):\n    raise StopIteration",
            "for got, want in zip(map(double, [1, 2, 3]), [2, 4, 6]):\n    assert got == want",
        ),
        ("def double(x):\n    raise StopIteration", "assert all(map(lambda x: double(x) == 2 * x, range(1, 9)))"),
        (
            "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndouble = lambda x: 0",
            "assert math.isclose(double(0.1), 0.2)",
        ),
        ("class X:\n    pass\ndouble = lambda x: X()", "assert double(3)[:2] == [1, 2]"),
        ("class X(list):\n    __eq__ = lambda self, other: True\ndouble = lambda x: X()", "assert double(3) == [6]"),
        ("class X(int):\n    __eq__ = lambda self, other: True\ndouble = lambda x: X()", "assert double(3) == 6"),
        ("double = lambda x: exit(0)", "try:\n    double(3)\nexcept SystemExit:\n    raise\nassert double(3) == 6"),
    ],
)
def test_what_only_looks_correct_to_the_tests_is_not(program: str, tests: str) -> None:
    assert code([program], [tests], sandbox="none") == [0]


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ("def test_a():\n    assert double(3) == 7", "call nothing of the code"),
        ("import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        assert False", "call nothing"),
        ("", "call nothing of the code"),
        ("assert double(3) ==", "cannot be compiled"),
        ("import numpy as np\nassert np.isclose(double(3), 6)", "the package numpy"),
        ("assert np.isclose(double(3), 6)", "the tests use np, which they do not import"),
    ],
)
def test_tests_that_call_nothing_of_the_code_are_a_row_error(tests: str, says: str) -> None:
    (error,) = code([CORRECT], [tests], sandbox="none")
    assert isinstance(error, ValueError)
    assert says in str(error)


def test_a_check_of_humaneval_gets_the_function_its_row_names() -> None:
    tests = "def check(candidate):\n    assert candidate(3) == 6"
    assert code([CORRECT, "double = len"], [tests] * 2, entry_point=["double"] * 2, sandbox="none") == [1, 0]


def test_a_test_with_an_argument_not_to_copy_is_a_row_error() -> None:
    reward = Reward("rewards.code.code", "code", {"sandbox": "none"})
    tests = ["class Point:\n    pass\ndouble(Point())", TESTS]
    assert reward.score(completions=[CORRECT] * 2, tests=tests) == [None, 1]
    assert reward.errors == {"ValueError": 1}
    reward.close()


def test_a_machine_without_a_sandbox_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"^reward.code: the program bwrap is missing.*sandbox=none"):
        Reward("rewards.code.code", "code")
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    with pytest.raises(ValueError, match=r"\(bwrap: No permissions to create new namespace\).*sandbox=none") as caught:
        Reward("rewards.code.code", "code")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="sandbox=docker: there are bubblewrap and none"):
        Reward("rewards.code.code", "code", {"sandbox": "docker"})
    Reward("rewards.code.code", "code", {"sandbox": "none"}).close()


def test_the_filter_names_the_numbers_of_the_machines_headers() -> None:
    names = "\n".join(f"{name} __NR_{name}" for name in bubblewrap.FORBIDDEN)
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler")
    source = f"#include <asm/unistd.h>\n{names}\nclone __NR_clone\nclone3 __NR_clone3\n"
    said = subprocess.run([compiler, "-E", "-P", "-"], input=source, capture_output=True, text=True, check=True).stdout
    numbers = dict(line.split() for line in said.splitlines() if line.count(" ") == 1)
    column, _ = bubblewrap.ARCHITECTURES[bubblewrap.platform.machine()]
    ours = {name: row[column] for name, row in bubblewrap.FORBIDDEN.items()}
    ours |= {"clone": bubblewrap.CLONE[column], "clone3": bubblewrap.CLONE3}
    known = {name: int(number) for name, number in numbers.items() if number.isdigit()}  # older headers know fewer
    assert len(known) > 25
    assert {name: ours[name] for name in known} == known
