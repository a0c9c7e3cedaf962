"""The table of what is replaced in libraries."""

import ast
import sys
from importlib.util import find_spec
from pkgutil import resolve_name

import pytest

from grpo.config.schema import ROOT
from grpo.utils.patching import PATCHES, patched


@pytest.mark.parametrize("name", PATCHES)
def test_what_is_replaced_is_there_and_comes_back(name: str) -> None:
    if "vllm" in name and find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    if name.endswith("_check_help") and sys.version_info < (3, 14):
        pytest.skip("needs Python 3.14")
    before = resolve_name(name)
    with patched(name, None):
        assert resolve_name(name) is None
    assert resolve_name(name) == before


def test_each_patch_is_applied_and_no_other() -> None:
    trees = [ast.parse(file.read_text()) for file in (ROOT / "grpo").rglob("*.py")]
    texts = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    applied = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert set(PATCHES) <= texts
    assert all(applied.count(name) == 2 for name in PATCHES), "in the table, and where it is applied"
