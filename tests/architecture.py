"""The generated parts of docs/architecture.md: `python -m tests.architecture` writes them.

The files come from the first sentences of their docstrings, the tables of imports from the contracts in pyproject.toml.
"""

import ast
import re
import tomllib
from pathlib import Path

from grpo.config.schema import ROOT

PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- python -m tests.architecture writes this part -->\n", "<!-- end of this part -->\n"


def page() -> str:
    """Return docs/architecture.md with its generated parts written anew."""
    first, *others = PAGE.read_text().split(BEGIN)
    rests = [part.partition(END)[2] for part in others]
    parts = zip((files(), tables()), rests, strict=True)
    return first + "".join(f"{BEGIN}\n{generated}\n{END}{rest}" for generated, rest in parts)


def files() -> str:
    """Return a heading for each package and a bullet for each of its files, in Markdown."""
    lines = []
    for root in (ROOT / "grpo", ROOT / "rewards"):
        for folder in (root, *sorted(path for path in root.rglob("*") if path.is_dir())):
            modules = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
            if modules:
                lines += ["", f"### `{folder.relative_to(ROOT)}/`", ""]
                lines += [f"- `{path.name}`: {first_sentence(path)}" for path in modules]
    return "\n".join(lines[1:]) + "\n"


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, on one line."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    return re.split(r"(?<=[.:])\s+(?=[A-Z`])", " ".join(paragraph.split()))[0].rstrip(".:")


def tables() -> str:
    """Return the tables of imports in Markdown."""
    layers, *others = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    lines = ["| floor | packages and modules of `grpo` |", "|---|---|"]
    for below, names in enumerate(reversed(layers["layers"])):
        lines.insert(2, f"| {below} | {code(names.split(' | '))} |")
    lines += ["", "| package | never imports |", "|---|---|"]
    for contract in (other for other in others if other["type"] == "forbidden"):
        lines.append(f"| {code(contract['source_modules'])} | {code(contract['forbidden_modules'])} |")
    return "\n".join(lines) + "\n"


def code(names: list[str]) -> str:
    return ", ".join(f"`{name.removeprefix('grpo.')}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page())
