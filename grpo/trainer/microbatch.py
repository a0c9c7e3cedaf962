"""Packing the sequences of a batch into micro-batches: which ones, trimmed how far, with which weight. No torch here.

A row of a batch is a prompt padded on the left and a completion padded on the right. A micro-batch is some of the rows,
trimmed to its own longest prompt and its own longest completion, so that it costs rows x (prompt + completion) tokens.
Rows can also go through the policy as one sequence without padding: each prompt once, then its completions, which do
not see each other (`grpo/trainer/shared_prompts/layout.py`). That costs the tokens of all prompts and all completions.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

# What a micro-batch costs on top of its tokens, as a fraction of the budget: starting one is not free.
OVERHEAD = 1 / 16


class PromptGroup(NamedTuple):
    """A prompt and consecutive rows that share it."""

    prompt: int
    """Tokens of the prompt, at least 1."""
    completions: tuple[int, ...]
    """Tokens of the completion of each row."""


@dataclass(frozen=True)
class Microbatch:
    """Rows of a batch that are computed at once."""

    rows: tuple[int, ...]
    """Indices into the batch."""
    prompt_length: int
    """Tokens of the longest prompt."""
    completion_length: int
    """Tokens of the longest completion, at least 1."""
    weight: float = 1.0
    """The factor of this micro-batch's loss in the loss of the batch."""
    shared: int | None = None
    """With shared prompts: length in tokens of the one sequence that goes through the policy."""
    groups: tuple[PromptGroup, ...] = ()
    """With shared prompts: all rows, in their order."""
    pairs: int = 0
    """With shared prompts: pairs of tokens in attention, of which the policy sees about half."""

    def __len__(self) -> int:
        """Return the number of completions."""
        return len(self.rows)

    @property
    def tokens(self) -> int:
        """Tokens with padding."""
        return self.shared or len(self.rows) * (self.prompt_length + self.completion_length)

    @property
    def attention(self) -> int:
        """Pairs of tokens in attention, twice those that see each other."""
        return self.pairs or self.tokens * (self.prompt_length + self.completion_length)


def has_work(tokens: Sequence[int], advantages: Sequence[float] | None) -> list[bool]:
    """Return for each row whether it can change the gradient.

    A row without a token in the loss never does. Where the advantage is the loss's only factor, a row whose advantage
    is exactly zero does not either.

    Args:
        tokens: number of tokens of each row that the loss counts.
        advantages: of each row; None where more than the advantage acts on the policy (KL penalty, entropy bonus).
    """
    return [count > 0 and (advantages is None or advantages[row] != 0) for row, count in enumerate(tokens)]


def loss_fractions(counts: Sequence[int]) -> list[float]:
    """Return each row's fraction of an average over all rows, in which a row counts `counts[row]` times."""
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


def pack(
    prompt_lengths: Sequence[int],
    completion_lengths: Sequence[int],
    budget: int,
    rows: Sequence[int] | None = None,
    fractions: Sequence[float] | None = None,
    prompts: Sequence[Hashable] | None = None,
    hidden_size: int = 0,
) -> list[Microbatch]:
    """Divide rows into micro-batches of at most `budget` tokens each, in the cheapest of several ways.

    Each row appears once. A row that exceeds the budget by itself is a micro-batch by itself. The largest micro-batch
    comes first, so that what does not fit into memory shows at once.

    Args:
        prompt_lengths: tokens of each row's prompt.
        completion_lengths: tokens of each row's completion.
        budget: `max_tokens_per_microbatch`, tokens with padding.
        rows: the rows to divide; None takes all.
        fractions: of each row in the loss; a micro-batch weighs what its rows do. None gives every one weight 1.
        prompts: what is equal for rows with equal prompts, which are then shared if that is cheaper; None for never.
        hidden_size: of the policy, for the price of attention; 0 leaves it out.
    """
    rows = range(len(prompt_lengths)) if rows is None else rows
    pairs = {row: (prompt_lengths[row], max(1, completion_lengths[row])) for row in rows}
    plans: list[list[Microbatch]] = []
    if prompts is not None and len({prompts[row] for row in rows}) < len(rows):
        units = _with_shared_prompts({row: prompts[row] for row in rows}, pairs, budget)
        plans.append([_shared(groups, length, pairs, completion_lengths) for length, groups in units])
    if not plans or cost(plans[0], budget, hidden_size) > least_cost(list(pairs.values()), budget, hidden_size):
        orders = [
            sorted(rows, key=lambda row: pairs[row]),
            sorted(rows, key=lambda row: pairs[row][::-1]),
            sorted(rows, key=lambda row: sum(pairs[row])),
        ]
        plans = [_divide([(row, *pairs[row]) for row in order], budget) for order in orders] + plans
    best = min(plans, key=lambda parts: cost(parts, budget, hidden_size))
    if fractions is not None:
        best = [replace(part, weight=sum(fractions[row] for row in part.rows)) for part in best]
    return sorted(best, key=lambda part: -part.tokens)


def cost(microbatches: Sequence[Microbatch], budget: int, hidden_size: int = 0) -> float:
    """Return what computing the micro-batches costs, in tokens.

    A layer of a transformer multiplies a token with 12 hidden_size^2 weights and attends to its sequence with
    2 hidden_size multiplications a token of it (Kaplan et al., 2001.08361, table 1), which is a sixth of a token's
    weights for every hidden_size tokens of length.
    """
    total = 0.0
    for part in microbatches:
        total += part.tokens + OVERHEAD * budget
        if hidden_size:
            total += part.attention / (6 * hidden_size)
    return total


def least_cost(pairs: Sequence[tuple[int, int]], budget: int, hidden_size: int = 0) -> float:
    """Return what no division of rows (prompt and completion length) with prompts of their own costs less than."""
    tokens = sum(map(sum, pairs))
    attention = sum(sum(pair) ** 2 for pair in pairs) / (6 * hidden_size) if hidden_size else 0.0
    return tokens + attention + OVERHEAD * budget * -(-tokens // max(budget, *map(sum, pairs)))


def _with_shared_prompts(
    prompts: Mapping[int, Hashable], pairs: Mapping[int, tuple[int, int]], budget: int
) -> list[tuple[int, list[list[int]]]]:
    """Return micro-batches of rows with equal prompts, as many rows as the budget allows: their tokens and groups.

    The last token of the prompt is repeated for each completion, as it predicts the first token, and the last token
    of a completion is not needed. What fits together is found by first fit, the longest first, which takes at most 22 %
    more micro-batches than the best division (D. S. Johnson, Near-optimal bin packing algorithms, 1973).
    """
    equal: dict[Hashable, list[int]] = {}
    for row, prompt in prompts.items():
        equal.setdefault(prompt, []).append(row)
    units: list[tuple[int, list[int]]] = []  # a prompt with some of its completions: tokens, rows
    for members in equal.values():
        before = pairs[members[0]][0] - 1
        length, unit = before, list[int]()
        for row in sorted(members, key=lambda row: pairs[row][1]):
            if unit and length + pairs[row][1] > budget:
                units.append((length, unit))
                length, unit = before, []
            length += pairs[row][1]
            unit.append(row)
        units.append((length, unit))
    parts: list[tuple[int, list[list[int]]]] = []
    for length, unit in sorted(units, key=lambda unit: -unit[0]):
        place = next((place for place, (used, _) in enumerate(parts) if used + length <= budget), len(parts))
        used, others = parts[place] if place < len(parts) else (0, [])
        parts[place : place + 1] = [(used + length, [*others, unit])]
    return parts


def _shared(
    groups: Sequence[Sequence[int]], tokens: int, pairs: Mapping[int, tuple[int, int]], lengths: Sequence[int]
) -> Microbatch:
    """Return the micro-batch of groups of rows with equal prompts."""
    rows = [row for group in groups for row in group]
    longest_prompt, longest_completion = (max(pairs[row][side] for row in rows) for side in (0, 1))
    attention = sum(pairs[group[0]][0] ** 2 for group in groups)
    attention += sum(pairs[row][1] * (2 * pairs[row][0] + pairs[row][1]) for row in rows)
    shared = tuple(PromptGroup(pairs[group[0]][0], tuple(lengths[row] for row in group)) for group in groups)
    return Microbatch(tuple(rows), longest_prompt, longest_completion, shared=tokens, groups=shared, pairs=attention)


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


def too_long(part: Microbatch | None) -> str:
    """Return advice for a sequence that does not fit alone, on this process or, with None, on another."""
    lengths = f"of {part.prompt_length} prompt and {part.completion_length} completion tokens" if part else "elsewhere"
    return (
        f"a single sequence {lengths} does not fit into memory: lower max_completion_length, use "
        "gradient_checkpointing=True, LoRA or QLoRA, or a smaller model"
    )
