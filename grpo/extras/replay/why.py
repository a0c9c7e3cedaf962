"""Finds where two runs part, and which of their differences can matter until then."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo.extras.replay.acts import DIGESTS, NOTHING, is_before, stage_of
from grpo.extras.replay.compare import STAGES, Records, differences
from grpo.extras.replay.computing import SINCE, check_run
from grpo.extras.replay.origin import flattened, read_origin, rounds_otherwise
from grpo.extras.replay.recorder import FOLDER
from grpo.extras.replay.report import tolerance_of
from grpo.rundir.files import read_lines
from grpo.utils.errors import ConfigError

Lines = dict[int, list[dict[str, Any]]]
"""Lines of `steps.jsonl` of all processes, by step."""


def steps_of(run: Path) -> Lines:
    """Return the digests of a run's steps.

    Raises:
        ConfigError: the run has kept none.
    """
    check_run(run)
    files = sorted((run / FOLDER).glob("steps*.jsonl"))
    steps: Lines = {}
    for file in files:
        for line in read_lines(file):
            steps.setdefault(line["step"], []).append(line)
    if not steps:
        torn = f", as {files[0].name} is torn" if files else f"; {SINCE}"
        raise ConfigError(f"{run}: there are no digests of its steps{torn}")
    return steps


def compared(run: Path, other: Path, until: int | None = None) -> dict[str, Any]:
    """Return where two runs part, as `--json` prints it.

    Args:
        until: compare the steps before this one; None compares all.

    Raises:
        ConfigError: a run has kept no digests, or both have no step in common.
    """
    lines, others = steps_of(run), steps_of(other)
    both = lines.keys() & others.keys()
    if until is not None and both and until > max(both) + 1:
        raise ConfigError(f"step={until}: the last step that both runs have kept is {max(both)}")
    common = [step for step in sorted(both) if until is None or step < until]
    if not common:
        spans = " and ".join(
            f"steps {min(steps)} to {max(steps)} of {folder}" for steps, folder in ((lines, run), (others, other))
        )
        before = f" before step {until}" if until is not None else ""
        raise ConfigError(f"no step in common{before}: there are {spans}")
    parts = first_difference(lines, others, common)
    origin, other_origin = (read_origin(folder / FOLDER) for folder in (run, other))
    result: dict[str, Any] = {
        "runs": [str(run), str(other)],
        "steps": [common[0], common[-1]],
        "parts": None,
        "differences": [],
        "keys": keys_of(origin, other_origin, parts, common[-1]),
        "machine": machine_of(origin, other_origin),
    }
    if parts:
        step, stage = parts
        result["parts"] = {"step": step, "stage": stage}
        rewards = list(origin["config"]["reward"])
        records, others_records = (Records(folder / FOLDER, rewards) for folder in (run, other))
        tolerance = tolerance_of(origin["config"]) if rounds_otherwise(origin, other_origin) else 0.0
        stages = differences(records, others_records, step, tolerance, order=False)
        result["differences"] = [asdict(difference) for difference in stages]
    return result


def first_difference(lines: Lines, others: Lines, steps: list[int]) -> tuple[int, str] | None:
    """Return the first step in which the digests of two runs differ, and the stage; None without one."""
    for step in steps:
        for name, stage in DIGESTS.items():
            values, other_values = ([line.get(name) for line in of_run[step]] for of_run in (lines, others))
            if values != other_values:
                return step, stage
    return None


def keys_of(
    origin: dict[str, Any], other: dict[str, Any], parts: tuple[int, str] | None, last: int
) -> list[dict[str, Any]]:
    """Return the keys in which two configurations differ, each with whether it can be why the runs part."""
    config, other_config = flattened(origin["config"]), flattened(other["config"])
    result = []
    for key in dict.fromkeys([*config, *other_config]):
        if config.get(key) == other_config.get(key):
            continue
        stage = stage_of(key)
        can, reason = judged(stage, parts, last)
        values = [config.get(key), other_config.get(key)]
        result.append({"key": key, "values": values, "stage": stage, "can": can, "reason": reason})
    return sorted(result, key=lambda row: not row["can"])


def judged(stage: str | None, parts: tuple[int, str] | None, last: int) -> tuple[bool, str]:
    """Return whether a key that acts on a stage can be why two runs part, and the reason."""
    if stage == NOTHING:
        return False, "it changes no step"
    if parts is None:
        return False, f"all stages are equal up to step {last}"
    step, first = parts
    if stage is None:
        return True, "it is not known on which stage it acts"
    if stage != "start" and is_before(first, stage):
        return False, f"it acts on the {STAGES[stage]}, after the {STAGES[first]} of step {step}"
    if stage != first and step > 1:
        return True, f"it acts on the {STAGES[stage]}, and did not before step {step}"
    return True, f"it acts on the {STAGES[stage]}"


def machine_of(origin: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    """Return in which versions, devices, threads and reward functions two runs differ."""
    of_keys = ("config.", "max_steps")  # of which `keys_of` tells
    flat, other_flat = ({k: v for k, v in flattened(o).items() if not k.startswith(of_keys)} for o in (origin, other))
    return [
        {"key": key, "values": [flat.get(key), other_flat.get(key)]}
        for key in dict.fromkeys([*flat, *other_flat])
        if flat.get(key) != other_flat.get(key)
    ]


def of_both(text: str) -> str:
    """Return a difference between a run and now as one between two runs."""
    words = {
        ", now ": " and ",
        "skipped now": "skipped in the second run",
        "skipped in the run": "skipped in the first run",
    }
    words |= {"there is none now": "the second run has none", "there is none in the run": "the first run has none"}
    for word, instead in words.items():
        text = text.replace(word, instead)
    return text


def show(result: dict[str, Any], console: Console) -> None:
    """Print where two runs part, and which differences can be the reason."""

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    first, last = result["steps"]
    if parts := result["parts"]:
        before = f"; all before it are equal, from step {first} on" if parts["step"] > first else ""
        say(f"the runs part in step {parts['step']}: {STAGES[parts['stage']]}{before}")
        for item in result["differences"]:
            place = f"{item['where']}: " if item["where"] else ""
            say(f"  {STAGES[item['stage']]}: {place}{of_both(item['text'])}")
        if not result["differences"]:
            say(f"  the records of step {parts['step']} are not kept by both; with a larger replay.keep they say more")
    else:
        say(f"equal, bit for bit, from step {first} to step {last}")
    for row in result["keys"]:
        word = "can be why" if row["can"] else "cannot be why" if result["parts"] else "no effect"
        values = " and ".join(repr(value) for value in row["values"])
        say(f"{word}: {row['key']}={values}: {row['reason']}")
    for row in result["machine"]:
        before, now = row["values"]
        say(f"{'can be why' if result['parts'] else 'no effect'}: {row['key']}: {before} and {now}")
    if result["parts"] and not (any(row["can"] for row in result["keys"]) or result["machine"]):
        say(
            "configuration, versions, device, threads and reward functions are equal: something does not repeat "
            "itself; `python -m grpo.replay` of both runs finds which computes the step as it did"
        )
