"""Outputs of the commands that README and docs show: `python -m benchmarks.shown` runs each and writes shown.json.

Takes two minutes on two CPU cores; a test compares the pages with the file.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.progress import track

from grpo.config.schema import ROOT

RESULT = ROOT / "benchmarks" / "shown.json"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^```console\n\$ (python -m .*)\n([^`]*)^```", re.MULTILINE)
ENVIRONMENT = {"COLUMNS": "120", "HF_HUB_OFFLINE": "1"}


def blocks(page: Path) -> list[tuple[str, list[str]]]:
    """Return the commands that a page shows with their output, and the lines of each output."""
    return [(match[1], match[2].splitlines()) for match in BLOCK.finditer(page.read_text(encoding="utf-8"))]


def main() -> None:
    """Run every command that is shown, and write what it prints."""
    commands = sorted({command for page in PAGES for command, _ in blocks(page)})
    outputs = {}
    for command in track(commands):
        words = [sys.executable, *shlex.split(command)[1:]]
        done = subprocess.run(words, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
        if done.returncode not in (0, 1):  # 1: does not fit, an issue was found
            sys.exit(f"{command}: {done.stderr}")
        outputs[command] = [line.rstrip() for line in done.stdout.replace(f"{ROOT}/", "").splitlines()]
    RESULT.write_text(json.dumps(outputs, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
