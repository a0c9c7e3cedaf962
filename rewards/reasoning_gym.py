"""Score of a completion's final answer by reasoning-gym's own verifier."""

import json
from collections.abc import Sequence
from typing import Any

from reasoning_gym import get_score_answer_fn

from rewards.text import final_answer, text_of


def reasoning_gym(
    completions: Sequence[Any], question: Sequence[str], answer: Sequence[str], metadata: Sequence[str], **columns: Any
) -> list[float]:
    r"""Score each answer with the verifier of its problem's data set.

    Args:
        metadata: metadata of each problem as JSON, with the name of its data set.

    Returns:
        1.0 for a correct answer, 0.0 for an incorrect one, and for some data sets values in between.
    """
    rewards = []
    for completion, problem, reference, details in zip(completions, question, answer, metadata, strict=True):
        entry = {"question": problem, "answer": reference, "metadata": json.loads(details)}
        final = final_answer(text_of(completion), ["answer", "boxed", "hash"])
        verify = get_score_answer_fn(entry["metadata"]["source_dataset"])
        rewards.append(float(verify(final, entry)) if final else 0.0)
    return rewards
