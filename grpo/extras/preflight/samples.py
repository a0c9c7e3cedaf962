"""The completions of a preflight, and the file that keeps them as they come."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpo.rundir.files import write_lines


@dataclass(frozen=True)
class Sample:
    """A completion that has been generated and scored."""

    text: str
    """The policy's text; in a conversation with tools its last message."""
    tokens: int
    """Its length, tool results included."""
    ended: bool
    """Whether the policy ended it; it was truncated otherwise."""
    rewards: dict[str, float | None]
    """Values by the name of the reward; None if the function returned None or failed on the completion."""
    correct: bool | None
    """Whether the completion is correct by the grader; None without a grader."""
    failed: list[str] = field(default_factory=list)
    """Names of the rewards that failed on the completion."""


@dataclass(frozen=True)
class Sampled:
    """A problem with its completions."""

    key: str
    """Fingerprint of the problem and of all that decides its completions."""
    problem: int
    """Its row in the training split after filtering."""
    prompt: Any
    """A string, or a list of messages."""
    answer: str
    """The reference answer."""
    completions: list[Sample]
    seconds: dict[str, float]
    """Its part of the time of the batch that it was in, by phase: `generate`, `reward`."""
    first: bool = False
    """Whether the completion was in the first batch of a call, whose time includes the warm-up."""
    prompt_tokens: int = 0
    """Tokens of its prompt; 0 in files of version 0.2.0."""


def read(file: Path) -> dict[str, Sampled]:
    """Return the problems in a file by their keys; a last line that was not written completely is removed."""
    *complete, partial = file.read_text().split("\n") if file.exists() else [""]
    rows = [json.loads(line) for line in complete]
    if partial:
        write_lines(file, rows)
    return {
        row["key"]: Sampled(**row | {"completions": [Sample(**completion) for completion in row["completions"]]})
        for row in rows
    }


def append(file: Path, problems: list[Sampled]) -> None:
    """Add problems to a file, a JSON line each."""
    with file.open("a") as out:
        out.write("".join(json.dumps(asdict(problem)) + "\n" for problem in problems))
