"""Completions by transformers' `generate`, as many at once as fit into memory."""

import logging
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from transformers.integrations.sdpa_attention import use_gqa_in_sdpa

from grpo.generation.transformers.continuous_batch import ContinuousBatch, in_step, why_not_shared
from grpo.generation.transformers.growing_cache import keeps_all_keys
from grpo.generation.transformers.prompt_cache import why_repeated
from grpo.generation.transformers.settings import only, settings_of
from grpo.generation.transformers.static_batch import StaticBatch, why_not_static
from grpo.generation.transformers.trial import why_not_continued, why_not_joined
from grpo.generation.transformers.turns import Turns
from grpo.utils.oom import half, is_out_of_memory, smaller_until_it_fits, twice
from grpo.utils.patching import patched

log = logging.getLogger(__name__)
LONG = 64
"""Tokens of prompts from which shared keys take less time on a CPU than copies (short ones: 10 to 20 % more)."""
RECORDING = ("cuda",)
"""Devices that repeat recorded steps."""
ANEW = "each completion reads its prompt anew"
UNRECORDED = "the steps of generation are not recorded"
COPIED = "each completion has a copy of its prompt's keys"
READ_ANEW = "turns after a layer with a state, or with a window, read their prompts anew"


class ContinuousBatching:
    """Completes prompts: it reads each distinct prompt once, and completions that do not fit wait for free places.

    After an OOM it halves the number of completions at once for the rest of the run. It generates all completions of
    the failed batch again: keeping the ended completions would prefer short completions.

    Args:
        limit: number of completions at once; None for all completions of a call.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.turns: Turns | None = None
        """While a generation has several turns: the caches of those before."""
        self._trials: dict[str, str | None] = {}
        self._logged: set[tuple[str, str]] = set()

    def complete(
        self,
        model: Any,
        same: Sequence[int],
        inputs_of: Callable[[list[int]], Any],
        names: Collection[str],
        options: dict[str, Any],
        advice: str,
        group: int = 1,
        survives: Callable[[BaseException], bool] = is_out_of_memory,
        retry: Callable[[int], None] = lambda limit: None,
    ) -> list[list[int]]:
        """Return the tokens of a completion of each prompt, including the token that ends it.

        Args:
            model: the generating model.
            same: for each prompt, the index of the first equal prompt; see `first_equal`.
            inputs_of: returns the model's tensors for the prompts with these indices.
            names: names of these tensors.
            options: arguments of `generate`.
            advice: the remedy if a single completion does not fit.
            group: usual number of equal prompts, which begin together if possible.
            survives: returns whether to retry after an exception.
            retry: called after an OOM, with the new number of completions at once.

        Raises:
            DoesNotFit: a single completion does not fit.
        """
        options = settings_of(model, options)
        repeats = len(set(same)) < len(same)
        batch = twice(lambda: self._batch(model, names, options, repeats), advice, survives)
        count, begun = len(same), list[range]()
        ended: dict[int, list[int]] = {} if batch is None else batch.ended

        def parts() -> list[range]:
            start = first_missing(count, ended, begun)
            begun.clear()
            for row in range(start, count):
                ended.pop(row, None)
            if batch is not None:
                batch.restart()
            return divided(range(start, count), self.limit or count, group, joins=batch is not None)

        def work(rows: range) -> None:
            begun.append(rows)
            if batch is not None:
                places = sorted({max(same[row], rows.start) for row in rows})
                numbers = [range(*of) for of in pairwise([*places, rows.stop])]
                last = rows.stop == count or in_step(model)
                most, inputs = 0 if last else (self.limit or count) - group, inputs_of(places)
                batch.begin(model, inputs, numbers, max(0, most), **options)
            else:
                ended.update(zip(rows, each_alone(model, inputs_of(list(rows)), options), strict=True))

        def shrink(failed: range | None) -> None:
            at_once = sum(row not in ended for rows in begun for row in rows)
            self.limit = max(1, at_once - half(at_once, group))
            if self.turns:
                self.turns.drop()
            retry(self.limit)

        def hopeless(failed: bool, alone: bool) -> tuple[bool, bool]:
            return failed, alone and self.limit == 1  # else there were others beside it

        with (
            only(model, options["generation_config"]),
            patched("transformers.integrations.sdpa_attention:use_gqa_in_sdpa", takes_grouped_keys),
        ):
            smaller_until_it_fits(parts, work, shrink, lambda failed: advice, survives, hopeless)
        if isinstance(batch, StaticBatch):
            self._trials[UNRECORDED] = batch.why_not_recorded
        return [ended[row] for row in range(count)]

    @contextmanager
    def several_turns(self) -> Iterator[None]:
        """Context in which a prompt that begins with an earlier turn continues from the turn's cache."""
        self.turns = Turns(self.limit)
        try:
            yield
        finally:
            self.turns = None

    def _batch(
        self, model: Any, names: Collection[str], options: dict[str, Any], repeats: bool
    ) -> ContinuousBatch | StaticBatch | None:
        """Return the batch in which completions begin, join and end, or None if each reads its prompt anew.

        The other arguments are those of `complete`; `repeats` is whether a prompt has several completions.
        """
        config, together = options["generation_config"], "all processes compute together" if in_step(model) else None
        reason = why_not_shared(model, [*names, *options.keys() - {"generation_config"}], config)
        if not self._can(ANEW, reason, lambda: why_not_joined(model, ContinuousBatch())):
            return None
        if model.device.type in RECORDING and self._can(
            UNRECORDED, why_not_static(model, config), lambda: why_not_joined(model, StaticBatch(records=False))
        ):
            reason = None if keeps_all_keys(model) else "the steps of generation are recorded"
            continues = bool(self.turns) and self._can(READ_ANEW, reason, lambda: why_not_continued(model))
            return StaticBatch(self.turns if continues else None)
        shares = repeats and self._can(
            COPIED, together or why_repeated(model), lambda: why_not_joined(model, ContinuousBatch(shares_from=0))
        )
        in_groups = bool(self.turns) and self._can(READ_ANEW, together, lambda: why_not_continued(model))
        return ContinuousBatch(self.turns, in_groups, LONG if shares else None)

    def _can(self, otherwise: str, reason: str | None, trial: Callable[[], str | None]) -> bool:
        """Return whether there is no reason against something and its trial, made once, finds none; else log it once.

        Args:
            otherwise: the consequence, to log.
            reason: why not, if it is known without a trial.
            trial: returns why not, or None.
        """
        if reason is None:
            if otherwise not in self._trials:
                self._trials[otherwise] = trial()
            reason = self._trials[otherwise]
        if reason and (otherwise, reason) not in self._logged:
            self._logged.add((otherwise, reason))
            log.info("%s: %s", otherwise, reason)
        return reason is None


def first_missing(count: int, ended: Container[int], begun: Sequence[range]) -> int:
    """Return the first of so many completions that has not ended, or the first of those that began with it."""
    missing = next((row for row in range(count) if row not in ended), count)
    return next((rows.start for rows in begun if missing in rows), missing)


def divided(rows: range, limit: int, group: int, joins: bool) -> list[range]:
    """Return completions in parts: as many as fit, and then a group at a time, if that joins, or again as many."""
    limit = min(limit, rows.stop)
    first = limit // group * group or limit
    further = min(group, limit) if joins else first
    stops = [*range(rows.start + first, rows.stop, further), rows.stop] if rows else []
    return [range(*part) for part in pairwise([rows.start, *stops])]


def takes_grouped_keys(mask: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether PyTorch's attention takes keys of fewer heads than the queries'; on a CPU beside a mask, too."""
    return use_gqa_in_sdpa(None if key.device.type == "cpu" else mask, key, value)


@torch.no_grad()
def each_alone(model: Any, inputs: Any, options: dict[str, Any]) -> list[list[int]]:
    """Return the tokens that `generate` adds to each prompt, up to the first that ends it; `options` of `complete`."""
    options = settings_of(model, options)
    with only(model, options["generation_config"]):
        tokens = model.generate(**inputs, **options)[:, inputs["input_ids"].size(1) :]
    eos = options["generation_config"].eos_token_id
    ends = torch.isin(tokens, torch.tensor([] if eos is None else eos, device=tokens.device))
    mask = ends.cumsum(1) - ends.long() == 0
    return [row[keep].tolist() for row, keep in zip(tokens, mask, strict=True)]


def first_equal(prompts: Sequence[Any]) -> list[int]:
    """Return for each prompt the place of the first of its neighbours that are equal to it."""
    places: list[int] = []
    for place, prompt in enumerate(prompts):
        places.append(places[-1] if place and prompt == prompts[place - 1] else place)
    return places
