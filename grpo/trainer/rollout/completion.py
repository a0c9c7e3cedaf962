"""A completion: what a policy has sampled for a problem, and how it was scored."""

from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass
class Completion:
    """A completion that has been generated and scored."""

    problem: int
    """Its row in the data, or in the batch of a data loader."""
    prompt_ids: list[int]
    ids: list[int]
    mask: list[int] | None
    """1 for tokens of the policy, 0 for those of tools; None without tools."""
    logps: list | None
    """By the engine, for each token, as TRL's `rollout_func` returns them."""
    prompt: Any
    """The prompt with what an environment's `reset` has added, without its images."""
    messages: Any
    """Its text, or its messages, tool calls and their results included."""
    rewards: list[float]
    columns: dict[str, Any]
    """Values that rewards have logged for the completion."""
    images: list | None = None
    """The images of its prompt and of tools; None where they are those of its row, which no process sends."""
    tool_images: list | None = None
    """The images of tools among them."""
    policy: int = 0
    """Number of updates of the policy that began it."""


Group = list[Completion]


def own_tokens(completion: Completion) -> int:
    """Return how many tokens of a completion are the policy's, and not of tools."""
    return len(completion.ids) if completion.mask is None else sum(completion.mask)
