"""Completions by transformers' generate, for as many prompts at once as fit into memory."""

from collections.abc import Callable
from typing import Any

from grpo.trainer.batch import FIELDS, Batch, pick
from grpo.trainer.rollout.image_tokens import by_prompt, can_split
from grpo.utils.errors import DoesNotFit
from grpo.utils.oom import half, halves, smaller_until_it_fits

Generate = Callable[[list, list | None, Batch], tuple[list, list | None]]
"""From the tokens of prompts, their images and the tensors of these to completions and their log-probabilities."""


class PromptsAtOnce:
    """Generates for all prompts at once, and after an OOM for half of them, and from then on never for more."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.limit: int | None = None
        """Prompts that fit, once it is known that not all do."""

    def generate(
        self,
        generate: Generate,
        prompts: list[list[int]],
        images: list | None,
        fields: Batch,
        group: int,
        retry: Callable[[int], None],
        survives: Callable[[BaseException], bool],
    ) -> list[list[int]]:
        """Return the completion of each prompt.

        Args:
            generate: does it for some prompts.
            prompts: tokens.
            images: of each prompt; None without any.
            fields: tensors of the images.
            group: prompts of a group, which stay together if they can.
            retry: is called after an OOM, with the number of prompts that are tried at once from then on.
            survives: whether to try again after an exception.

        Raises:
            DoesNotFit: a prompt alone does not fit, or it is not known which tensors of images belong to which prompt.
        """
        completions: list[list[int]] = []
        divided = by_prompt(fields, images, prompts, self.processor)

        def parts() -> list[range]:
            return halves(range(len(completions), len(prompts)), self.limit, group)

        def complete(rows: range) -> None:
            if len(rows) == len(prompts):
                completions.extend(generate(prompts, images, fields)[0])
                return
            part = {key: value for key, value in pick(divided, rows).items() if FIELDS[key].of != "row"}
            shown = [images[row] for row in rows] if images else None
            completions.extend(generate([prompts[row] for row in rows], shown, part)[0])

        def shrink(failed: range | None) -> None:
            count = len(failed or prompts)
            if not can_split(fields, images, prompts, self.processor):
                raise DoesNotFit(advice(failed))
            self.limit = count - half(count, group)
            retry(self.limit)

        def advice(failed: range | None) -> str:
            return (
                f"{len(failed or prompts)} completions do not fit into memory while they are generated: lower "
                "max_completion_length or per_device_train_batch_size, or use a smaller or quantized model"
            )

        smaller_until_it_fits(parts, complete, shrink, advice, survives)
        return completions
