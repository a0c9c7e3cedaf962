"""Problems of the library reasoning-gym: over a hundred data sets, generated without end and offline."""

import json
from typing import Any


def rows(split: str, size: int, seed: int, name: str, **options: Any) -> list[dict[str, str]]:
    """Return `size` problems with `question`, `answer`, `difficulty`, and as JSON the `metadata` for their verifier.

    Args:
        split: `train` or `test`, which have different seeds.
        name: data set of the library, such as `gsm_symbolic` or `chain_sum`.
        options: options of the data set, such as `min_terms` and `max_digits` of `chain_sum`.

    Raises:
        ImportError: the library is not installed.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError("reasoning-gym is not installed: make extras, or pip install reasoning-gym") from error
    problems = reasoning_gym.create_dataset(
        name, size=size, seed=seed if split == "train" else seed + 1_000_003, **options
    )
    return [
        {
            "question": problem["question"],
            "answer": str(problem["answer"]),
            "metadata": json.dumps(problem["metadata"], default=str),
            "difficulty": json.dumps(problem["metadata"].get("difficulty"), default=str),
        }
        for problem in problems
    ]
