"""docs/architecture.md names the modules that there are."""

import re

from grpo.config.schema import ROOT

TEXT = (ROOT / "docs" / "architecture.md").read_text()


def row(package: str) -> str:
    """The line of the map about a package."""
    return next(line for line in TEXT.splitlines() if line.startswith(f"| `{package}/`"))


def test_every_module_is_on_the_map_and_every_name_on_the_map_is_a_module() -> None:
    for package in ("config", "planning", "trainer", "generation", "evaluation", "runs", "reporting", "sweeps"):
        there = {file.name for file in (ROOT / "grpo" / package).rglob("*.py")} - {"__init__.py"}
        assert set(re.findall(r"`(\w+\.py)`", row(package))) == there, package
    top = {file.name for file in (ROOT / "grpo").glob("*.py")} - {"__init__.py"}
    assert top <= set(re.findall(r"`(\w+\.py)`", TEXT))
    for package in ("rewards/runtime", "rewards/probing"):
        there = {file.name for file in (ROOT / package).glob("*.py")} - {"__init__.py"}
        assert set(re.findall(r"`(\w+\.py)`", row(package))) == there, package
