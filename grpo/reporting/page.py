"""One self-contained page about a run, or about a sweep."""

import base64
import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from grpo.reporting.charts import Chart, accuracy_by_value, bars, curve
from grpo.reporting.comparison import MOST, comparison_of
from grpo.reporting.completions import as_data
from grpo.reporting.content import completions_of, content_of, followed
from grpo.reporting.curves import Curve
from grpo.reporting.images import MAX_BYTES, MAX_IMAGES
from grpo.reporting.vega import javascript
from grpo.rundir.files import write_json
from grpo.rundir.run_dir import Run, read_run
from grpo.rundir.sweep_dir import COLUMNS, Sweep, is_sweep, read_sweep, show
from grpo.utils.atomic import atomic
from grpo.utils.errors import ConfigError

PAGE, DATA, COMPARISON = "report.html", "report.json", "comparison.html"
SCRIPTS = ("show.js", "tokens.js", "browse.js", "problems.js", "answers.js")


def write_report(folder: Path) -> Path:
    """Write the page of a run, and the same as data, or the page of a sweep, into its directory.

    Raises:
        ConfigError: the directory holds neither.
    """
    if is_sweep(folder):
        return save(folder, sweep_page(read_sweep(folder)))
    content, text = run_page(read_run(folder))
    write_json(folder / DATA, content)
    return save(folder, text)


def write_comparison(runs: dict[str, Run], to: Path) -> Path:
    """Write the page that compares runs by name into the folder `to`, and return its file."""
    return save(to, comparison_page(runs), COMPARISON)


def named(folders: Sequence[Path]) -> dict[str, Run]:
    """Return runs by the last two parts of their paths, or by all of them where that names several.

    Raises:
        ConfigError: a folder holds no run, two are the same, or these are too many.
    """
    if len(folders) > MOST:
        raise ConfigError(f"{len(folders)} runs: at most {MOST} can be compared")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("a run is named twice: name runs that differ to compare them")
    names = [name_of(folder) for folder in folders]
    if len({*names}) < len(names):
        names = [str(folder.resolve()) for folder in folders]
    return {name: read_run(folder) for name, folder in zip(names, folders, strict=True)}


def save(folder: Path, text: str, name: str = PAGE) -> Path:
    """Write a page into a folder, and return its file."""
    file = folder / name
    with atomic(file) as partial:
        partial.write_text(text, encoding="utf-8", errors="replace")
    return file


def run_page(run: Run) -> tuple[dict[str, Any], str]:
    """Return the content of `report.json` of a run, and its page."""
    browse, problems = completions_of(run), followed(run)
    content = content_of(run, browse, problems)
    text = page(
        "run.html.jinja",
        title=content["title"],
        content=content,
        charts=[curve(Curve(**fields)) for fields in content["curves"]],
        browse=browse,
        problems=problems,
        live=content["status"] == "running",
        limits={"images": MAX_IMAGES, "bytes": MAX_BYTES},
    )
    return content, text


def name_of(folder: Path) -> str:
    """Return the last two parts of a path: date and time of a run or a sweep, time and number of a job."""
    return "/".join(folder.resolve().parts[-2:])


def comparison_page(runs: dict[str, Run]) -> str:
    """Return the page that compares runs by name."""
    comparison = comparison_of(runs)
    return page(
        "comparison.html.jinja",
        title=f"GRPO runs {', '.join(runs)}",
        runs=runs,
        columns=COLUMNS,
        comparison=comparison,
        charts=[curve(Curve(**fields)) for fields in comparison["curves"]],
    )


def sweep_page(sweep: Sweep, live: bool = False) -> str:
    """Return the page of a sweep, which reloads if it is live."""
    evaluated = [run for run in sweep.runs if run.accuracy is not None]
    best = max(evaluated, key=quality, default=None)
    compared = {sweep.name(run): run for run in sorted(sweep.runs, key=quality, reverse=True)[:MOST]}
    comparison = comparison_of(compared, sweep.name(best) if best else None) if len(compared) > 1 else None
    over_values = [chart for key in sweep.varied for chart in comparisons(sweep, key)]
    curves = [curve(Curve(**fields)) for fields in comparison["curves"]] if comparison else []
    return page(
        "sweep.html.jinja",
        live=live,
        title=f"GRPO sweep {name_of(sweep.folder)}",
        sweep=sweep,
        columns=COLUMNS | {"completions per step": lambda run: show(run.summary.get("completions_a_step"), "{:,}")},
        best=best,
        compared=list(compared),
        comparison=comparison,
        charts=over_values + curves,
        number_of_values=len(over_values),
    )


def quality(run: Run) -> tuple[float, float]:
    """Return what runs are ordered by: accuracy, then reward."""
    return run.accuracy or 0.0, run.reward or 0.0


def comparisons(sweep: Sweep, key: str) -> list[Chart]:
    """Return the charts of memory and accuracy over the values of a key."""
    places: dict[str, list[Run]] = {}
    for run in sorted(sweep.runs, key=lambda run: order(sweep.value(run, key))):
        places.setdefault(sweep.value(run, key), []).append(run)
    peaks = {text: max((run.peak_gb for run in runs if run.peak_gb), default=None) for text, runs in places.items()}
    drawings = [bars(f"Peak memory over {key}, GiB", peaks, "GiB")]
    after = {text: [interval(run) for run in runs if run.accuracy is not None] for text, runs in places.items()}
    if any(after.values()):
        before = {run.evaluation["before"]["accuracy"] for run in sweep.runs if "before" in run.evaluation}
        common = before.pop() if len(before) == 1 else None
        drawings.append(accuracy_by_value(f"Held-out accuracy over {key}", after, common))
    return drawings


def interval(run: Run) -> tuple[float, float, float]:
    """Return the accuracy after training with its 95 % interval."""
    after = run.evaluation["after"]
    return (after["accuracy"], *after["interval"])


def order(text: str) -> tuple[bool, float, str]:
    """Return a sort key: numbers by size, then texts."""
    try:
        return False, float(text), ""
    except ValueError:
        return True, 0.0, text


def page(template: str, charts: Sequence[Chart], live: bool = False, **content: Any) -> str:
    """Render a template. Content is escaped, and the page's policy allows no scripts but its own.

    Args:
        charts: of the page, in their order.
        live: whether the page reloads, as its run or sweep has not ended.
        content: of the template.
    """
    environment = Environment(
        loader=PackageLoader("grpo.reporting"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["data"] = as_data
    environment.filters["show"] = show
    scripts = [environment.get_template(name).render() for name in SCRIPTS]
    if charts:  # last, so that the text can be read meanwhile
        scripts += [javascript(), environment.get_template("charts.js").render()]
    scripts.append(environment.get_template("live.js").render())
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    parts = {"scripts": list(map(Markup, scripts)), "digests": digests, "charts": charts}
    parts["written"] = round(1000 * time.time()) if live else None
    return environment.get_template(template).render(drawings=[asdict(chart) for chart in charts], **parts, **content)
