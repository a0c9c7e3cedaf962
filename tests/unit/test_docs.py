"""Tables of the docs that say what the code does."""

import ast
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig

from grpo import losses
from grpo.config.schema import ROOT
from grpo.options import LOSS_MEANS
from grpo.planning import machine
from grpo.planning.advice import advise
from grpo.planning.fit import make_plan
from tests import architecture
from tests.gpu_profiles import NAMES

TESTS = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text()


def test_files_and_imports_on_the_map_are_those_of_the_source() -> None:
    assert architecture.page() == TEXT, "python -m tests.architecture"


def test_the_table_of_losses_says_how_the_trainer_weighs_each() -> None:
    means = {
        "completions per slice": "sequences",
        "tokens per slice": "tokens",
        "tokens of the generation": "generation",
    }
    found = {}
    for line in (ROOT / "docs" / "exact_update.md").read_text().splitlines():
        names, mean, *_ = [*line.strip("| ").split(" | "), ""]
        for words, value in means.items():
            if line.startswith("| `") and mean.startswith(words):
                found |= dict.fromkeys(re.findall(r"`(\w+)`", names), value)
    assert found == LOSS_MEANS | {name: losses.find(name).MEAN for name in losses.NAMES}


def test_the_table_of_gpu_profiles_is_planned(
    composed: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "free_gpu_memory", lambda processes: None)
    found = set()
    for line in (ROOT / "docs" / "fit.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 6 or not (profiles := re.findall(r"`(\w+)`", cells[2])):
            continue
        for profile in profiles:
            plan = make_plan(composed(f"+gpu={profile}"))
            headroom = f"{1 - plan.peak_gb / plan.capacity_gb:.0%}".replace("%", " %")
            assert cells[4:] == [f"{plan.peak_gb:.1f}", headroom], profile
        found |= set(profiles)
    assert found == {*NAMES}


def test_the_shown_plan_that_does_not_fit_is_planned(
    composed: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "free_gpu_memory", lambda processes: None)
    line = ("+gpu=h100", "model=qwen2_5_14b", "peft=none")
    config = composed(*line)
    plan = make_plan(config)
    suggestions = {" ".join(one["overrides"]): one["peak_gb"] for one in advise(line, config, plan)}
    for page in ("README.md", "docs/fit.md"):
        shown = (ROOT / page).read_text().split(f"$ python -m grpo.plan {' '.join(line)}\n")[1].split("```")[0]
        assert f"does not fit: {plan.problem}\n" in shown, page
        found = dict(re.findall(r"^  (\S.*)\n      ([\d.]+) GiB; ", shown, re.MULTILINE))
        assert found == {change: f"{suggestions[change]:.1f}" for change in found}, page
        assert found


def test_version_and_date_agree_in_all_files_of_a_release() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## \[(\d[\w.]*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest.groups() == (version, str(citation["date-released"]))
    assert citation["version"] == version


def test_search_words_are_those_of_the_citation() -> None:
    keywords = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["keywords"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["keywords"] == keywords
    assert {"GRPO", "padding-free", "packing", "long context"} <= set(keywords)


def test_names_of_tests_have_at_most_60_characters() -> None:
    trees = [ast.parse(file.read_text()) for file in TESTS.rglob("test_*.py")]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert [name for name in names if name.startswith("test_") and len(name) > 60] == []


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    for package in ("grpo", "rewards"):
        for file in (ROOT / package).rglob("*.py"):
            for literal in re.findall(r'^ *"""(.*)', file.read_text(), re.MULTILINE):
                assert not re.match(r"(What|That|Of|Whether it)\b", literal), (file, literal)
                assert not re.search(r"\b(of what|one of which)\b", literal), (file, literal)


def test_folders_of_unit_tests_are_packages() -> None:
    folders = {path.parent.relative_to(TESTS / "unit") for path in (TESTS / "unit").rglob("test_*.py")}
    for folder in folders:
        assert (ROOT / "grpo" / folder).is_dir() or (ROOT / folder).is_dir(), folder


def test_the_docs_name_tests_that_exist() -> None:
    docs = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "tests").glob("*.md")]
    named = {name for file in docs for name in re.findall(r"tests/[\w/]+\.py", file.read_text())}
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
