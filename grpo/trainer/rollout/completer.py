"""Completes prompts: by transformers' `generate`, which reads each prompt once, or by an engine.

With the inputs and the weights that TRL gives them, and no more tokens than each completion may have.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from grpo.generation.transformers.continuous_batching import ContinuousBatching, first_equal
from grpo.trainer import trl
from grpo.trainer.batch import Batch
from grpo.trainer.processes import of_all
from grpo.trainer.rollout.completion import Row
from grpo.trainer.rollout.image_tokens import as_tensors, by_prompt, can_split, comparable, end_before, of_prompts
from grpo.trainer.rollout.tool_calls import parsed
from grpo.utils.modes import without_dropout
from grpo.utils.patching import replaced
from grpo.view.images import View, unexpanded

log = logging.getLogger(__name__)
DOES_NOT_FIT = (
    "a completion does not fit into memory while it is generated: lower max_completion_length, or use a smaller or "
    "quantized model"
)


class Completer:
    """Completes the prompts of a trainer. Those of one call of `generate` may have several turns, with tools.

    Args:
        at_once: completes as many as fit, where transformers generates.
        view: opens the images of each generation; None where the data has them open.
        limits: tokens of the longest completion by task of a mixture.
    """

    def __init__(
        self, at_once: ContinuousBatching, view: View | None = None, limits: dict[str, int] | None = None
    ) -> None:
        self.batching, self.view, self.limits = at_once, view, limits or {}
        self._opened: dict[str, Any] = {}
        """The images of the rollouts at hand."""
        self._limits: list[int] = []
        """Limit on each completion of the rollouts at hand, tokens; none where all have TRL's."""
        self._begun: dict[tuple[int, ...], int] = {}
        """The same by the tokens of the prompt."""

    def in_thread(self) -> "Completer":
        """Return one for the rollouts of another thread, by an engine."""
        return Completer(ContinuousBatching(None), limits=self.limits)

    def close(self) -> None:
        """Forget the images of the rollouts at hand."""
        self._opened.clear()

    def shown(self, trainer: Any, rows: list[Row]) -> list[Row]:
        """Return rows with their images as the policy sees them."""
        self._limits = [self.limits[row["task"]] for row in rows] if self.limits else []
        if not self.view:
            return rows
        with trainer.clock.of("data", trainer.model.training):
            return self.view.shown(rows, self._opened)

    def tokenize(self, trainer: Any, prompts: list, stock: Callable[[list], Any]) -> tuple[list, list | None, Batch]:
        """Tokenize prompts; a backend that expands images itself gets those with images as text."""
        prompt_ids, images, fields = stock(prompts)
        limits = self._limits or [trainer.max_completion_length] * len(prompts)
        self._begun = dict(zip(map(tuple, prompt_ids), limits, strict=True))
        images = images and [row or [] for row in images]  # processors refuse None, which TRL has for no image
        if images and trainer.use_vllm and trainer.vllm_generation.expands_images:
            options = {"chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
            unexpanded_ids = unexpanded(trainer.processing_class, prompts, trainer.tools or (), **options)
            trainer.vllm_generation.give_images(prompt_ids, unexpanded_ids)
        return prompt_ids, images, as_tensors(fields)

    def generate(self, trainer: Any, prompts: list) -> Any:
        """Return completions as TRL's `_generate`."""
        training = trainer.model.training
        text = bool(trainer.tools) and not trl.sees_images(trainer)  # an image would be needed with its tokens
        turns = self.batching.several_turns() if text else nullcontext()
        with trainer.clock.of("generate", training), trainer.memory.of("generate"), turns:
            generated = trl.generate(trainer, prompts, parsed)
        self._limits, self._begun = [], {}  # an evaluation may tokenize other prompts next
        return generated

    def complete(
        self,
        trainer: Any,
        prompts: list,
        images: list | None,
        fields: Batch,
        group: int,
        stock: Callable[..., tuple[list, list | None]],
        has_tool_images: bool = False,
    ) -> tuple[list, list | None]:
        """Complete prompts as TRL's `_generate_single_turn`; with transformers' generate each prompt is read once."""
        arguments = (prompts, images, fields, group, has_tool_images)
        limits = self._left(prompts, trainer.max_completion_length)
        longest = max([1, *limits])
        if self.limits and generates_together(trainer):  # by the number of rank 0, or each by its own
            longest = max(of_all(trainer.accelerator, longest))
        if trainer.use_vllm:
            engine = trainer.vllm_generation
            shorter = hasattr(engine, "max_completion_length") and longest < engine.max_completion_length
            with replaced(engine, "max_completion_length", longest) if shorter else nullcontext():
                ids, logps = stock(*arguments)
        else:
            with without_dropout(trainer.model):
                if trainer.use_transformers_continuous_batching:
                    ids, logps = stock(*arguments)
                else:
                    ids, logps = self._by_transformers(trainer, *arguments, longest), None
        ids, logps = within(limits, ids, logps)
        unseen = trl.image_tokens(trainer)
        return end_before(unseen, trl.tokenizer(trainer).eos_token_id, ids, logps) if unseen else (ids, logps)

    def _by_transformers(
        self,
        trainer: Any,
        prompts: list[list[int]],
        images: list | None,
        fields: Batch,
        group: int,
        has_tool_images: bool,
        longest: int,
    ) -> list[list[int]]:
        """Return the completion of each prompt, of at most `longest` tokens.

        Raises:
            DoesNotFit: a completion alone does not fit, or it is not known which tensors of images belong to which
                prompt.
        """
        processor = trainer.processing_class
        divisible = can_split(fields, images, prompts, processor)
        divided = by_prompt(fields, images, prompts, processor)

        def inputs_of(places: list[int]) -> Batch:
            part = of_prompts(divided, places) if len(places) < len(prompts) else fields
            return trl.model_inputs(trainer, [prompts[place] for place in places], part, has_tool_images)

        def retry(limit: int) -> None:
            trainer.budget.retry()
            log.warning("out of memory in generation: %d completions at once from now on", limit)

        shown = [comparable(of or []) for of in images or [[]] * len(prompts)]
        places = list(range(len(prompts)))
        with trl.model_for_generation(trainer) as model:
            return self.batching.complete(
                model,
                first_equal(list(zip(prompts, shown, strict=True))) if divisible else places,
                inputs_of,
                names=inputs_of(places[: 1 if divisible else None]),
                options={"generation_config": trainer.generation_config, "max_new_tokens": longest},
                advice=DOES_NOT_FIT,
                group=group,
                survives=lambda error: divisible and trainer.survives(error),
                retry=retry,
            )

    def _left(self, prompts: list[list[int]], longest: int) -> list[int]:
        """Return the tokens that completions may still have: in a later turn, with tools, those of before count."""
        lengths = sorted(set(map(len, self._begun)), reverse=True)

        def left(prompt: list[int]) -> int:
            for length in lengths:
                if (begun := tuple(prompt[:length])) in self._begun and length <= len(prompt):
                    return max(0, self._begun[begun] - (len(prompt) - length))
            return longest

        return list(map(left, prompts))


def generates_together(trainer: Any) -> bool:
    """Return whether an engine completes the prompts of several processes in one call."""
    return trainer.use_vllm and (trainer.vllm_mode == "server" or trainer.args.vllm_tensor_parallel_size > 1)


def within(limits: list[int], ids: list, logps: list | None) -> tuple[list, list | None]:
    """Return completions, and the log-probabilities of their tokens, truncated to as many tokens as each may have."""
    ids = [tokens[:limit] for tokens, limit in zip(ids, limits, strict=True)]
    return ids, logps and [values[:limit] for values, limit in zip(logps, limits, strict=True)]
