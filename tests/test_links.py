"""Every link of the documentation leads somewhere, and every command in it composes."""

import ast
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from grpo.config.schema import ROOT

FOLDERS = (".", "docs", "examples", "examples/*", "tests")
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/*.md"))
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
COMPOSED = ("grpo.train", "grpo.plan", "grpo.preflight")
"""Commands that share the command line of `grpo.train`."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    texts = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower().strip() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


def links(page: Path) -> list[str]:
    """The targets of all links and pictures of a page."""
    text = CODE.sub("", page.read_text())
    defined = dict(re.findall(r"^\[([^]]+)\]: (\S+)$", text, re.MULTILINE))
    used = re.findall(r"\]\[([^]]+)\]", text)
    assert sorted(defined) == sorted(set(used)), f"{name(page)}: links that are defined, and used"
    return [*re.findall(r"\]\(([^)\s]+)\)", text), *defined.values()]


def commands(page: Path) -> list[str]:
    """The lines of a page that begin with `python -m`, in blocks of code."""
    blocks = CODE.findall(page.read_text())
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in (line.removeprefix("$ ") for line in lines) if re.match(r"(\w+=\S+ )*python -m ", line)]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_of_a_page_resolves(page: Path) -> None:
    for link in links(page):
        if link.startswith("https://"):
            continue
        assert ":" not in link, link
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_code_and_configurations_name_pages_that_exist() -> None:
    files = [file for kind in ("py", "yaml", "sh") for folder in ("grpo", "rewards", "conf", "benchmarks", "launch")
             for file in (ROOT / folder).rglob(f"*.{kind}")]  # fmt: skip
    named = {page for file in files for page in re.findall(r"docs/\w+\.(?:md|png)", file.read_text())}
    assert named
    assert [page for page in sorted(named) if not (ROOT / page).is_file()] == []


def messages_of_the_source() -> str:
    """The texts of the source, a line each, with `…` where a value is put in."""
    texts = [file.read_text() for folder in ("conf", "launch") for file in (ROOT / folder).rglob("*.[ys]*")]
    nodes = (node for folder in ("grpo", "rewards") for file in (ROOT / folder).rglob("*.py")
             for node in ast.walk(ast.parse(file.read_text())))  # fmt: skip
    for node in nodes:
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
        texts.append(" ".join(text.split()))
    return "\n".join(texts)


def test_each_message_in_troubleshooting_is_one_of_the_source() -> None:
    rows = re.findall(r"^\| (.*?) \| ", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [message for cell in rows for message in re.findall(r"`([^`]+)`", cell)]
    source = messages_of_the_source()
    parts = {part.strip(" :,;=.()") for message in quoted for part in message.split("…")}
    assert len(parts) > 100
    assert [part for part in sorted(parts) if part not in source] == []


def test_the_index_names_every_page_and_every_example() -> None:
    docs, examples = set(links(ROOT / "docs" / "README.md")), set(links(ROOT / "examples" / "README.md"))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= docs
    assert {f"{page.parent.name}/README.md" for page in (ROOT / "examples").glob("*/README.md")} <= examples


def test_the_readme_is_short_and_names_the_make_targets() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 160
    for target in ("demo", "test", "vllm", "extras"):
        assert f"make {target}" in text


def one_job(words: list[str]) -> list[str]:
    """The overrides of the first job, where they are those of a sweep; without Hydra's own."""
    parsed = OverridesParser.create().parse_overrides([word for word in words if "=" in word])
    kept = [one for one in parsed if not one.key_or_group.startswith("hydra") and not one.is_interval_sweep()]
    swept = {one.key_or_group: one for one in kept if one.is_sweep_override()}
    firsts = [f"{one.get_key_element()}={next(one.sweep_string_iterator())}" for one in swept.values()]
    return [*(str(one.input_line) for one in kept if one.key_or_group not in swept), *firsts]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name)
@pytest.mark.usefixtures("an_l4")
def test_every_command_of_a_page_composes(page: Path, composed: Callable[..., DictConfig]) -> None:
    for line in commands(page):
        words = shlex.split(line, comments=True)
        module, *overrides = words[words.index("-m") + 1 :]
        if module not in COMPOSED or {"--config-dir", "…", "+experiment=my_project"} & {*overrides}:
            continue  # other options; groups in a folder of the reader; part of a command
        try:
            composed(*one_job(overrides))
        except HydraException as error:
            pytest.fail(f"{line}: {error}")
