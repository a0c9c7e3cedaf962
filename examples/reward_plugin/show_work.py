"""1 for an answer that follows from the calculations shown before `####`, else 0; more of them earn no more."""

import operator
import re
from fractions import Fraction

from rewards.notation import numbers
from rewards.text import text_of

NUMBER = r"\d[\d,]{0,11}(?:\.\d{1,6})?"
CALCULATION = re.compile(rf"(?<![-+*/] )(?<![-+*/.,\d])(-?{NUMBER}) ?([-+*/]) ?\$?({NUMBER}) ?= ?\$?(-?{NUMBER})(?!\d)")
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def show_work(completions, prompts, **columns):
    """Check the work of each completion; whether its answer is the reference's is up to `correctness`."""
    return [float(follows(text_of(said), text_of(asked))) for said, asked in zip(completions, prompts, strict=True)]


def follows(said, asked):
    """Whether the answer is the result of true calculations, each on a number of the prompt or an earlier result."""
    work, _, answer = said.partition("####")
    known, result = {value(number) for number in re.findall(NUMBER, asked)}, None
    for left, sign, right, result in CALCULATION.findall(work):
        left, right, result = value(left), value(right), value(result)
        if not known & {left, right} or (sign == "/" and right == 0):
            return False
        if abs(SIGNS[sign](left, right) - result) >= Fraction(1, 100):  # cents may be rounded
            return False
        known.add(result)
    return result in numbers(answer.strip())


def value(number):
    """Return the value of a number as it is written, with or without thousands separators."""
    return Fraction(number.replace(",", ""))
