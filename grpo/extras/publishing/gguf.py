"""GGUF files, by llama.cpp's own converter."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from grpo.utils.atomic import atomic
from grpo.utils.errors import ConfigError, RunError

CONVERTERS = ("convert_hf_to_gguf.py", "llama-convert-hf-to-gguf", "convert-hf-to-gguf")
"""Names of the converter on PATH: of llama.cpp's folder, of its Python project, of the package of that name."""
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""The converter's names of data types."""


def converter() -> list[str]:
    """Return the command of llama.cpp's converter; a script is run by this Python, which has PyTorch.

    Raises:
        ConfigError: there is none on PATH.
    """
    for name in CONVERTERS:
        if command := shutil.which(name):
            return [sys.executable, command] if command.endswith(".py") else [command]
    raise ConfigError(
        "--gguf: llama.cpp's converter is not on PATH; `git clone https://github.com/ggml-org/llama.cpp`, then "
        'PATH="$PATH:$PWD/llama.cpp"'
    )


def convert(command: list[str], folder: Path, name: str) -> Path:
    """Write the model of a folder as `NAME.gguf` into the folder, in the same data type, and return the file.

    Raises:
        RunError: the converter failed, as it does for an architecture or tokenizer that llama.cpp does not know.
    """
    dtype = json.loads((folder / "config.json").read_text())["dtype"]
    file = folder / f"{name}.gguf"
    with atomic(file) as partial:
        options = [f"--outfile={partial}", f"--outtype={TYPES[dtype]}", f"--model-name={name}"]
        line = [*command, *options, str(folder)]
        done = subprocess.run(line, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode or not partial.is_file():
            lines = done.stderr.split("\n")
            said = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
            raise RunError(
                f"--gguf: llama.cpp's converter ended with status {done.returncode} and said {said!r}; "
                f"the export without it is in {folder}"
            )
    return file
