"""A tool of docs/tools.md: its docstring and types are the description that the policy reads."""

THOUSANDS = {
    "Alder": 41, "Birch": 17, "Cedar": 63, "Dogwood": 8, "Elm": 29, "Fir": 75,
    "Hazel": 12, "Larch": 54, "Maple": 96, "Oak": 33, "Rowan": 21,
}  # fmt: skip


def population(town: str) -> str:
    """Look up how many people live in a town.

    Args:
        town: Name of the town, in English
    """
    return f"{THOUSANDS[town]} thousand"
