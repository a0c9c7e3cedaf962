"""Whether a policy can share prompts, and whether padding changes its log-probabilities, are found by trying.

A policy shares prompts if its layers attend to all tokens or to a window of them, or keep a state, if its adapter acts
on each token alone, and if completions of a prompt score alike shared and alone, within the rounding of the plain way.
Log-probabilities that depend on padding (absolute positions, norms behind a rotation, adapters with tokens of their
own) have to be computed with TRL's padding, by policy and reference alike: at equal weights the importance ratio is
then 1, as in TRL.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers.integrations import is_deepspeed_zero3_enabled

from grpo.trainer.batch import (
    FIELDS,
    Batch,
    as_sequences,
    completion_tokens_of_images,
    images_of,
    on_device,
    pick,
    take,
    trim,
    with_images,
)
from grpo.trainer.microbatch import Microbatch
from grpo.trainer.processes import any_of
from grpo.trainer.shared_prompts.layout import groups_of
from grpo.trainer.shared_prompts.scoring import score
from grpo.trainer.shared_prompts.states import state_layers
from grpo.utils.adapters import why_not_by_token
from grpo.utils.attention import policy_of, relative_rounding
from grpo.utils.errors import described
from grpo.utils.modes import without_dropout
from grpo.utils.oom import is_out_of_memory, tried, twice

log = logging.getLogger(__name__)
LENGTHS = (13, 9, 1, 2, 1, 5)
"""Tokens of the completions; the longest comes first. The prompt has as many, or is one of the data with images."""
PADDING = 32
"""Tokens of padding on the left of the prompt."""
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of attention that can share prompts."""
BY_TOKEN = {"mlp", "moe"}
"""Kinds of layers in which tokens do not see each other."""
NOISE = 4
"""Times the rounding of the plain way by which another way may differ from it."""
BY_LENGTH = ("dynamic", "longrope")
"""Rotations that depend on the length of the whole sequence, beyond that of any trial."""


ZERO3 = "under ZeRO-3 all processes gather a weight at each use, and layers with a state use theirs several times"
TOO_LARGE = f"{len(LENGTHS)} completions of {LENGTHS[0]} tokens do not fit: use a smaller model, or a larger GPU"


class Reasons(NamedTuple):
    """Why a policy is not computed with fewer tokens than TRL's; None where it can be."""

    padding: str | None
    """Why micro-batches have TRL's padding."""
    shared_prompts: str | None
    """Why completions do not share their prompts."""


class SharedPrompts:
    """Whether a policy shares prompts, and depends on padding; tried before its first rollout, with its adapters on.

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
        self.results: dict[str, bool] = {}
        """Results: whether prompts of `text` are shared, and those with `images`; whether `padding` matters."""

    def decide(self) -> None:
        """Try the policy on text, on all processes at once, which then divide completions alike."""
        if "text" in self.results:
            return
        model = self.model()
        reasons = self._try(text_rows(model, self.accelerator.device))
        padded, elsewhere = any_of(self.accelerator, reasons.padding is not None, reasons.shared_prompts is not None)
        self.results["padding"] = padded
        if padded:
            log.warning("completions are padded as in TRL, as %s", reasons.padding or "on another process")
        self._note("text", reasons.shared_prompts or ("not on another process" if elsewhere else None))

    def applies(self, batch: Batch) -> bool:
        """Return whether completions of a batch can share their prompts.

        The first update with images tries these. What is scored before it may be scored by the reference, that is with
        adapters off, and does not share them.
        """
        self.decide()
        images = with_images(batch)
        if not self.wanted or (images and (self.sharded or not self.results["text"])):
            return False
        if images and any(completion_tokens_of_images(batch)):  # of tools: those of a group differ
            return False
        if images and "images" not in self.results and torch.is_grad_enabled() and bool(batch["completion_mask"].any()):
            self._note("images", self._try(image_rows(batch)).shared_prompts)
        return self.results.get("images" if images else "text", False)

    def agree(self, batch: Batch) -> None:
        """Let no process share the prompts of a batch where another cannot; all call it, with equal batches."""
        (elsewhere,) = any_of(self.accelerator, not self.applies(batch))
        if elsewhere and self.applies(batch):
            self._note("images" if with_images(batch) else "text", "not on another process")

    def depends_on_padding(self) -> bool:
        """Return whether padding changes the policy's log-probabilities by more than rounding."""
        self.decide()
        return self.results["padding"]

    def _try(self, rows: Batch) -> Reasons:
        with self.accelerator.autocast():
            return twice(lambda: why_not(self.model(), rows, self.plain), TOO_LARGE, is_out_of_memory)

    def _note(self, kind: str, reason: str | None) -> None:
        self.results[kind] = reason is None
        if reason and self.wanted:
            log.warning("completions do not share their prompts (%s): %s", kind, reason)


def why_not(model: Any, rows: Batch, plain: Callable[..., Any]) -> Reasons:
    """Return why a policy cannot do without TRL's padding, or share the prompt of some rows.

    The policy stays as it was, and the random numbers, too.

    Args:
        model: the policy.
        rows: of one prompt, padded on the left, as of `with_completions`.
        plain: computes log-probabilities, (rows, length), as TRL does.

    Raises:
        ValueError: the policy has no log-probabilities in TRL's way, such as an encoder with a decoder.
    """
    config = policy_of(model).config.get_text_config()
    reason = why_not_by_token(model)
    if kinds := rotations(getattr(config, "rope_parameters", None) or {}) & set(BY_LENGTH):
        reason = reason or f"its positions depend on the length of the sequence ({', '.join(kinds)})"
    if reason:
        return Reasons(reason, reason)
    trimmed = trim(rows, int(rows["prompt_mask"][0].sum()), LENGTHS[0])
    ways = ((trimmed, 1), (trimmed, len(LENGTHS)), (rows, len(LENGTHS)))
    try:
        with undisturbed(model):
            alone, together, padded = (
                plain(model, *as_sequences(of), batch_size=size, **images_of(of))[0] for of, size in ways
            )
    except Exception as error:
        if is_out_of_memory(error):
            raise
        policy = type(policy_of(model)).__name__
        raise ValueError(f"TRL cannot compute log-probabilities of {policy}: {described(error)}") from error
    noise, unit = distance(alone, padded, rows), relative_rounding(model)
    size = float(alone.abs().mean())  # nats
    rounding = max(unit**0.5 * max(1.0, size / 4), distance(alone, together, rows))  # in bfloat16 experts change, too
    if not noise <= NOISE * rounding:  # never of nan
        reason = f"padding changes its log-probabilities by {noise:.1e} on average"
        return Reasons(reason, reason)
    return Reasons(None, why_prompts_not_shared(model, rows, alone, noise))


def why_prompts_not_shared(model: Any, rows: Batch, alone: torch.Tensor, noise: float) -> str | None:
    """Return why a policy whose scores do not depend on padding cannot share the prompt of some rows; None if it can.

    Args:
        model: the policy.
        rows: of one prompt, padded on the left.
        alone: log-probabilities of each row by itself, (rows, length).
        noise: mean difference that padding makes, nats.
    """
    config = policy_of(model).config.get_text_config()
    layers = getattr(config, "layer_types", None) or ["full_attention"] * getattr(config, "num_hidden_layers", 0)
    mixing = {layer: kind for layer, kind in enumerate(layers) if kind not in BY_TOKEN}
    with_state = {layer.layer_idx for layer in state_layers(policy_of(model).get_decoder())}
    if others := {kind for layer, kind in mixing.items() if kind not in ATTENTION and layer not in with_state}:
        return f"some of its layers are neither attention nor keep a state ({', '.join(sorted(others))})"
    if with_state and is_deepspeed_zero3_enabled():
        return ZERO3
    scores, reason = tried(lambda: shared_scores(model, rows))
    if scores is None:
        by_mask = "GroupMask" in str(reason)
        return "its layers read the attention mask themselves" if by_mask else reason
    shared, attended = scores
    if attended < len(mixing):
        missing = len(mixing) - attended
        return f"{missing} of its {len(mixing)} layers do not attend as transformers' layers do"
    of_scores = relative_rounding(model) * float(alone.abs().mean())
    rounding = noise + of_scores * (1 + len(with_state))  # a state is rounded where completions begin
    if (difference := distance(alone, shared, rows)) <= NOISE * rounding:
        return None
    cause = "its layers do not continue from a state: " if with_state else ""
    return f"{cause}log-probabilities differ by {difference:.1e} on average"


def shared_scores(model: Any, rows: Batch) -> tuple[torch.Tensor, int]:
    """Return log-probabilities of rows that share a prompt, (rows, length), and the number of layers that attend."""
    ids, mask, length = as_sequences(rows)
    groups = groups_of([len(ids)], rows["prompt_mask"], rows["completion_mask"])
    together = Microbatch(tuple(range(len(ids))), ids.size(1) - length, length, shared=ids.size(1), groups=groups)
    attended: list[Any] = []
    with undisturbed(model):
        images = images_of(take(rows, together))
        return score(model, ids, mask, length, together.groups, attended=attended, **images)[0], len(attended)


def distance(logps: torch.Tensor, others: torch.Tensor, rows: Batch) -> float:
    """Return the mean absolute difference of the log-probabilities of the tokens of completions."""
    return (logps - others)[rows["completion_mask"] != 0].float().abs().mean().item()


def rotations(parameters: dict[str, Any]) -> set[str]:
    """Return the types of rotation among parameters, which some models have for each kind of layer."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(parameters.get("rope_type"))}.union(*(rotations(value) for value in nested))


def text_rows(model: Any, device: torch.device) -> Batch:
    """Return rows of text with one prompt, padded on the left: tokens from all over the vocabulary."""
    longest, size = LENGTHS[0], policy_of(model).config.get_text_config().vocab_size
    tokens = (torch.arange((1 + len(LENGTHS)) * longest, device=device) * 7919 + 5) % size
    prompt = torch.nn.functional.pad(tokens[None, :longest], (PADDING, 0))
    return with_completions(
        {"prompt_ids": prompt, "prompt_mask": (torch.arange(longest + PADDING, device=device) >= PADDING).long()[None]},
        tokens[longest:],
    )


def image_rows(batch: Batch) -> Batch:
    """Return rows with the first prompt of a batch that has images, padded; tokens that a policy has written follow."""
    written = batch["completion_ids"][batch["completion_mask"] != 0].flip(0)
    row = next(row for row, number in enumerate(batch.get("num_images") or [1]) if number)
    chosen = on_device(pick(batch, [row] * len(LENGTHS)), batch["prompt_ids"].device)
    width = chosen["prompt_ids"].size(1)
    for name, value in chosen.items():
        if FIELDS[name].of in ("prompt", "sequence"):
            after = LENGTHS[0] if FIELDS[name].of == "sequence" else 0
            chosen[name] = torch.nn.functional.pad(value[:, :width], (PADDING, after))
    return with_completions(chosen, written.repeat(-(-len(LENGTHS) * LENGTHS[0] // len(written))))


def with_completions(prompts: Batch, tokens: torch.Tensor) -> Batch:
    """Return rows with these prompts, and completions of `LENGTHS` of these tokens."""
    number, longest = len(LENGTHS), LENGTHS[0]
    ids = tokens[: number * longest].view(number, longest)
    mask = (torch.arange(longest, device=ids.device) < torch.tensor(LENGTHS, device=ids.device)[:, None]).long()
    rows = {name: value for name, value in prompts.items() if FIELDS[name].of not in ("completion", "generation")}
    rows |= {name: rows[name][:1].expand(number, -1) for name in ("prompt_ids", "prompt_mask")}
    return rows | {"completion_ids": ids, "completion_mask": mask}


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """While inside, the policy computes without gradients and dropout; after it all is as before."""
    with torch.no_grad(), torch.random.fork_rng(), without_dropout(model):
        yield
