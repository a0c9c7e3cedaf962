"""The interface of your own generation engine: a subclass of `Backend` in a file of its own.

`engine.backend` names the class by its dotted path. With `train.use_vllm=true` it replaces TRL's connection to vLLM,
and TRL and this trainer use its log-probabilities like vLLM's: for the importance-sampling correction, the check of the
engine's weights, and metrics.
"""

import copy
import pkgutil
import sys
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from grpo.utils.errors import ConfigError

if TYPE_CHECKING:
    from grpo.config.resolve import Resolved

Logprobs = list[list[list[float | None]]]
"""For each token of each completion, a list with its log-probability, or with None if it is unknown.

Under a sampling filter the value is a `grpo.generation.kept_tokens.KeptLogprob`, which has the kept tokens.
"""


class Backend:
    """Generates completions with the policy's weights.

    Args:
        model: the policy, with its adapter if it has one.
        accelerator: accelerate's `Accelerator`.
        processing_class: tokenizer or processor.
        options: TRL's other arguments of `VLLMGeneration`, such as `temperature` and `max_completion_length`, and
            `lora`, `shares`, `most_images`, `quantization`, `corrected`, `drafts` and `staleness` of `PolicyEngine`.
    """

    expands_images = False
    """Whether `give_images` passes prompts with one token per image, which the engine expands itself."""

    checked = True
    """Whether its weights have been compared with the policy's; the trainer sets it to False after each rollout."""

    def __init__(self, model: Any, accelerator: Any, processing_class: Any, **options: Any) -> None:
        self.model, self.accelerator, self.processing_class = model, accelerator, processing_class
        self.options = options
        self.temperature = options.get("temperature", 1.0)
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

    def for_thread(self, accelerator: Any, name: str) -> "Backend":
        """Return a copy that generates in a thread while the policy trains, with the options that this one has now.

        Args:
            accelerator: of a single process.
            name: of its requests; see `abort`.
        """
        backend = copy.copy(self)
        backend.accelerator = accelerator
        return backend

    def abort(self, name: str) -> None:
        """End the requests of a copy, whose completions are no longer needed, if that is possible."""

    def changed_weights(self) -> list[str]:
        """Return the names of weights that it shares with the policy, and that something has written to."""
        return []

    def metrics(self) -> dict[str, float]:
        """Return numbers about its generations since the last call, which a step logs."""
        return {}

    def asleep(self) -> int:
        """Return the bytes that it has given back to the GPU and PyTorch still counts as allocated."""
        return 0


def backend_class(name: str) -> type[Backend]:
    """Return the class that `engine.backend` names.

    Raises:
        ConfigError: there is none, or it is no `Backend`.
    """
    try:
        backend = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"engine.backend={name}: {error}; package.module.Class is needed, with its folder on PYTHONPATH"
        ) from error
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise ConfigError(f"engine.backend={name}: not a subclass of grpo.generation.backend.Backend")
    return backend
