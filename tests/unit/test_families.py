"""What docs/models.md says of architectures, with the installed libraries."""

import json
import os
import random
from dataclasses import asdict
from typing import Any

import pytest
from transformers import AutoConfig

from benchmarks.families import FAMILIES, FILE, Family, examine, examined, policy_of
from benchmarks.families_page import COLUMNS, PAGE, YES, no_cell, page
from benchmarks.tiny_policies import tiny_config
from grpo.config.schema import ROOT

RECORD = json.loads(FILE.read_text())
BY_TYPE = {family["model_type"]: family for family in RECORD["families"]}
INSTALLED = sorted(BY_TYPE.keys() & {*FAMILIES})
DRAWN = random.Random(os.environ.get("DRAWN_BY", "1")).sample(INSTALLED, 4)


def answers(family: dict[str, Any]) -> dict[str, bool]:
    """Which answers are reasons; not of vLLM, which need not be installed."""
    return {name: no_cell(name, family[name]) for name in COLUMNS if name != "vllm"}


def lacks_a_library(family: Family) -> bool:
    """Whether this environment has no library that the page's had, such as scipy beside vLLM."""
    return family.trained.startswith(("no tiny policy: ImportError", "no tiny policy: ModuleNotFoundError"))


@pytest.mark.parametrize("family", DRAWN)
def test_a_family_is_as_the_page_says(family: str) -> None:
    found = examine(family)
    if lacks_a_library(found):
        pytest.skip(found.trained)
    assert answers(asdict(found)) == answers(BY_TYPE[family])


@pytest.mark.long
@pytest.mark.slow
def test_all_families_are_as_the_page_says() -> None:
    # two workers beside another test would leave a process that gives way, such as a page's, without time
    families = [family for family in examined(INSTALLED, workers=1) if not lacks_a_library(family)]
    assert len(families) > 200
    found = {family.model_type: answers(asdict(family)) for family in families}
    assert found == {family: answers(BY_TYPE[family]) for family in found}


def test_the_pages_say_what_the_record_says() -> None:
    assert PAGE.read_text() == page(RECORD)
    trained, by_trl = (sum(family[name] == YES for family in BY_TYPE.values()) for name in ("trained", "trl"))
    claim = f"| architectures | [{trained} of the {len(BY_TYPE)}](models.md) of transformers that complete text"
    comparison = (ROOT / "docs" / "comparison.md").read_text()
    (row,) = (row for row in comparison.splitlines() if row.startswith(claim))
    assert f"| {by_trl}, in the same test |" in row


def test_what_cannot_be_trained_has_one_line_with_the_reason() -> None:
    refused = asdict(examine("blip"))
    assert refused["trained"].startswith("ValueError: TRL cannot compute log-probabilities of Blip")
    assert len(refused["trained"].splitlines()) == 1
    assert asdict(examine("musicgen"))["trained"] != YES


def test_a_tiny_policy_has_all_kinds_of_layers() -> None:
    kinds = {*AutoConfig.for_model("gemma3_text").layer_types}
    assert {*tiny_config("gemma3_text").layer_types} == kinds
    assert sum(weight.numel() for weight in policy_of("gemma3_text").parameters()) < 100_000
