"""What generates for a trainer besides transformers: a class of this kind, in a file of its own.

`engine.backend` names it by its dotted path; it generates where `train.use_vllm` is true, in the place of TRL's
connection to vLLM, so that everything that TRL and this trainer do with vLLM's log-probabilities is done with its own:
importance-sampling correction, the check that it has the policy's weights, metrics.
"""

import pkgutil
import sys
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from grpo.utils.errors import ConfigError

if TYPE_CHECKING:
    from grpo.config.resolve import Resolved

Logprobs = list[list[list[float | None]]]
"""Of each token of each completion the log-probability as a list of one; None where it is not known.

Under a sampling filter it is a `grpo.generation.kept_tokens.KeptLogprob`, which has the tokens that were kept.
"""


class Backend:
    """Generates completions with the policy's weights.

    Args:
        model: the policy, with its adapter if it has one.
        accelerator: of accelerate.
        processing_class: tokenizer or processor.
        options: all else that TRL gives to `VLLMGeneration`, `temperature` and `max_completion_length` among them, and
            `lora`, `shares`, `most_images` and `corrected` as of `PolicyEngine`.
    """

    expands_images = False
    """Whether it gets one token per image in a prompt, by `give_images`, and makes the others itself."""

    checked = True
    """Whether its weights have been compared with the policy's; the trainer sets it to False after each rollout."""

    def __init__(self, model: Any, accelerator: Any, processing_class: Any, **options: Any) -> None:
        self.model, self.accelerator, self.processing_class = model, accelerator, processing_class
        self.options = options
        # TRL reads here, between the turns of a conversation with tools, how many tokens fit
        longest = SimpleNamespace(max_model_len=options.get("max_model_length") or sys.maxsize)
        self.llm: Any = SimpleNamespace(llm_engine=SimpleNamespace(model_config=longest))

    @classmethod
    def check(cls, settings: "Resolved") -> None:
        """Check, before anything is loaded, that it can generate for a run.

        Raises:
            ConfigError: it cannot.
        """

    @classmethod
    def described(cls, settings: "Resolved") -> str:
        """Return in a line who generates."""
        return f"{cls.__name__} generates"

    def sync_weights(self) -> None:
        """Take the policy's weights; called before the first generation of each step.

        Raises:
            GenerationError: they cannot be taken.
        """
        raise NotImplementedError

    def generate(
        self, prompts: list[list[int]], images: list | None, num_generations: int, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], Logprobs, Any]:
        """Return the prompts, a completion of each, their log-probabilities, and None.

        Args:
            prompts: tokens, each prompt `num_generations` times in a row.
            images: of each prompt; None without any.
            num_generations: completions per prompt.
            profiler: a context of TRL's for the time that it takes.

        Raises:
            GenerationError: a completion is missing, or not the policy's.
        """
        raise NotImplementedError

    def greedy(self) -> AbstractContextManager[None]:
        """Return a context in which `generate` returns the likeliest completions, without filters and penalties."""
        raise NotImplementedError

    def complete(self, prompts: list[list[int]], images: list | None = None) -> list[list[int]]:
        """Return the likeliest completion of each prompt."""
        with self.greedy():
            return self.generate(prompts, images, 1)[1]

    def changed_weights(self) -> list[str]:
        """Return the names of weights that it shares with the policy, and that something has written to."""
        return []

    def asleep(self) -> int:
        """Return the bytes that it has given back to the GPU and PyTorch still counts as allocated."""
        return 0


def backend_class(name: str) -> type[Backend]:
    """Return the class that `engine.backend` names.

    Raises:
        ConfigError: there is none, or it is no `Backend`.
    """
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"engine.backend={name}: {error}; package.module.Class is needed, with its folder on PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise ConfigError(f"engine.backend={name}: not a subclass of grpo.generation.backend.Backend")
    return found
