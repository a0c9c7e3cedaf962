"""The command line of llama.cpp's converter, with a script in its place that has its options."""

import sys
from pathlib import Path

import pytest

from grpo.extras.publishing.gguf import convert, converter
from grpo.utils.errors import ConfigError, RunError

SCRIPT = """
import argparse, json, pathlib, sys

parser = argparse.ArgumentParser()
parser.add_argument("--outfile", type=pathlib.Path)
parser.add_argument("--outtype", choices=["f32", "f16", "bf16", "q8_0", "auto"])
parser.add_argument("--model-name")
parser.add_argument("model")
args = parser.parse_args()
if not (pathlib.Path(args.model) / "tokenizer.json").is_file():
    args.outfile.write_text("half")
    sys.exit("no tokenizer\\x1b[2J")
args.outfile.write_text(f"{args.outtype} {args.model_name}")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script in a folder that is alone on PATH."""
    file = tmp_path / "llama.cpp" / "convert_hf_to_gguf.py"
    file.parent.mkdir()
    file.write_text(SCRIPT)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(file.parent))
    return file


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as the export writes it, as far as the script looks."""
    folder = tmp_path / "-x; rm"
    folder.mkdir()
    (folder / "config.json").write_text('{"dtype": "bfloat16"}')
    (folder / "tokenizer.json").touch()
    return folder


def test_the_script_is_run_by_this_python(script: Path) -> None:
    assert converter() == [sys.executable, str(script)]


def test_the_file_has_the_type_of_the_weights(script: Path, model: Path) -> None:
    file = convert(converter(), model, "--help")
    assert file == model / "--help.gguf"
    assert file.read_text() == "bf16 --help"


def test_a_failing_converter_leaves_a_line_and_no_file(script: Path, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(RunError, match=r"status 1 and said 'no tokenizer\\x1b\[2J'; the export without it"):
        convert(converter(), model, "tiny")
    assert not list(model.glob("*gguf*"))


def test_without_a_converter_a_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"not on PATH; `git clone"):
        converter()
