"""Which rows of a batch go into which micro-batch, trimmed how far, with which weight. Pure functions, no torch.

A batch is rows of prompts padded on the left and completions padded on the right. A micro-batch is some of its rows,
cut to its own longest prompt and its own longest completion, so that it costs rows x (prompt + completion) tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# What a micro-batch costs on top of its tokens, as a share of the budget: starting one is not free.
OVERHEAD = 1 / 16


@dataclass(frozen=True)
class Microbatch:
    """Rows that are computed together."""

    rows: tuple[int, ...]
    """Indices into the batch."""
    prompt_length: int
    """Tokens of the longest prompt."""
    completion_length: int
    """Tokens of the longest completion, at least 1."""
    weight: float = 1.0
    """The factor of this micro-batch's loss in the loss of the batch."""

    @property
    def tokens(self) -> int:
        """Tokens with padding."""
        return len(self.rows) * (self.prompt_length + self.completion_length)


def has_work(tokens: Sequence[int], advantages: Sequence[float] | None) -> list[bool]:
    """Return for each row whether it can change the gradient.

    A row without a token in the loss never does. Where the advantage is the loss's only factor, a row whose advantage
    is exactly zero does not either.

    Args:
        tokens: number of tokens of each row that the loss counts.
        advantages: of each row; None where more than the advantage acts on the policy (KL penalty, entropy bonus).
    """
    return [count > 0 and (advantages is None or advantages[row] != 0) for row, count in enumerate(tokens)]


def shares(counts: Sequence[int]) -> list[float]:
    """Return each row's share in an average over all rows, in which a row counts `counts[row]` times."""
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


def pack(
    prompt_lengths: Sequence[int],
    completion_lengths: Sequence[int],
    budget: int,
    rows: Sequence[int] | None = None,
    share: Sequence[float] | None = None,
) -> list[Microbatch]:
    """Divide rows into micro-batches of at most `budget` tokens each, with as little padding as sorting allows.

    Each row appears once. A row that exceeds the budget by itself is a micro-batch by itself. The largest micro-batch
    comes first, so that what does not fit into memory shows at once.

    Args:
        prompt_lengths: tokens of each row's prompt.
        completion_lengths: tokens of each row's completion.
        budget: `max_tokens_per_microbatch`, tokens with padding.
        rows: the rows to divide; None takes all.
        share: each row's share in the loss; a micro-batch weighs what its rows do. None gives every one weight 1.
    """
    rows = range(len(prompt_lengths)) if rows is None else rows
    pairs = {row: (prompt_lengths[row], max(1, completion_lengths[row])) for row in rows}
    orders = [
        sorted(rows, key=lambda row: pairs[row]),
        sorted(rows, key=lambda row: pairs[row][::-1]),
        sorted(rows, key=lambda row: sum(pairs[row])),
    ]
    divided = [_divide([(row, *pairs[row]) for row in order], budget) for order in orders]
    best = min(divided, key=lambda parts: cost(parts, budget))
    if share is not None:
        best = [
            Microbatch(part.rows, part.prompt_length, part.completion_length, sum(share[row] for row in part.rows))
            for part in best
        ]
    return sorted(best, key=lambda part: -part.tokens)


def cost(microbatches: Sequence[Microbatch], budget: int) -> float:
    """Return what computing the micro-batches costs, in tokens."""
    return sum(part.tokens + OVERHEAD * budget for part in microbatches)


def _divide(order: list[tuple[int, int, int]], budget: int) -> list[Microbatch]:
    """Cut a sequence of (row, prompt length, completion length) where the cost is lowest, by dynamic programming.

    The last micro-batch of the first `end` rows begins at `start[end]`; `least[end]` is what these rows cost.
    """
    least, start = [0.0], [0]
    for end in range(1, len(order) + 1):
        prompt = completion = 0
        least.append(float("inf"))
        start.append(end - 1)
        for begin in range(end - 1, -1, -1):
            prompt, completion = max(prompt, order[begin][1]), max(completion, order[begin][2])
            tokens = (end - begin) * (prompt + completion)
            if tokens > budget and begin < end - 1:
                break
            if least[begin] + tokens + OVERHEAD * budget < least[end]:
                least[end], start[end] = least[begin] + tokens + OVERHEAD * budget, begin
    parts = []
    end = len(order)
    while end:
        chosen = order[start[end] : end]
        rows, prompts, completions = zip(*chosen, strict=True)
        parts.append(Microbatch(rows, max(prompts), max(completions)))
        end = start[end]
    return parts


def half(rows: int, group: int) -> int:
    """Return where to cut a number of rows in two, between groups if there are several."""
    groups = rows // group
    return groups // 2 * group if groups > 1 else rows // 2
