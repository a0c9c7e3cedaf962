"""Completions by transformers' `generate`: each prompt is read once, and a completion that has ended leaves the batch.

`generate` prepares inputs, cache, logits processors and stopping criteria, and calls `ContinuousBatch.decode` instead
of its own loop. `decode` reads the distinct prompts, repeats the cache for the completions of each, and then computes
only completions that have not ended. Prompts can join a batch that is under way.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL as READ_WITH_PROMPTS
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from grpo.generation.transformers.growing_cache import CACHE, GrowingCache, widened
from grpo.generation.transformers.prompt_cache import PromptCache, shared_keys
from grpo.generation.transformers.sampling import drawn
from grpo.generation.transformers.settings import why_asked, why_not_by_row
from grpo.generation.transformers.turns import Turns
from grpo.utils.adapters import why_not_by_token
from grpo.utils.distributed import world_size

BY_TOKEN = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
"""Inputs of a model whose last two dimensions are sequences and their tokens."""
LAYERS = {
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
}
"""Layers of a cache whose rows can be copied, dropped and joined."""
DROPPED = 8
"""Rows are dropped once one in so many has ended, as the cache of the others is copied each time."""
OF_IMAGES = {*READ_WITH_PROMPTS, "image_grid_thw", "spatial_shapes", "image_position_ids"}
"""Inputs that a model needs with the prompts, and not after them."""


def why_not_shared(model: Any, inputs: Iterable[str], config: GenerationConfig | None = None) -> str | None:
    """Return why a model cannot read each prompt once for all its completions; None if it can.

    It inspects the cache that `generate` would make: each of its layers has to keep the keys and values of all tokens,
    or of a window of tokens, or a state, as gated DeltaNet and Mamba do.

    Args:
        inputs: names of the model's inputs.
        config: generation config; None for greedy completions.
    """
    if unknown := set(inputs) - {"input_ids", *BY_TOKEN, *OF_IMAGES}:
        return f"its input {min(unknown)} may be of prompts or of completions"
    if reason := why_not_by_token(model) or why_asked(model) or why_not_by_row(config or GenerationConfig()):
        return reason
    if model.config.is_encoder_decoder or not model._supports_default_dynamic_cache():
        return "its cache is of its own kind"
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    if unknown := {type(layer).__name__ for layer in layers if type(layer) not in LAYERS}:
        return f"its cache has a {min(unknown)}"
    return None if any(isinstance(layer, DynamicLayer) for layer in layers) else "none of its layers has keys"


def in_step(model: Any) -> bool:
    """Return whether all processes have to compute each token together, as the weights are sharded."""
    return world_size() > 1 and gathers_weights(model)


def gathers_weights(model: Any) -> bool:
    """Return whether a forward pass gathers sharded weights."""
    return is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)


@dataclass
class Cohort:
    """Completions that began together, by their numbers, with the inputs that `generate` has prepared."""

    numbers: list[int | None]
    """None of a completion that has ended and is computed on: its row is not dropped yet, or other processes wait."""
    ids: torch.Tensor
    """Prompts, padded on the left, and what has been generated so far, (completions, tokens)."""
    begins: list[int]
    """Where the prompt of each begins after its padding."""
    prompt: int
    """Tokens of the padded prompts."""
    processors: Any
    criteria: Any
    sample: bool

    def append(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose the next token of each completion from logits, (completions, vocabulary); return which have ended.

        Completions that had ended before take no random numbers.
        """
        scores = self.processors(self.ids, logits.to(copy=True, dtype=torch.float32))
        going, choose = self.going(), drawn if self.sample else partial(torch.argmax, dim=-1, keepdim=True)
        if len(going) == len(scores):
            chosen = choose(scores)
        else:
            chosen = self.ids[:, -1:].clone()
            if going:
                chosen[going] = choose(scores[going])
        self.ids = torch.cat((self.ids, chosen), 1)
        return self.criteria(self.ids, None)

    def going(self) -> list[int]:
        """Return the rows of completions that have not ended."""
        return [row for row, number in enumerate(self.numbers) if number is not None]

    def keep(self, rows: list[int]) -> None:
        """Drop the other completions."""
        self.numbers = [self.numbers[row] for row in rows]
        self.begins = [self.begins[row] for row in rows]
        self.ids = self.ids[rows]
        select_in(self.processors, torch.tensor(rows, dtype=torch.long))


def select_in(processors: Any, rows: torch.Tensor) -> None:
    """Keep the state of these rows: since transformers 5.24 a repetition penalty has the padding of each."""
    for processor in processors:
        padding = getattr(processor, "prompt_ignore_length", None)
        if isinstance(padding, torch.Tensor):
            processor.prompt_ignore_length = padding[rows.to(padding.device)]


class ContinuousBatch:
    """Unfinished and ended completions.

    Args:
        turns: keeps the caches of ended completions, and returns the caches of the beginnings of prompts.
        in_groups: see `Turns.keep`.
        shares_from: tokens of prompts from which their completions share keys and values; None if they never do.
    """

    def __init__(self, turns: Turns | None = None, in_groups: bool = False, shares_from: int | None = None) -> None:
        self.turns, self.in_groups, self.shares_from = turns, in_groups, shares_from
        self.ended: dict[int, list[int]] = {}
        """Tokens of completions that have ended, by their numbers."""
        self.cohorts: list[Cohort] = []
        self.inputs: dict[str, Any] = {}
        """Inputs of the model: the cache, and the mask and positions with a column for the token that comes next."""

    def __len__(self) -> int:
        """Return how many completions have not ended."""
        return sum(number is not None for cohort in self.cohorts for number in cohort.numbers)

    def restart(self) -> None:
        """Drop the completions that have not ended."""
        self.cohorts, self.inputs = [], {}

    @torch.no_grad()
    def begin(self, model: Any, inputs: Any, numbers: Sequence[Sequence[int]], most: int, **options: Any) -> None:
        """Read prompts and generate until at most `most` completions are unfinished.

        Args:
            model: in evaluation mode, or without dropout.
            inputs: tensors of distinct prompts, padded on the left, with their images.
            numbers: for each prompt, the numbers of its completions.
            most: unfinished completions to leave for a later call; 0 with sharded weights.
            options: arguments of `generate`.
        """
        arguments = continued(self.turns, model, inputs, options)
        model.generate(**arguments, custom_generate=partial(self.decode, numbers, most))

    def decode(
        self,
        numbers: Sequence[Sequence[int]],
        most: int,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **inputs: Any,
    ) -> torch.Tensor:
        """Replace the loop of `generate`, with its arguments; see `begin`."""
        mask = inputs.get("attention_mask")
        begins = [0] * len(input_ids) if mask is None else mask.argmax(1).tolist()
        outputs = model._prefill(input_ids, generation_config, inputs)
        inputs = model._update_model_kwargs_for_generation(outputs, inputs)
        long = self.shares_from is not None and input_ids.size(1) >= self.shares_from
        if isinstance(self.inputs[CACHE], PromptCache) if self.cohorts else long:  # those that join do as the others
            inputs[CACHE] = PromptCache(inputs[CACHE])
        of_prompt = [prompt for prompt, of in enumerate(numbers) for _ in of]
        rows = torch.tensor(of_prompt, device=input_ids.device)
        select_in(logits_processor, rows)
        cohort = Cohort(
            [number for of in numbers for number in of],
            input_ids[rows],
            [begins[prompt] for prompt in of_prompt],
            input_ids.size(1),
            logits_processor,
            stopping_criteria,
            generation_config.do_sample,
        )
        logits = outputs.logits[:, -1][rows]
        del outputs
        synced = in_step(model)
        self._note_ended(cohort, cohort.append(logits), inputs[CACHE], of_prompt)
        left = cohort.going() or [0] * synced
        if left:
            cohort.keep(left)
            inputs = selected(inputs, rows[left])
            self.inputs = joined(self.inputs, inputs, len(self), len(left)) if self.cohorts else inputs
            self.cohorts.append(cohort)
        # saves a tenth of the time; reading prompts stays outside, as an update may use the features of their images
        quickly = torch.no_grad() if gathers_weights(model) else torch.inference_mode()
        with quickly, model._optimize_model_for_decode(), shared_keys(model, self.inputs.get(CACHE)):
            while model._has_unfinished_sequences(len(self) <= most, synced, input_ids.device):
                self._step(model, synced)
            self._drop_ended(synced)
        if not len(self):
            self.restart()  # drops what was computed for other processes, too
        return input_ids

    def _step(self, model: Any, synced: bool) -> None:
        """Generate a token of each completion."""
        last = torch.cat([cohort.ids[:, -1:] for cohort in self.cohorts])
        outputs = model(
            **model.prepare_inputs_for_generation(last, next_sequence_length=1, **self.inputs), return_dict=True
        )
        self.inputs = model._update_model_kwargs_for_generation(outputs, self.inputs)
        logits = outputs.logits[:, -1]
        del outputs
        start = 0
        for cohort in self.cohorts:
            size = len(cohort.numbers)
            ended = cohort.append(logits[start : start + size])
            self._note_ended(cohort, ended, self.inputs[CACHE], range(start, start + size))
            start += size
        if (start - len(self)) * DROPPED >= start:
            self._drop_ended(synced)

    def _drop_ended(self, synced: bool) -> None:
        """Drop the rows of completions that have ended, all but one if other processes wait, and copy the others'."""
        places, start = [], 0
        for cohort in self.cohorts:
            rows = cohort.going() or [0] * synced
            places += [start + row for row in rows]
            start += len(cohort.numbers)
            if len(rows) < len(cohort.numbers):
                cohort.keep(rows)
        if len(places) < start:
            self.cohorts = [cohort for cohort in self.cohorts if cohort.numbers]
            of_rows = torch.tensor(places, dtype=torch.long, device=cohort.ids.device)
            self.inputs = selected(self.inputs, of_rows) if self.cohorts else {}

    def _note_ended(self, cohort: Cohort, ended: torch.Tensor, cache: Any, rows: Sequence[int]) -> None:
        """Keep the tokens of completions that have ended.

        Args:
            ended: whether each completion has ended, (completions).
            cache: cache of all tokens but the last.
            rows: rows of the completions in the cache.
        """
        for row in ended.nonzero()[:, 0].tolist():
            if (number := cohort.numbers[row]) is not None:
                self.ended[number] = cohort.ids[row, cohort.prompt :].tolist()
                cohort.numbers[row] = None
                if self.turns:
                    tokens = cohort.ids[row, cohort.begins[row] : -1].tolist()
                    self.turns.keep(tokens, cache, rows[row], self.in_groups)


def continued(turns: Turns | None, model: Any, inputs: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `generate`: a model's inputs and a cache, of an earlier turn if there is one, or empty."""
    begun = turns and turns.take(inputs["input_ids"], inputs["attention_mask"], partial(read, model, **options))
    return {**inputs, **options, CACHE: begun or GrowingCache(model.config)}


def read(model: Any, cache: GrowingCache, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    """Read the tokens that come after those in a cache; return the logits of the next one, (rows, vocabulary).

    Args:
        model: in evaluation mode, or without dropout.
        cache: of the first tokens of each row.
        ids: all tokens, padded on the left, (rows, tokens).
        mask: mask of the tokens.
        options: arguments of `generate`.
    """

    def prefill(model: Any, ids: torch.Tensor, generation_config: Any, **inputs: Any) -> torch.Tensor:
        given = {name: value for name, value in inputs.items() if name not in ("logits_processor", "stopping_criteria")}
        return model._prefill(ids, generation_config, given).logits[:, -1]

    options[CACHE] = cache
    return model.generate(input_ids=ids, attention_mask=mask, **options, custom_generate=prefill)


def selected(inputs: dict[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """Return a model's inputs for these rows, which may repeat; changes the cache in place.

    Inputs of images are dropped.
    """
    inputs[CACHE].batch_select_indices(rows)
    by_token = {name: inputs[name].index_select(-2, rows) for name in BY_TOKEN if inputs.get(name) is not None}
    return {name: value for name, value in inputs.items() if name not in {*BY_TOKEN, *OF_IMAGES}} | by_token


def joined(under_way: dict[str, Any], new: dict[str, Any], rows: int, new_rows: int) -> dict[str, Any]:
    """Return a model's inputs for unfinished and new completions; the shorter sequences are padded on the left."""
    for inputs, count in ((under_way, rows), (new, new_rows)):
        if inputs.get("attention_mask") is None:  # which `generate` drops where nothing is padded
            length = inputs[CACHE].get_seq_length() + 1
            layers = (layer for layer in inputs[CACHE].layers if getattr(layer, "is_initialized", False))
            device = next((layer.keys.device for layer in layers), None)
            inputs["attention_mask"] = torch.ones(count, length, dtype=torch.long, device=device)
    before, cache = under_way[CACHE], new[CACHE]
    apart = [(of.prompt_tokens if isinstance(of, PromptCache) else 0,) for of in (before, cache)]
    result = dict(new)
    for name in BY_TOKEN:
        if new.get(name) is not None:  # tokens of prompts and of completions, if the cache has them apart
            tensors = zip((under_way[name], new[name]), apart, strict=True)
            parts = zip(*(tensor.tensor_split(begin, -1) for tensor, begin in tensors), strict=True)
            result[name] = torch.cat([widened(both, -1) for both in parts], -1)
    cache.join(before)
    return result
