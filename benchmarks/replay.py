"""Corruptions planted in copies of a run, and whether `grpo.replay` names the stage of each.

`python -m benchmarks.replay` (ten minutes on two cores) trains the built-in task for six steps with a reward of its
own, a KL penalty and a decaying learning rate, plants each corruption in a copy of the run directory, computes step 6
of the copy again, and compares the first difference with the stage that the corruption belongs to. It prints a table
and writes `benchmarks/replay.json` and the table of docs/replay.md.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file, save_file

from benchmarks.pages import ROOT, write_part
from grpo.extras.replay.compare import STAGES
from grpo.extras.replay.recorder import FOLDER
from grpo.rundir.files import RESOLVED_CONFIG
from grpo.rundir.versions import versions
from grpo.utils.manifest import seal

RESULT, PAGE = ROOT / "benchmarks" / "replay.json", ROOT / "docs" / "replay.md"
STEP = 6
REWARD = (
    "def short(completions, longest=32, **columns):\n    return [float(len(text) <= longest) for text in completions]\n"
)
OPTIONS = (
    *("train.max_steps=8", "train.save_steps=4", "replay.keep=4", "train.beta=0.02", "train.report_to=none"),
    *("train.per_device_train_batch_size=32", "train.num_generations=8", "train.lr_scheduler_type=linear"),
    *("task.eval.size=4", "+reward.short.weight=0.2", "train.temperature=1.1", "train.max_grad_norm=0.1"),
)
PATCH = {
    "silu": "torch.nn.functional.silu = lambda x, inplace=False, f=torch.nn.functional.silu: f(x.bfloat16()).float()",
    "adam": "import torch.optim.adam as a; f = a.adam\na.adam = lambda *x, **k: f(*x, **k | {'eps': 1e-7})",
}
"""Code that rounds or computes otherwise than the libraries, run before the training."""
Plant = Callable[[Path], None]


class Corruption(NamedTuple):
    """A corruption of a copy of a run."""

    name: str
    stage: str
    """The stage that it belongs to."""
    plant: Plant
    environment: dict[str, str] = {}  # noqa: RUF012 (never changed)
    """Variables of the replay."""


def in_file(kind: str, step: int, change: Callable[[dict[str, Any]], None]) -> Plant:
    """Return what changes a record of a run."""

    def plant(run: Path) -> None:
        file = run / FOLDER / f"{kind}_{step:05d}.pt"
        record = torch.load(file, weights_only=True)
        change(record)
        torch.save(record, file)

    return plant


def in_config(change: Callable[[dict[str, Any]], None]) -> Plant:
    """Return what changes the configuration of a run."""

    def plant(run: Path) -> None:
        config = yaml.safe_load((run / RESOLVED_CONFIG).read_text())
        change(config)
        (run / RESOLVED_CONFIG).write_text(yaml.safe_dump(config))

    return plant


def weight(run: Path) -> None:
    """Change a bit of a weight in the checkpoint."""
    file = run / "checkpoint-4" / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if "layers.2" in name and name.endswith("up_proj.weight"))
    weights[name].view(torch.int32)[3, 5] ^= 1
    save_file(weights, file, {"format": "pt"})
    seal(file.parent)


def moment(run: Path) -> None:
    """Change a moment of the optimizer in the checkpoint."""
    file = run / "checkpoint-4" / "optimizer.pt"
    state = torch.load(file, weights_only=True)
    state["state"][3]["exp_avg"].view(-1)[7] += 1e-6
    torch.save(state, file)
    seal(file.parent)


def scheduler(run: Path) -> None:
    """Have the scheduler continue a step later."""
    file = run / "checkpoint-4" / "scheduler.pt"
    state = torch.load(file, weights_only=True)
    state["last_epoch"] += 1
    torch.save(state, file)
    seal(file.parent)


def reward_file(run: Path) -> None:
    """Change the reward function's file."""
    file = run / "short.py"
    file.write_text(file.read_text().replace("<=", "<"))


def nothing(run: Path) -> None:
    """Change nothing in the directory."""


def add(name: str, row: tuple[int, ...], value: float, field: str = "batch") -> Callable[[dict[str, Any]], None]:
    """Return what adds to a value of a tensor of a record."""

    def change(record: dict[str, Any]) -> None:
        tensor = record[field][name]
        tensor[row] = tensor[row] + value

    return change


def reward(record: dict[str, Any]) -> None:
    """Change a reward."""
    record["rewards"][5][0] = 1.0 - record["rewards"][5][0]


def token(record: dict[str, Any]) -> None:
    """Change a token of a stored completion."""
    record["completions"][9]["ids"][0] += 1


def fingerprint(kind: str) -> Callable[[dict[str, Any]], None]:
    """Return what changes the fingerprint of the third tensor of a record."""

    def change(record: dict[str, Any]) -> None:
        name = list(record[kind])[2]
        bits, norm, sketch = record[kind][name]
        record[kind][name] = (bits + 2, norm, sketch + 0.01 * norm)

    return change


def setting(group: str, key: str, value: Any) -> Plant:
    """Return what changes an option of the configuration."""
    return in_config(lambda config: config[group].__setitem__(key, value))


CORRUPTIONS = (
    Corruption("a reward", "rewards", in_file("rollouts", 5, reward)),
    Corruption("an advantage", "advantages", in_file("rollouts", 6, add("advantages", (3,), 1e-3))),
    Corruption(
        "a bit of a completion's mask", "completions", in_file("rollouts", 6, add("completion_mask", (2, 0), -1))
    ),
    Corruption("a token in the batch", "completions", in_file("rollouts", 5, add("completion_ids", (2, 0), 1))),
    Corruption("a token of a completion", "completions", in_file("rollouts", 6, token)),
    Corruption("the order of problems", "problems", in_file("rollouts", 6, lambda r: r["order"].reverse())),
    Corruption(
        "a log-probability of the reference",
        "old log-probabilities",
        in_file("rollouts", 6, add("ref_per_token_logps", (1, 0), 1e-2)),
    ),
    Corruption(
        "a log-probability of the update",
        "log-probabilities",
        in_file("update", 6, lambda r: next(iter(r["log_probs"].values())).add_(1e-3)),
    ),
    Corruption("the loss", "loss", in_file("update", 6, lambda r: r.update(loss=r["loss"] + 1e-3))),
    Corruption("a gradient", "gradient", in_file("update", 5, fingerprint("gradient"))),
    Corruption("a weight after the step", "weights", in_file("update", 6, fingerprint("weights"))),
    Corruption("the optimizer after the step", "optimizer", in_file("update", 6, fingerprint("optimizer"))),
    Corruption("the last bit of a weight in the checkpoint", "start", weight),
    Corruption("a moment in the checkpoint", "start", moment),
    Corruption("the scheduler in the checkpoint", "learning rate", scheduler),
    Corruption("the seed", "problems", setting("train", "seed", 43)),
    Corruption("the data", "problems", in_config(lambda config: config["task"]["dataset"].update(seed=1))),
    Corruption("train.temperature", "old log-probabilities", setting("train", "temperature", 1.0)),
    Corruption("train.beta", "loss", setting("train", "beta", 0.04)),
    Corruption("train.loss_type", "loss", setting("train", "loss_type", "dr_grpo")),
    Corruption("train.max_grad_norm", "gradient", setting("train", "max_grad_norm", 0.05)),
    Corruption("train.scale_rewards", "advantages", setting("train", "scale_rewards", "none")),
    Corruption(
        "a reward's weight", "advantages", in_config(lambda config: config["reward"]["short"].update(weight=0.5))
    ),
    Corruption("a reward's file", "rewards", reward_file),
    Corruption(
        "a reward's option", "rewards", in_config(lambda c: c["reward"]["short"].update(kwargs={"longest": 20}))
    ),
    Corruption("the rounding of an activation", "old log-probabilities", nothing, {"PATCH": PATCH["silu"]}),
    Corruption("the optimizer's arithmetic", "weights", nothing, {"PATCH": PATCH["adam"]}),
)
HEALTHY = (Corruption("nothing", "", nothing), Corruption("threads", "", nothing, {"OMP_NUM_THREADS": "1"}))
"""Nothing may be named in these; another number of threads rounds otherwise."""


def main() -> None:
    """Plant all corruptions, print a table, and write `replay.json`."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        trained(run)
        for case in track((*HEALTHY, *CORRUPTIONS), "corruptions"):
            rows.append(row_of(case, run, Path(name) / "copy"))
    named = sum(row["stage"] == row["named"] for row in rows if row["stage"])
    content = {
        "date": date.today().isoformat(),
        "versions": versions(),
        "named": named,
        "planted": len(CORRUPTIONS),
        "rows": rows,
    }
    RESULT.write_text(json.dumps(content, indent=2) + "\n")
    write_part(PAGE, "benchmarks.replay", part(content))
    table = Table("planted", "stage", "named by grpo.replay")
    for row in rows:
        table.add_row(row["planted"], row["stage"] or "none", f"{row['named'] or 'none'}: {row['summary']}")
    Console().print(table)
    print(f"{named} of {len(CORRUPTIONS)} corruptions are named with their stage")


def part(content: dict[str, Any]) -> str:
    """Return the table of docs/replay.md."""
    lines = [f"{content['named']} of {content['planted']} corruptions are named with their stage.", ""]
    lines += ["| planted in a copy of a run | stage | named first |", "|---|---|---|"]
    for row in content["rows"]:
        stages = [STAGES.get(row[key], "none") for key in ("stage", "named")]
        lines.append(f"| {row['planted']} | {' | '.join(stages)} |")
    return "\n".join(lines) + "\n"


def trained(run: Path) -> None:
    """Train the run of which copies are corrupted; its reward is a file in it."""
    run.mkdir(parents=True)
    (run / "short.py").write_text(REWARD)
    reward_fn = f"+reward.short.fn={run.with_name('copy')}/short.py:short"
    run.rename(run.with_name("copy"))
    command = [sys.executable, "-m", "grpo.train", *OPTIONS, reward_fn, f"hydra.run.dir={run.with_name('copy')}"]
    subprocess.run(command, check=True, capture_output=True)
    run.with_name("copy").rename(run)


def row_of(case: Corruption, run: Path, copy: Path) -> dict[str, Any]:
    """Plant a corruption in a copy of a run, and return what a replay of the copy says."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    case.plant(copy)
    environment = os.environ | case.environment
    if code := environment.pop("PATCH", None):  # Python runs `sitecustomize` first
        (copy / "sitecustomize.py").write_text(f"import torch\n{code}\n")
        environment["PYTHONPATH"] = str(copy)
    command = [sys.executable, "-m", "grpo.replay", str(copy), f"step={STEP}", "--json"]
    output = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if not output.stdout:
        return {"planted": case.name, "stage": case.stage, "named": "error", "summary": output.stderr.strip()[-300:]}
    result = json.loads(output.stdout)
    beyond = [item for item in result["differences"] if not item["rounding"]]
    named = (
        (beyond or result["differences"] or [{"stage": ""}])[0]["stage"]
        if case.stage
        else beyond and beyond[0]["stage"]
    )
    return {
        "planted": case.name,
        "stage": case.stage,
        "named": named or "",
        "summary": result["summary"].replace(str(copy), "RUN"),
        "explains": [line for line in result["explains"] if not line.startswith("commit")],
    }


if __name__ == "__main__":
    main()
