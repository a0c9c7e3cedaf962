"""TRL's metrics of a step, merged from those of its micro-batches.

TRL computes a metric as a mean over the tokens, or the sequences, of one batch. The mean over a step is then
the mean of the micro-batches weighted by the tokens, or sequences, of each.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

CLIP_RATIOS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")
SUMS = ("policy_loss", "aux_loss")
EXTREMES = {"clip_ratio/low_min": min, "clip_ratio/high_max": max}
# Without a forward pass, skipped completions have no entropy and no importance weight; see `StepMetrics.result`.
UNKNOWN_FOR_SKIPPED = ("entropy", "vespo/phi_seq_mean")


@dataclass
class StepMetrics:
    """Sums over the micro-batches of one optimizer step, on one process or, merged, on all."""

    by_sequence: bool
    """Whether clip ratios count sequences (`importance_sampling_level="sequence"`) instead of tokens."""
    tokens: int = 0
    """Tokens of the loss in all completions of the step, skipped ones included."""
    rows: int = 0
    """All completions of the step."""
    skipped: int = 0
    """Skipped completions (zero advantage)."""
    skipped_tokens: int = 0
    """Tokens of the loss in the skipped completions."""
    microbatches: int = 0
    padded_tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    """Time of the micro-batches on each process, seconds."""
    sums: dict[str, float] = field(default_factory=dict)
    """The sum of each metric over its tokens or sequences."""
    counts: dict[str, float] = field(default_factory=dict)
    extremes: dict[str, float] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, list[float]], tokens: int, rows: int, policy_weight: float) -> None:
        """Add what TRL recorded for a micro-batch with so many tokens of the loss and sequences.

        Args:
            policy_weight: share of the micro-batch's losses in the step's.
        """
        for name, values in metrics.items():
            for value in values:
                if name in EXTREMES:
                    if not math.isnan(value):
                        self.extremes[name] = EXTREMES[name](self.extremes.get(name, value), value)
                elif not tokens and not rows:  # nothing was computed, but there is such a metric
                    self.accumulate(name, 0.0, 0)
                elif name in SUMS:
                    self.accumulate(name, value * policy_weight, 0)
                elif name == "vespo/phi_seq_mean" or (self.by_sequence and name in CLIP_RATIOS):
                    self.accumulate(name, value * rows, rows)
                else:
                    self.accumulate(name, value * tokens, tokens)

    def accumulate(self, name: str, total: float, count: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + total
        self.counts[name] = self.counts.get(name, 0) + count

    def _of_computed(self, name: str, mean: float) -> dict[str, float]:
        """Return the mean of a metric under its own name and TRL's, as far as skipped completions allow it."""
        if not self.skipped_tokens:
            return {f"update/{name}": mean, name: mean}
        return {f"update/{name}": mean} if self.counts[name] else {}

    def result(self) -> dict[str, float]:
        """Return the metrics of the step.

        A skipped completion has no advantage, so it is never clipped: the clip ratios count it, as in TRL. Its entropy
        is unknown: `update/entropy` is over the computed ones, if there are any, and `entropy` is logged only if none
        was skipped.
        """
        result = {}
        for name, total in self.sums.items():
            if name in SUMS:
                result[name] = total
                continue
            count = self.counts[name]
            if name in CLIP_RATIOS:
                count = self.rows if self.by_sequence else self.tokens
            mean = total / count if count else 0.0  # of nothing, as in TRL
            result |= self._of_computed(name, mean) if name in UNKNOWN_FOR_SKIPPED else {name: mean}
        unclipped = self.skipped if self.by_sequence else self.skipped_tokens
        for name, extreme in EXTREMES.items():
            if unclipped and (name in self.extremes or "clip_ratio/low_mean" in self.sums):
                result[name] = extreme(self.extremes.get(name, 0.0), 0.0)
            elif name in self.extremes:
                result[name] = self.extremes[name]
        result["update/microbatches"] = self.microbatches
        result["update/padded_tokens"] = self.padded_tokens
        result["update/rows_skipped"] = self.skipped
        if len(self.seconds) > 1:  # the mean wait for the slowest process
            result["time/wait"] = max(self.seconds) - sum(self.seconds) / len(self.seconds)
        return result


def merge(parts: Iterable[StepMetrics]) -> StepMetrics:
    """Return the sums over all processes; the number of micro-batches is that of the process with the most."""
    first, *others = parts
    for part in others:
        for name in ("tokens", "rows", "skipped", "skipped_tokens", "padded_tokens"):
            setattr(first, name, getattr(first, name) + getattr(part, name))
        first.microbatches = max(first.microbatches, part.microbatches)
        first.seconds += part.seconds
        for name in part.sums:
            first.accumulate(name, part.sums[name], part.counts[name])
        for name, value in part.extremes.items():
            first.extremes[name] = EXTREMES[name](first.extremes.get(name, value), value)
    return first
