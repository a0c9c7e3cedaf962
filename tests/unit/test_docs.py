"""Tables of the docs that say what the code does."""

import re

from grpo.config.schema import LOSS_MEANS, ROOT

TEXT = (ROOT / "docs" / "architecture.md").read_text()


def row(package: str) -> str:
    """The line of the map about a package."""
    return next(line for line in TEXT.splitlines() if line.startswith(f"| `{package}/`"))


def test_every_module_is_on_the_map_and_every_name_on_the_map_is_a_module() -> None:
    packages = {file.parent.name for file in (ROOT / "grpo").glob("*/__init__.py")} - {"tasks", "tiny"}
    for package in packages:
        there = {file.name for file in (ROOT / "grpo" / package).rglob("*.py")} - {"__init__.py"}
        assert set(re.findall(r"`(\w+\.py)`", row(package))) == there, package
    top = {file.name for file in (ROOT / "grpo").glob("*.py")} - {"__init__.py"}
    assert top <= set(re.findall(r"`(\w+\.py)`", TEXT))
    for package in ("rewards/runtime", "rewards/sandbox", "rewards/probing"):
        there = {file.name for file in (ROOT / package).glob("*.py")} - {"__init__.py"}
        assert set(re.findall(r"`(\w+\.py)`", row(package))) == there, package


def test_the_table_of_losses_says_how_the_trainer_weighs_each() -> None:
    means = {
        "completions per slice": "sequences",
        "tokens per slice": "tokens",
        "tokens of the generation": "generation",
    }
    found = {}
    for line in (ROOT / "docs" / "exact_update.md").read_text().splitlines():
        names, mean, *_ = [*line.strip("| ").split(" | "), ""]
        for words, value in means.items():
            if line.startswith("| `") and mean.startswith(words):
                found |= dict.fromkeys(re.findall(r"`(\w+)`", names), value)
    assert found == LOSS_MEANS
