"""Drafts of a colocated vLLM by n-grams: their acceptance, and whether generation is faster with them.

Where the last tokens occurred before, in the prompt or the completion, vLLM drafts the tokens that followed them. It
computes all drafts in one step and accepts each with its probability under the policy (2211.17192), so completions have
the policy's distribution and log-probabilities.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from grpo.utils.patching import patched

log = logging.getLogger(__name__)
OPTIONS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""vLLM's `speculative_config`."""
TRIALS = 6
"""Generations after the first, which take turns without and with drafts; the faster way makes all later ones."""
COUNTS = ("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens")


class Drafts:
    """Drafts of an engine, which are on at first.

    Args:
        llm: vLLM's `LLM`, whose engine is in this process.
    """

    def __init__(self, llm: Any) -> None:
        self._llm, self._counted, self.is_on = llm, (0.0, 0.0), True
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        """Seconds per token of the generations so far, with drafts and without."""
        self._trials = -1  # vLLM compiles in the first generation
        self.metrics()

    def switch(self, on: bool) -> None:
        """Have the next generations made with drafts or without."""
        self.is_on, scheduler = on, self._llm.llm_engine.engine_core.engine_core.scheduler
        scheduler.dynamic_sd_lookup = None if on else [0] * (scheduler.max_num_running_reqs + 1)

    def note(self, seconds: float, tokens: int) -> None:
        """Count a generation, and decide whether the next one has drafts."""
        if self._trials >= TRIALS:
            return
        if self._trials >= 0:
            self._seconds[self.is_on].append(seconds / tokens)
        self._trials += 1
        if self._trials < TRIALS:
            self.switch(not self.is_on)
            return
        drafted, plain = (1e3 * median(self._seconds[on]) for on in (True, False))
        self.switch(drafted <= plain)
        decision = "stay on" if self.is_on else "are off from now on"
        log.warning("n-gram drafts %s: %.3g ms per token with them, %.3g without", decision, drafted, plain)

    def metrics(self) -> dict[str, float]:
        """Return the accepted fraction of the tokens drafted since the last call; nothing if none were."""
        values = {metric.name: metric.value for metric in self._llm.get_metrics() if metric.name in COUNTS}
        counts = (values.get(COUNTS[0], 0.0), values.get(COUNTS[1], 0.0))
        accepted, drafted = (now - before for now, before in zip(counts, self._counted, strict=True))
        self._counted = counts
        return {"engine/draft_acceptance": accepted / drafted} if drafted else {}


@contextmanager
def exact_on_cpu() -> Iterator[None]:
    """Context in which vLLM's CPU build keeps the temperatures at which it checks drafts."""

    def expanded(
        values: torch.Tensor, ends: torch.Tensor, count: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        return values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts)

    with patched("vllm.v1.sample.rejection_sampler:expand_batch_to_tokens", expanded):
        yield
