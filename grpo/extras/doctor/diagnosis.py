"""A finding about a run, with its severity."""

from dataclasses import asdict, dataclass
from typing import Any

from grpo.reporting.findings import Finding

SEVERITIES = ("error", "warning", "info")
"""From a run that learns nothing to a fact that may be intended."""


@dataclass(frozen=True)
class Diagnosis(Finding):
    """A finding with its severity."""

    severity: str = "warning"
    """One of `SEVERITIES`."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


def listed(values: list[tuple[int, float]], most: int = 3) -> str:
    """Return the first (step, value) pairs as evidence."""
    text = ", ".join(f"step {step}: {value:.3g}" for step, value in values[:most])
    return text + (", …" if len(values) > most else "")
