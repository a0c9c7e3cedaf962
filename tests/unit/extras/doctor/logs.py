"""Logs of a run in the forms of several trainers and trackers, for the tests."""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pandas
from torch.utils.tensorboard import SummaryWriter

Row = dict[str, Any]
OF_VERL = {
    "critic/rewards/mean": "reward",
    "actor/entropy": "entropy",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    "actor/pg_loss": "loss",
    "response_length/mean": "completions/mean_length",
    "response_length/max": "completions/max_length",
    "response_length/clip_ratio": "completions/clipped_ratio",
}


def learning(steps: int = 40, **changes: Any) -> list[Row]:
    """The metrics of a healthy run in TRL's names; a change is a value, or a function of the step from 0."""
    rng = Random(0)
    rows = []
    for place in range(steps):
        mean = 0.3 + 0.5 * place / steps + rng.gauss(0, 0.03)
        row: Row = {"loss": rng.gauss(0, 1e-8), "grad_norm": rng.uniform(0.2, 0.4), "learning_rate": 1e-5}
        row |= {"reward": mean, "reward_std": (mean * (1 - mean)) ** 0.5, "frac_reward_zero_std": 0.2}
        row |= {"rewards/correct/mean": mean, "rewards/correct/std": (mean * (1 - mean)) ** 0.5, "entropy": 0.5}
        row |= {"completions/mean_length": 20.0, "completions/max_length": 50.0, "completions/clipped_ratio": 0.0}
        row |= {name: change(place) if callable(change) else change for name, change in changes.items()}
        rows.append({"step": place + 1, **{name: value for name, value in row.items() if value != "unlogged"}})
    return rows


def table(step: int, groups: int = 8, size: int = 4, **columns: Callable[[int, int], Any]) -> pandas.DataFrame:
    """A table of TRL's completions; a column is a function of the group and the place in it."""
    places = [(group, place) for group in range(groups) for place in range(size)]
    cells = {
        "step": lambda group, place: step,
        "prompt": lambda group, place: f"problem {step} {group}",
        "completion": lambda group, place: "x" * (5 + (7 * place + group) % 5),
        "correct": lambda group, place: float((place + group) % 2),
        "advantage": lambda group, place: 1.0 if place % 2 else -1.0,
    } | columns
    return pandas.DataFrame({name: [cell(*at) for at in places] for name, cell in cells.items()})


def write_tables(folder: Path, steps: int = 5, **columns: Callable[[int, int], Any]) -> Path:
    """Write tables of completions as TRL does; return the folder of the run."""
    (folder / "completions").mkdir(parents=True, exist_ok=True)
    for step in range(1, steps + 1):
        table(step, **columns).to_parquet(folder / "completions" / f"completions_{step:05d}.parquet")
    return folder


def trl(folder: Path, rows: Sequence[Row]) -> Path:
    """`trainer_state.json` of transformers' trainer."""
    history = [*rows, {"step": rows[-1]["step"], "train_runtime": 1.0, "train_loss": 0.0}] if rows else []
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": len(rows), "log_history": history}))
    return folder


def swift(folder: Path, rows: Sequence[Row]) -> Path:
    """`logging.jsonl` of ms-swift, with the state that it appends at the end."""
    renamed = [{"entropy/mean" if name == "entropy" else name: v for name, v in row.items()} for row in rows]
    lines = [
        {**row, "step": None, "epoch": 0.1, "global_step/max_steps": f"{row['step']}/{len(rows)}", "elapsed_time": "1s"}
        for row in renamed
    ]
    end = {"last_model_checkpoint": None, "global_step": len(rows), "log_history": list(rows)}
    (folder / "logging.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, end]))
    return folder


def verl_line(row: Row, form: str = "{!r}") -> str:
    """A line of verl's console as Ray prints it, in colour."""
    values = [f"{name}:{form.format(row[other])}" for name, other in OF_VERL.items() if other in row]
    line = " - ".join([f"step:{row['step']}", "global_seqlen/min:" + form.format(1.0), *values])
    return f"\x1b[36m(TaskRunner pid=87)\x1b[0m {line}"


def verl(folder: Path, rows: Sequence[Row]) -> Path:
    """A log of verl's console, with a validation before the first step."""
    lines = ["Creating ...", "(TaskRunner pid=87) step:0 - val-core/openai/gsm8k/acc/mean@1:0.5", *map(verl_line, rows)]
    lines = [f"{line} - training/num_turns/mean:np.float64(2.0)" if "actor" in line else line for line in lines]
    (folder / "train.log").write_text("\n".join(lines) + "\n")
    return folder


def verl_lines(folder: Path, rows: Sequence[Row]) -> Path:
    """JSON lines of verl's file logger."""
    lines = [{"step": row["step"], "data": {name: row.get(other) for name, other in OF_VERL.items()}} for row in rows]
    (folder / "experiment.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def console(folder: Path, rows: Sequence[Row]) -> Path:
    """The output of TRL on a terminal, between progress bars."""
    values = [{name: f"{value:.4g}" for name, value in row.items() if name != "step"} for row in rows]
    (folder / "out.txt").write_text("".join(f" 10%|#   | 1/9 [00:01<00:09]{line}\n" for line in values))
    return folder


def tensorboard(folder: Path, rows: Sequence[Row]) -> Path:
    """Events of TensorBoard as transformers writes them."""
    with SummaryWriter(str(folder / "runs" / "Nov30_host")) as writer:
        for row in rows:
            for name, value in row.items():
                if name != "step":
                    writer.add_scalar(f"train/{name}", value, row["step"])
    return folder


def chart(folder: Path, rows: Sequence[Row], run: str = "a - b-1") -> Path:
    """CSV exports of W&B's charts, a file per metric."""
    for number, name in enumerate(name for name in rows[0] if name != "step"):
        with (folder / f"wandb_export_{number}.csv").open("w") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL)
            column = f"{run} - train/{name}"
            writer.writerow(["Step", column, f"{column}__MIN", f"{column}__MAX"])
            writer.writerows([row["step"], row[name], row[name], row[name]] for row in rows)
    return folder


def wandb(folder: Path, rows: Sequence[Row]) -> Path:
    """The history of a run as W&B's files have it."""
    lines = [
        {"_step": row["step"] + 7, "_timestamp": 1.0, "train/global_step": row["step"]}
        | {f"train/{name}": value for name, value in row.items() if name != "step"}
        for row in rows
    ]
    (folder / "wandb-history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


FORMATS = (trl, swift, verl, verl_lines, console, tensorboard, chart, wandb)
