"""Several runs beside each other: what differs in their configurations, their curves, accuracies and answers."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from omegaconf import OmegaConf

from grpo.reporting.completions import as_data, shortened
from grpo.reporting.curves import Curve, Points, curves_of, mean_of, thinned
from grpo.reporting.findings.base import values
from grpo.rundir.files import read_lines
from grpo.rundir.run_dir import Run
from grpo.utils.estimators import difference_interval, unpaired_difference_interval

MOST = 6
"""Runs beside each other: as many as a chart has colours."""
MAX_SIZE = 1_500_000
"""Bytes of answers on a page."""
LENGTH = 2000
"""Characters per answer and per problem."""
LINES = {"Completion length, tokens": "mean"}
"""Line of a curve with several lines that is compared."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """The difference in accuracy of a run to another one."""

    run: str
    to: str
    points: float
    """Difference, -1 to 1."""
    interval: tuple[float, float]
    """95 % interval of the difference."""
    samples: int
    """Held-out problems."""
    paired: bool
    """Whether both have answered the same problems."""

    @property
    def text(self) -> str:
        """The difference in a sentence."""
        low, high = (f"{100 * end:+.1f}".replace("-", "−") for end in self.interval)
        chance = self.interval[0] <= 0 <= self.interval[1]
        verdict = "chance may explain it" if chance else "more than chance explains"
        than = f"{100 * abs(self.points):.1f} points {'lower' if self.points < 0 else 'higher'} than that of {self.to}"
        problems = f"on the same {self.samples} problems" if self.paired else "on other problems"
        return f"The accuracy of {self.run} is {than}, {problems}; 95 % interval {low} to {high} points: {verdict}"


def comparison_of(
    runs: dict[str, Run], to: str | None = None, groups: Mapping[str, Sequence[Run]] | None = None
) -> Row:
    """Return what a page compares of at most `MOST` runs by name.

    It has `runs`, `settings` (a row of values per key that differs), `accuracies` (sentences), `curves`, and `answers`.

    Args:
        runs: to compare.
        to: the run that the accuracies of others are compared with; the first if None.
        groups: by the same names, each with the runs whose mean is a line of the curves; the run itself if None.
    """
    answered = {name: answers(run) for name, run in runs.items()}
    compared = differences(runs, answered, to or next(iter(runs)))
    return {
        "runs": [
            {"name": name, "status": run.status, "reason": run.reason, "command": run.command}
            for name, run in runs.items()
        ],
        "settings": settings(runs),
        "accuracies": [difference.text for difference in compared],
        "differences": [asdict(difference) for difference in compared],
        "curves": [asdict(curve) for curve in curves(groups or {name: [run] for name, run in runs.items()})],
        "answers": side_by_side(answered),
    }


def settings(runs: dict[str, Run]) -> dict[str, list[str]]:
    """Return the keys of configurations that differ, each with its value in each run, as YAML has it."""
    flat = [dict(flattened(OmegaConf.to_container(run.config))) for run in runs.values()]
    versions = [
        {f"version of {name}": text for name, text in run.summary.get("versions", {}).items()} for run in runs.values()
    ]
    machines = [
        {"machine": run.plan.get("device", ""), "commit": run.summary.get("git_commit") or ""} for run in runs.values()
    ]
    rows = [{**config, **version, **machine} for config, version, machine in zip(flat, versions, machines, strict=True)]
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: shown for key in keys if len(set(shown := [row.get(key, "") for row in rows])) > 1}


def flattened(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys of a configuration, with dots, and their values as text."""
    if isinstance(config, dict) and config:
        for key, value in config.items():
            yield from flattened(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, json.dumps(config, ensure_ascii=False, default=str).strip('"')


def curves(groups: Mapping[str, Sequence[Run]]) -> list[Curve]:
    """Return the curves of which a line can stand for a run, with a line per run, or the mean of a group of runs."""
    by_title: dict[str, Curve] = {}
    lines: dict[str, dict[str, list[Points]]] = defaultdict(lambda: defaultdict(list))
    for name, run in ((name, run) for name, runs in groups.items() for run in runs):
        seconds = {"seconds": thinned(values(run, "step_time"))}
        time = Curve("Time, s/step", "Seconds of a step, mean over the steps since the last logged one.", seconds)
        for curve in [*curves_of(run), time]:
            label = LINES.get(curve.title, next(iter(curve.lines), ""))
            if curve.lines.get(label) and (len(curve.lines) == 1 or curve.title in LINES):
                by_title.setdefault(curve.title, Curve(curve.title, curve.about, {}, curve.percent))
                lines[curve.title][name].append(curve.lines[label])
    for title, curve in by_title.items():
        curve.lines.update({name: mean_of(of_runs) for name, of_runs in lines[title].items()})
    return [curve for curve in by_title.values() if len(curve.lines) > 1]


def answers(run: Run) -> dict[int, Row]:
    """Return the greedy answers of a trained policy to the held-out problems, by the number of the problem."""
    file = run.folder / "evaluation_after.jsonl"
    return {row["problem"]: row for row in read_lines(file) if row.get("sample") == 0 and "correct" in row}


def differences(runs: dict[str, Run], answered: dict[str, dict[int, Row]], to: str) -> list[Difference]:
    """Return the differences in accuracy to a run, of all that were evaluated."""
    compared = []
    for name, run in runs.items():
        mine, other = (each_run.evaluation.get("after") for each_run in (run, runs[to]))
        if name == to or not (mine and other):
            continue
        pairs = same_problems(answered[name], answered[to])
        if pairs and len(pairs) == mine["samples"] == other["samples"]:
            counts = [pairs.count(pair) for pair in ((True, True), (False, True), (True, False), (False, False))]
            interval = difference_interval(*counts)
        else:
            pairs = []
            counted = [(round(part["accuracy"] * part["samples"]), part["samples"]) for part in (mine, other)]
            interval = unpaired_difference_interval(*counted[0], *counted[1])
        points = mine["accuracy"] - other["accuracy"]
        compared.append(Difference(name, to, points, interval, mine["samples"], bool(pairs)))
    return compared


def same_problems(mine: dict[int, Row], others: dict[int, Row]) -> list[tuple[bool, bool]]:
    """Return which of two runs were correct for each problem; nothing if a problem of one is not that of the other."""
    if mine.keys() != others.keys() or any(row["prompt"] != others[problem]["prompt"] for problem, row in mine.items()):
        return []
    return [(bool(row["correct"]), bool(others[problem]["correct"])) for problem, row in mine.items()]


def side_by_side(answered: dict[str, dict[int, Row]]) -> Row:
    """Return as many problems as a page holds that all runs have answered; those answered differently come first."""
    everyones = [rows for rows in answered.values() if rows]
    common = set.intersection(*map(set, everyones)) if len(everyones) == len(answered) > 1 else set()
    prompts = {problem: {json.dumps(rows[problem]["prompt"]) for rows in everyones} for problem in common}
    shown, size = list[Row](), 0
    for problem in sorted(common, key=lambda index: (len({rows[index]["correct"] for rows in everyones}) == 1, index)):
        if len(prompts[problem]) > 1:  # other problems under this number
            continue
        of_runs = [
            {
                "run": name,
                "text": shortened(rows[problem]["completion"])[:LENGTH],
                "correct": bool(rows[problem]["correct"]),
            }
            for name, rows in answered.items()
        ]
        prompt = shortened(everyones[0][problem]["prompt"])[:LENGTH]
        shown.append({"problem": problem, "prompt": prompt, "answers": of_runs})
        size += len(as_data(shown[-1]).encode())
        if size > MAX_SIZE:
            break
    return {"problems": shown, "others": len(common) - len(shown)}
