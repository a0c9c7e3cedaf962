"""Pages as self-contained HTML: templates, their scripts, and the policy that allows no others."""

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from grpo.reporting.charts import Chart, lines_over_steps
from grpo.reporting.completions import as_data
from grpo.reporting.curves import AXES
from grpo.reporting.vega import javascript
from grpo.rundir.sweep_dir import show
from grpo.utils.atomic import atomic

PAGE = "report.html"
SCRIPTS = ("bar.js", "show.js", "tokens.js", "browse.js", "problems.js", "answers.js")


def name_of(folder: Path) -> str:
    """Return the last two parts of a path: date and time of a run or a sweep, time and number of a job."""
    return "/".join(folder.resolve().parts[-2:])


def save(folder: Path, text: str, name: str = PAGE) -> Path:
    """Write a page into a folder, and return its file."""
    file = folder / name
    with atomic(file) as partial:
        partial.write_text(text, encoding="utf-8", errors="replace")
    return file


def page(
    template: str,
    charts: Sequence[Chart],
    axes: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    live: bool = False,
    **content: Any,
) -> str:
    """Render a template. Content is escaped, and the page's policy allows no scripts but its own.

    Args:
        charts: of the page, in their order.
        axes: of the charts, as of `axes_of`, by the name of a line, or by the empty name for all.
        metrics: points of all metrics by name, of which the reader may choose more charts.
        live: whether the page reloads, as its run or sweep has not ended.
        content: of the template.
    """
    environment = Environment(
        loader=PackageLoader("grpo.reporting"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["data"] = as_data
    environment.filters["show"] = show
    scripts = [environment.get_template(name).render() for name in SCRIPTS]
    if charts or metrics:  # last, so that the text can be read meanwhile
        scripts += [javascript(), environment.get_template("charts.js").render()]
    scripts.append(environment.get_template("live.js").render())
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    axes = {line: axis for line, axis in (axes or {}).items() if axis}
    return environment.get_template(template).render(
        scripts=list(map(Markup, scripts)),
        digests=digests,
        written=round(1000 * time.time()) if live else None,
        charts=charts,
        drawings=[asdict(chart) for chart in charts],
        drawing={"axes": axes, "metrics": metrics or {}, "plain": lines_over_steps(("value",))},
        axis_names=[name for name in AXES if axes and all(name in axis for axis in axes.values())],
        **content,
    )
