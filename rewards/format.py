"""1 for a completion that matches a pattern, 0 for any other."""

import re
from collections.abc import Sequence
from typing import Any

from rewards.text import text_of


def format(completions: Sequence[Any], pattern: str, **columns: Any) -> list[float]:
    r"""Search each completion for a regular expression: anywhere, after `\A` at its start, before `\Z` at its end.

    `.` also matches line ends.
    """
    search = re.compile(pattern, re.DOTALL).search
    return [float(search(text_of(completion)) is not None) for completion in completions]
