"""1 for a completion in which a pattern is found, 0 for any other."""

import re
from collections.abc import Sequence
from typing import Any

from rewards.text import text_of


def format(completions: Sequence[Any], pattern: str, **columns: Any) -> list[float]:
    r"""Search each completion for a regular expression; `.` matches line ends too.

    Args:
        pattern: anchored where you anchor it: `\A` is the start of the completion, `\Z` its end.
    """
    search = re.compile(pattern, re.DOTALL).search
    return [float(search(text_of(completion)) is not None) for completion in completions]
