"""What reasoning-gym's own verifier says of a completion's final answer."""

import json
from collections.abc import Sequence
from typing import Any

from reasoning_gym import get_score_answer_fn

from rewards.text import final_answer, text_of


def reasoning_gym(
    completions: Sequence[Any], question: Sequence[str], answer: Sequence[str], metadata: Sequence[str], **columns: Any
) -> list[float]:
    r"""Score each answer with the verifier of the data set that its problem is from.

    Args:
        metadata: of each problem, as JSON; it names the data set.

    Returns:
        1.0 for a right answer, 0.0 for a wrong one, and for some data sets something between.
    """
    rewards = []
    for completion, asked, right, known in zip(completions, question, answer, metadata, strict=True):
        entry = {"question": asked, "answer": right, "metadata": json.loads(known)}
        said = final_answer(text_of(completion), ["answer", "boxed", "hash"])
        verify = get_score_answer_fn(entry["metadata"]["source_dataset"])
        rewards.append(float(verify(said, entry)) if said else 0.0)
    return rewards
