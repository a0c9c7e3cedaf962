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
from grpo.reporting.completions import as_data
from grpo.reporting.content import completions_of, content_of
from grpo.reporting.curves import Curve
from grpo.reporting.images import MAX_BYTES, MAX_IMAGES
from grpo.reporting.vega import javascript
from grpo.rundir.files import write_json
from grpo.rundir.run_dir import Run, read_run
from grpo.rundir.sweep_dir import COLUMNS, Sweep, is_sweep, read_sweep, show
from grpo.utils.atomic import atomic

PAGE, DATA = "report.html", "report.json"


def write_report(folder: Path) -> Path:
    """Write the page of a run, and the same as data, or the page of a sweep, into its directory.

    Raises:
        ConfigError: the directory holds neither.
    """
    if is_sweep(folder):
        return save(folder, sweep_page(read_sweep(folder)))
    browse = completions_of(run := read_run(folder))
    content = content_of(run, browse)
    write_json(folder / DATA, content)
    return save(folder, run_page(content, browse))


def save(folder: Path, text: str) -> Path:
    """Write a page into a folder, and return its file."""
    file = folder / PAGE
    with atomic(file) as partial:
        partial.write_text(text, encoding="utf-8", errors="replace")
    return file


def run_page(content: dict[str, Any], browse: dict[str, Any]) -> str:
    """Return the page of a run with the content of `report.json` and its completions."""
    return page(
        "run.html.jinja",
        title=content["title"],
        content=content,
        charts=[curve(Curve(**one)) for one in content["curves"]],
        browse=browse,
        live=content["status"] == "running",
        limits={"images": MAX_IMAGES, "bytes": MAX_BYTES},
    )


def name_of(folder: Path) -> str:
    """Return the last two parts of a path: date and time of a run or a sweep, time and number of a job."""
    return "/".join(folder.resolve().parts[-2:])


def sweep_page(sweep: Sweep, live: bool = False) -> str:
    """Return the page of a sweep, which reloads if it is live."""
    evaluated = [run for run in sweep.runs if run.accuracy is not None]
    best = max(evaluated, key=lambda run: (run.accuracy or 0, run.reward or 0), default=None)
    rivals = [run for run in evaluated if best and run is not best and interval(run)[2] >= interval(best)[1]]
    return page(
        "sweep.html.jinja",
        live=live,
        title=f"GRPO sweep {name_of(sweep.folder)}",
        sweep=sweep,
        columns=COLUMNS | {"completions per step": lambda run: show(run.summary.get("completions_a_step"), "{:,}")},
        best=best,
        rivals=rivals,
        charts=[chart for key in sweep.varied for chart in comparisons(sweep, key)],
    )


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
        live: whether the page reloads, as it is still made anew.
        content: of the template.
    """
    environment = Environment(
        loader=PackageLoader("grpo.reporting"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["data"] = as_data
    environment.filters["show"] = show
    scripts = [environment.get_template(name).render() for name in ("show.js", "browse.js", "charts.js")]
    scripts = [javascript(), *scripts] if charts else scripts[:-1]
    scripts.append(environment.get_template("live.js").render())
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    made = {"scripts": list(map(Markup, scripts)), "digests": digests, "charts": charts}
    made["written"] = round(1000 * time.time()) if live else None
    return environment.get_template(template).render(drawings=[asdict(chart) for chart in charts], **made, **content)
