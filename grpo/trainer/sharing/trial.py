"""Whether a policy can share prompts is found by trying: one prompt and two completions, shared and on their own.

Layers that carry a state from token to token, or read other rows, show at once; so do positions that depend on padding.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from grpo.trainer.batch import FIELDS, Batch, as_sequences, images_of, on_device, pick, take, with_images
from grpo.trainer.microbatch import Microbatch
from grpo.trainer.processes import any_of
from grpo.trainer.sharing.scoring import score
from grpo.utils.attention import policy_of

log = logging.getLogger(__name__)
LENGTHS = (13, 9)
"""Tokens of the two completions. The prompt has as many as the first, or is one of the data with images."""
BY_LENGTH = ("dynamic", "longrope")
"""Rotations that depend on the length of the whole sequence, beyond that of any trial."""


class Sharing:
    """Whether a policy shares prompts; the first batch of text, and the first with images, finds it out.

    Args:
        model: returns the policy.
        plain: `_get_per_token_logps_and_entropies` of TRL's trainer.
        accelerator: of accelerate.
        wanted: `update.share_prompts`.
        sharded: whether each process has a part of the weights. All of them then compute together, and as not all have
            images at the same time, prompts with images are not shared.
    """

    def __init__(
        self, model: Callable[[], Any], plain: Callable[..., Any], accelerator: Any, wanted: bool, sharded: bool = False
    ) -> None:
        self.model, self.plain, self.accelerator = model, plain, accelerator
        self.wanted, self.sharded = wanted, sharded
        self.found: dict[str, bool] = {}
        """Whether it applies to prompts of `text`, and with `images`, once a trial has shown it."""

    def applies(self, batch: Batch) -> bool:
        """Return whether completions of a batch can share their prompts."""
        if not self.wanted:
            return False
        if "text" not in self.found:  # on all processes at once, which then divide completions alike
            reason = self._try(text_rows(self.model(), self.accelerator.device))
            (elsewhere,) = any_of(self.accelerator, reason is not None)
            self._note("text", reason or ("not on another process" if elsewhere else None))
        images = with_images(batch)
        if images and self.sharded:
            return False
        if images and "images" not in self.found and bool(batch["completion_mask"].any()):
            self._note("images", self._try(image_rows(batch)))
        return self.found.get("images" if images else "text", False)

    def agree(self, batch: Batch) -> None:
        """Let no process share the prompts of a batch where another cannot; all call it, with equal batches."""
        (elsewhere,) = any_of(self.accelerator, not self.applies(batch))
        if elsewhere and self.applies(batch):
            self._note("images" if with_images(batch) else "text", "not on another process")

    def _try(self, rows: Batch) -> str | None:
        with self.accelerator.autocast():
            return why_not(self.model(), rows, self.plain)

    def _note(self, kind: str, reason: str | None) -> None:
        self.found[kind] = reason is None
        if reason:
            log.warning("completions do not share their prompts (%s): %s", kind, reason)


def why_not(model: Any, rows: Batch, plain: Callable[..., Any]) -> str | None:
    """Return why a policy cannot share the prompt of two rows, or None.

    The policy stays as it was, and the random numbers, too.
    """
    config = policy_of(model).config.get_text_config()
    if kinds := rotations(getattr(config, "rope_parameters", None) or {}) & set(BY_LENGTH):
        return f"its positions depend on the length of the sequence ({', '.join(kinds)})"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "its attention is in chunks"
    ids, mask, length = as_sequences(rows)
    together = Microbatch((0, 1), ids.size(1) - length, length, shared=ids.size(1), groups=(2,))
    one_by_one = 1 if "num_images" in rows else None
    try:
        with undisturbed(model):
            alone = plain(model, ids, mask, length, batch_size=one_by_one, **images_of(rows))[0]
            shared = score(model, ids, mask, length, together.groups, **images_of(take(rows, together)))[0]
    except Exception as error:  # whatever a model makes of a layout that it does not know
        return f"{type(error).__name__}: {(str(error).strip() or 'without a message').splitlines()[0][:200]}"
    real = rows["completion_mask"] != 0
    difference = (alone - shared)[real].float().abs().mean().item()
    if difference <= torch.finfo(computed(model, ids.device.type)).eps ** 0.5:  # never of nan
        return None
    return f"log-probabilities differ by {difference:.1e} on average"


def computed(model: Any, device: str) -> torch.dtype:
    """Return the type of the numbers that a policy computes with."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else policy_of(model).dtype


def rotations(parameters: dict[str, Any]) -> set[str]:
    """Return the types of rotation among parameters, which some models have for each kind of layer."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(parameters.get("rope_type"))}.union(*(rotations(value) for value in nested))


def text_rows(model: Any, device: torch.device) -> Batch:
    """Return two rows of text with one prompt, padded on the left: tokens from all over the vocabulary."""
    longest, size = LENGTHS[0], policy_of(model).config.get_text_config().vocab_size
    tokens = (torch.arange(3 * longest, device=device) * 7919 + 5) % size
    prompt = torch.nn.functional.pad(tokens[None, :longest], (3, 0))
    return with_completions(
        {"prompt_ids": prompt, "prompt_mask": (torch.arange(longest + 3, device=device) >= 3).long()[None]},
        tokens[longest:],
    )


def image_rows(batch: Batch) -> Batch:
    """Return two rows with the first prompt of a batch that has images; tokens that a policy has written follow it."""
    written = batch["completion_ids"][batch["completion_mask"] != 0].flip(0)
    row = next(row for row, number in enumerate(batch.get("num_images") or [1]) if number)
    chosen = on_device(pick(batch, [row, row]), batch["prompt_ids"].device)
    width = chosen["prompt_ids"].size(1)
    for name, value in chosen.items():
        if FIELDS[name].of == "sequence":
            chosen[name] = torch.nn.functional.pad(value[:, :width], (0, LENGTHS[0]))
    return with_completions(chosen, written.repeat(-(-2 * LENGTHS[0] // len(written))))


def with_completions(prompts: Batch, tokens: torch.Tensor) -> Batch:
    """Return two rows with these prompts, and completions of these tokens."""
    longest = LENGTHS[0]
    ids = tokens[: 2 * longest].view(2, longest)
    mask = (torch.arange(longest, device=ids.device) < torch.tensor(LENGTHS, device=ids.device)[:, None]).long()
    rows = {name: value for name, value in prompts.items() if FIELDS[name].of not in ("completion", "generation")}
    rows |= {name: rows[name].expand(2, -1) for name in ("prompt_ids", "prompt_mask")}
    return rows | {"completion_ids": ids, "completion_mask": mask}


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """While inside, the policy computes without gradients and dropout; after it all is as before."""
    modes = [(module, module.training) for module in model.modules()]
    with torch.no_grad(), torch.random.fork_rng():
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode
