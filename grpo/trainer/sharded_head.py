"""FSDP2 gathers the output layer together with the norm before it, also of a policy that sees images."""

from contextlib import AbstractContextManager
from typing import Any

from accelerate.utils import fsdp_utils

from grpo.utils.patching import patched


def gathered_with_its_norm() -> AbstractContextManager[None]:
    """Return a context in which accelerate shards an output layer together with the norm before it.

    TRL multiplies by the weight of that layer without calling it, so that only the norm gathers it. accelerate finds no
    norm in a policy that sees images, whose language model has it. TRL would gather the weight by itself then, and each
    process would add the gradient of its own completions alone to its shard.
    """
    stock = fsdp_utils._find_final_norm

    def final_norm(model: Any) -> Any:
        language_model = getattr(getattr(model, model.base_model_prefix, None), "language_model", None)
        norms = [part for part in language_model.children() if "Norm" in type(part).__name__] if language_model else []
        return norms[-1] if norms else stock(model)

    return patched("accelerate.utils.fsdp_utils:_find_final_norm", final_norm)
