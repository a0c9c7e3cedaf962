"""Problems that only a seed tells apart: `reset` of an environment makes the rest."""


def rows(split: str, size: int, seed: int = 0) -> list[dict[str, int]]:
    """Return `size` rows with a `seed` each; the splits `train` and `test` have none in common."""
    return [{"seed": 2 * (seed + number) + (split == "test")} for number in range(size)]
