"""Error rates and power of the guard's tests, by simulation of answers to the same held-out problems.

`python -m benchmarks.guard_power` writes the table of docs/guard.md, in a few seconds.
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.guard import PAGE
from benchmarks.pages import write_part
from grpo.extras.guard.significance import largest_rise, level, p_of_fall

RUNS, LOOKS, FIRST, ERROR = 400, 11, 5, 0.05
"""Simulated runs, looks of a run, the look that falls, and `guard.error`."""
FALLS = (0.0, 0.05, 0.1, 0.2, 0.3)
SAMPLES = (64, 128, 256)


def simulated(rng: np.random.Generator, accuracies: Sequence[float], samples: int, flips: float = 0.1) -> list[str]:
    """Return the answers of a run's looks, of problems that differ in difficulty.

    Args:
        accuracies: expected at each look.
        flips: fraction of the problems whose difficulty for the policy changes between two looks.
    """
    difficulty, looks = rng.random(samples), []
    for accuracy in accuracies:
        difficulty = np.where(rng.random(samples) < flips, rng.random(samples), difficulty)
        looks.append("".join("1" if value < accuracy else "0" for value in difficulty))
    return looks


def first_fall(looks: Sequence[str], error: float = ERROR) -> int | None:
    """Return the number of the first look that has fallen from the best before it; None without any."""
    best = looks[0]
    for number, look in enumerate(looks[1:], 1):
        if look.count("1") > best.count("1"):
            best = look
        elif p_of_fall(best, look) <= level(error, len(looks)):
            return number
    return None


def seen(samples: int, fall: float) -> float:
    """Return the fraction of runs at 70 % in which a fall at look `FIRST` is seen, or in which any is without one."""
    rng = np.random.default_rng(0)
    accuracies = [0.7] * FIRST + [0.7 - fall] * (LOOKS - FIRST)
    falls = [first_fall(simulated(rng, accuracies, samples)) for _ in range(RUNS)]
    return float(np.mean([number is not None and number >= (FIRST if fall else 0) for number in falls]))


def ends(samples: int, rise: float, flips: float, window: int = 5) -> float:
    """Return the fraction of runs that a plateau of `guard.rise=0.05` ends at its first opportunity.

    Args:
        rise: of accuracy between two looks, from 80 %.
    """
    rng = np.random.default_rng(0)
    accuracies = [0.8 + rise * number for number in range(window + 1)]
    runs = [simulated(rng, accuracies, samples, flips) for _ in range(RUNS)]
    return float(np.mean([largest_rise(run[0], run[-1]) < 0.05 for run in runs]))


def part() -> str:
    """Return the part of docs/guard.md."""
    lines = ["| `guard.samples` | no fall | " + " | ".join(f"by {fall:.0%}" for fall in FALLS[1:]) + " |"]
    lines += ["|---" * (1 + len(FALLS)) + "|"]
    for samples in SAMPLES:
        lines.append(f"| {samples} | " + " | ".join(f"{seen(samples, fall):.1%}" for fall in FALLS) + " |")
    plateaus = [
        f"{samples}: {ends(samples, 0.0, 0.02):.0%} of flat runs, {ends(samples, 0.01, 0.02):.0%} of rising runs"
        for samples in SAMPLES
    ]
    return (
        "\n".join(lines)
        + f"\n\nEnded by `guard.plateau=5` at its first opportunity, by samples: {'; '.join(plateaus)}.\n"
    )


if __name__ == "__main__":
    write_part(PAGE, "benchmarks.guard_power", part())
