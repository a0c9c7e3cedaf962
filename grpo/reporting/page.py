"""One self-contained page about a run, or about a sweep."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo.reporting.charts import charts_of
from grpo.reporting.comparison import MOST, comparison_of
from grpo.reporting.content import completions_of, content_of, followed
from grpo.reporting.curves import Curve, axes_of, constants, metrics_of
from grpo.reporting.images import MAX_BYTES, MAX_IMAGES
from grpo.reporting.render import name_of, page, save
from grpo.reporting.sweep import sweep_page
from grpo.rundir.files import write_json
from grpo.rundir.run_dir import Run, read_run
from grpo.rundir.sweep_dir import COLUMNS, is_sweep, read_sweep
from grpo.utils.errors import ConfigError

DATA, COMPARISON = "report.json", "comparison.html"


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


def run_page(run: Run) -> tuple[dict[str, Any], str]:
    """Return the content of `report.json` of a run, and its page."""
    browse, problems = completions_of(run), followed(run)
    content = content_of(run, browse, problems)
    text = page(
        "run.html.jinja",
        title=content["title"],
        content=content,
        charts=charts_of([Curve(**fields) for fields in content["curves"]]),
        axes={"": axes_of(run)},
        metrics=metrics_of(run),
        browse=browse,
        problems=problems,
        live=content["status"] == "running",
        limits={"images": MAX_IMAGES, "bytes": MAX_BYTES},
    )
    return content, text


def comparison_page(runs: dict[str, Run]) -> str:
    """Return the page that compares runs by name."""
    comparison = comparison_of(runs)
    curves = [Curve(**fields) for fields in comparison["curves"]]
    return page(
        "comparison.html.jinja",
        title=f"GRPO runs {', '.join(runs)}",
        runs=runs,
        columns=COLUMNS,
        comparison=comparison,
        charts=charts_of(curves),
        constants=list(constants(curves).values()),
        axes={name: axes_of(run) for name, run in runs.items()},
    )
