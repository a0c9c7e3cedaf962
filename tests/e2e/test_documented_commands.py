"""Every command of README and docs that needs no hub and no other machine runs, in a copy, in the order of a page."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.config.schema import ROOT
from tests.test_links import CODE

pytestmark = [pytest.mark.slow, pytest.mark.long]

GUIDE = ("first_run", "project", "run", "report", "tasks", "rewards", "fit", "preflight", "scaling")
REFERENCE = ("evaluation", "sweeps", "mixtures", "dynamic_sampling", "tools", "replay", "guard", "streaming", "recipes",
             "more_rewards")  # fmt: skip
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in (*GUIDE, *REFERENCE))]
ELSEWHERE = re.compile(
    r"^(make|pip|ssh|sbatch|sky|source|launch/|HF_TOKEN|NODES|docker|git|PATH)|push|gguf|node0|--watch|Qwen/|Skywork|judge|reasoning_gym"
    r"|hydra/(launcher|sweeper)=|train=async"
)
"""Commands that install, never end, or need the hub, a server, other machines or an extra."""
SHORT = {
    "grpo.train": "train.max_steps=2",
    "grpo.preflight": "preflight.problems=8",
    "grpo.evaluate": "task.eval.size=8",
}
"""Overrides that keep a command short."""
STATUS = dict.fromkeys(("my_rewards.py:brevity limit", "my_rewards.py:contains", "14b peft=none", "{find: [boxed]}"), 1)
"""Commands that report an issue, as their page says."""


def commands(page: Path) -> list[str]:
    """Return the commands in the blocks of a page for a shell, in their order."""
    blocks = [block for block in CODE.findall(page.read_text()) if re.match(r"```(bash|console)", block)]
    lines = []
    for block in blocks:
        body = block.replace("\\\n", " ").splitlines()[1:-1]
        shown = [line[2:] for line in body if line.startswith("$ ")] if block.startswith("```console") else body
        lines += [line for line in shown if line.strip() and not line.startswith("#")]
    return lines


def shortened(line: str) -> str:
    """Return a command for few steps or problems; with the profile of a GPU, which may not be here, as a plan."""
    module = next((module for module in SHORT if f" -m {module} " in f"{line} "), None)
    if module is None or "--cfg" in line:
        return re.sub(r"\bstep=\d+", "step=2", line)
    words = shlex.split(line, comments=True)
    if any(word.startswith(("+gpu=", "shard=")) for word in words):
        words[words.index(module)] = "grpo.plan"
    else:
        key = SHORT[module].partition("=")[0]
        words = [*(word for word in words if not word.startswith(f"{key}=")), SHORT[module]]
    return shlex.join(words)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder like a clone, in which a run has been made: `latest`."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("docs", "examples", "conf", "grpo/builtin", "tests/unit/extras/doctor/stored"):
        shutil.copytree(ROOT / name, folder / name)
    shell(f"python -m grpo.train train.max_steps=2 replay.keep=2 hydra.run.dir={folder}/outputs/first", folder)
    return folder


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with this Python, on one core, without the hub."""
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run_in_order(page: Path, copy: Path) -> None:
    folder, ran = copy, 0
    for line in commands(page):
        if re.match(r"cd \S+$", line):
            folder = folder / line.removeprefix("cd ")
            continue
        if ELSEWHERE.search(line.partition("  #")[0]):
            continue
        done = shell(shortened(line), folder)
        expected = next((status for part, status in STATUS.items() if part in line), 0)
        assert done.returncode == expected, f"{line}\n{shortened(line)}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        ran += 1
    assert ran


def test_the_pages_of_the_guide_lead_to_each_other() -> None:
    following = [re.findall(r"^Next: \[.*?\]\((\w+)\.md\)", (ROOT / "docs" / f"{name}.md").read_text(), re.MULTILINE)
                 for name in GUIDE]  # fmt: skip
    assert following == [[name] for name in GUIDE[1:]] + [[]]
    for number, name in enumerate(GUIDE, 1):
        assert (ROOT / "docs" / f"{name}.md").read_text().startswith(f"# {number}. ")
