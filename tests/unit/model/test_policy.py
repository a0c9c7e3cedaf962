"""Models are loaded without code of their own."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from grpo.config.schema import ROOT
from grpo.model import policy
from grpo.utils.errors import ConfigError

MODEL = ROOT / "grpo" / "builtin" / "tiny"
LOADS: dict[str, Callable[[DictConfig], Any]] = {
    "policy": lambda model: policy.load(model.model_name_or_path, model),
    "engine's policy": policy.without_weights,
    "tokenizer": policy.load_processing_class,
    "adapter's targets": lambda model: policy.architecture_of(model.model_name_or_path, "main"),
}


@pytest.mark.parametrize("load", LOADS)
def test_code_of_a_model_folder_neither_runs_nor_is_asked_for(
    load: str, composed: Callable[..., DictConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, executed = tmp_path / "theirs", tmp_path / "executed"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (folder / "code.py").write_text(f"from pathlib import Path\nPath({str(executed)!r}).touch()\nClass = object\n")
    classes = {"AutoConfig": "code.Class", "AutoModelForCausalLM": "code.Class", "AutoTokenizer": ["code.Class", None]}
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        content |= {"auto_map": classes, "model_type": "theirs", "tokenizer_class": "Theirs"}
        (folder / name).write_text(json.dumps(content))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(ConfigError, match=r"never runs here|Unrecognized processing class") as caught:
        LOADS[load](composed(f"model.model_name_or_path={folder}").model)
    assert "\n" not in str(caught.value)
    assert not executed.exists()


def test_configurations_are_read_where_code_is_refused() -> None:
    """transformers' own error is no line for a user."""
    files = [file for file in (ROOT / "grpo").rglob("*.py") if file.parent.name != "testing"]
    reading = [file.name for file in files if "AutoConfig.from_pretrained(" in file.read_text()]
    assert reading == ["adapted.py"]
