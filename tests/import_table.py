"""The tables of imports in docs/architecture.md, of the contracts in pyproject.toml: `python -m tests.import_table`."""

import tomllib

from grpo.config.schema import ROOT


def tables() -> str:
    """Return them in Markdown."""
    layers, *forbidden = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    lines = ["| floor | packages and modules of `grpo` |", "|---|---|"]
    for below, names in enumerate(reversed(layers["layers"])):
        lines.insert(2, f"| {below} | {code(names.split(' | '))} |")
    lines += ["", "| package | never imports |", "|---|---|"]
    for contract in forbidden:
        lines.append(f"| {code(contract['source_modules'])} | {code(contract['forbidden_modules'])} |")
    return "\n".join(lines) + "\n"


def code(names: list[str]) -> str:
    return ", ".join(f"`{name.removeprefix('grpo.')}`" for name in names)


if __name__ == "__main__":
    print(tables(), end="")
