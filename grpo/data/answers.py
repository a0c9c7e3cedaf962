"""The reference answers of rows as text."""

import json
import re
from decimal import Decimal
from typing import Any

from grpo.data.prompts import Row, value_of
from grpo.utils.errors import ConfigError
from rewards.notation import LONGEST

EXACT = 15
"""Decimal digits that a float keeps."""


def answer_text(row: Row, column: str) -> str:
    """Return the text of an answer, empty for none: a number without an exponent, the only member of a list.

    Raises:
        ConfigError: the value is a dictionary or a list of alternatives, or has lost digits.
    """
    try:
        return _text(value_of(row, column))
    except (KeyError, IndexError, ValueError, TypeError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"task.answer.column={column}: {reason}") from error


def final(text: str, pattern: str | None) -> str:
    """Return the final answer in the text of an answer; empty if the pattern does not match."""
    if pattern is None:
        return text.strip()
    match = re.search(pattern, text)
    return (match.group(1) or "").strip() if match else ""


def _text(value: Any) -> str:
    if value is None or value != value or value == []:
        return ""
    if isinstance(value, float):
        return _decimal(value)
    if isinstance(value, list):
        if len(value) == 1 and not isinstance(value[0], dict | list):
            return _text(value[0])
        if not _is_numeric(value):
            raise ValueError(f"a list, {value!r:.60}, and an answer is one text; name a member, as in answer[0]")
        return json.dumps(value)  # a box, a vector
    if isinstance(value, dict):
        raise ValueError(f"a dictionary, {value!r:.60}; name a field, as in answer.{next(iter(value), 'name')}")
    return str(value)


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_numeric, value))
    return isinstance(value, int | float)


def _decimal(value: float) -> str:
    digits = Decimal(repr(value))
    if abs(value) >= 2**53 and len(digits.normalize().as_tuple().digits) > EXACT:
        raise ValueError(
            f"{value:g} has lost digits, as numbers of this size are read as floats: write the answers as text"
        )
    text = format(digits, "f").removesuffix(".0")
    return text if len(text) <= LONGEST else str(digits)
