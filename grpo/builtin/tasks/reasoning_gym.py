"""Problems of the library reasoning-gym: over a hundred data sets, generated without end and offline."""

import json
from typing import Any


def rows(split: str, size: int, seed: int, name: str, **options: Any) -> list[dict[str, str]]:
    """Return `size` problems with `question`, `answer`, `difficulty`, and as JSON the `metadata` for their verifier.

    `train` and `test` have different seeds. `name` is a data set of the library, such as `gsm_symbolic` or `chain_sum`,
    with options of its own, such as `min_terms` and `max_digits`.
    """
    import reasoning_gym

    seed += 0 if split == "train" else 1_000_003
    problems = reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
    return [
        {
            "question": problem["question"],
            "answer": str(problem["answer"]),
            "metadata": json.dumps(problem["metadata"], default=str),
            "difficulty": json.dumps(problem["metadata"].get("difficulty"), default=str),
        }
        for problem in problems
    ]
