"""Run directories for tests of the page, as a run leaves them, with any text in place of a model's."""

import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
from hydra import compose
from omegaconf import OmegaConf
from PIL import Image
from pyarrow import parquet

HOSTILE = [
    "<script>document.title = 'stolen'</script>",
    "</script><script>document.title = 'stolen'</script>",
    "</style><h1>not a heading</h1><style>body{display:none}",
    "<img src=x onerror=\"document.title='stolen'\"><!-- ]]> {{ 7 * 7 }} {% raw %}",
    "x" * 2_000_000,
    "\u202eright to left\u2066 and \u202ano end \u05d0\u05d1",
    "a broken \ud83d surrogate",
    "\x00\x07\x1b[31m\u2028\u2029\ufeff",
]


@functools.cache
def configuration(typed: tuple[str, ...]) -> str:
    """Return a configuration as YAML, while Hydra is initialized."""
    return OmegaConf.to_yaml(compose("config", list(typed)))


def write_run(
    folder: Path, steps: int, groups: int, generations: int, text: str = "", typed: Sequence[str] = ("train.seed=3",)
) -> Path:
    """Write a run directory with so many steps, each of so many groups of completions; return it."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / "completions").mkdir()
    (folder / ".hydra" / "config.yaml").write_text(configuration(tuple(typed)))
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps([*typed, "hydra.run.dir=x"]))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            accuracy = 1 - 0.7 * 0.99**step
            values = {"reward": accuracy, "rewards/correctness/mean": accuracy, "rewards/correctness/std": 0.4}
            values |= {"reward_std": 0.4, "frac_reward_zero_std": 0.2, "entropy": 0.5, "grad_norm": 0.3}
            values |= {"completions/mean_length": 20.0, "completions/min_length": 5.0, "completions/max_length": 50.0}
            values |= {"completions/clipped_ratio": 0.01, "update/rows_skipped": 3.0}
            values = {name: value * (1 + 0.01 * (step % 2)) for name, value in values.items()}
            values |= {"reward": accuracy, "rewards/correctness/mean": accuracy, "learning_rate": 3e-4}
            values |= {
                f"time/{phase}": 0.1 + 0.01 * (step % 2) for phase in ("generate", "reward", "logprobs", "update")
            }
            values |= {"memory/generate_gb": 0.8 + 0.01 * (step % 2), "memory/update_gb": 0.7, "memory/host_gb": 0.9}
            file.write(json.dumps({"step": step, **values, "num_tokens": 100.0 * step, "step_time": 0.4}) + "\n")
            rows = groups * generations
            table: dict[str, list[Any]] = {
                "step": [step] * rows,
                "prompt": [f"question {row // generations} {text}" for row in range(rows)],
                "completion": [f"{text} answer {row}" for row in range(rows)],
                "answer": [str(row // generations) for row in range(rows)],
                "correctness": [float(row % 2) for row in range(rows)],
                "advantage": [0.5] * rows,
            }
            columns = {
                name: texts(cells) if name in ("prompt", "completion") else cells for name, cells in table.items()
            }
            parquet.write_table(pyarrow.table(columns), folder / "completions" / f"completions_{step:05d}.parquet")
    part = {"samples": 200, "decoding": {}}
    before = {"accuracy": 0.11, "interval": [0.07, 0.16], **part}
    after = {"accuracy": 0.95, "interval": [0.91, 0.97], **part}
    (folder / "evaluation.json").write_text(json.dumps({"before": before, "after": after}))
    (folder / "plan.json").write_text(
        json.dumps({"device": "a machine", "capacity_gb": 22.0, "host_capacity_gb": 24.0})
    )
    summary: dict[str, Any] = {"status": "completed", "reason": None, "steps": steps, "wall_time_s": 60.0}
    summary |= {"memory/host_gb": 0.9, "memory/update_gb": 0.7, "accuracy_after": 0.95}
    summary |= {"planned_gb": {"peak": 0.65, "update": 0.6}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def texts(cells: list[str]) -> pyarrow.Array:
    """Return a column of texts in which half of a surrogate pair stands as it is; pyarrow itself writes none."""
    return pyarrow.array([cell.encode(errors="surrogatepass") for cell in cells], pyarrow.binary()).view(
        pyarrow.string()
    )


def show_images(folder: Path, images: int, per_prompt: int = 1, **columns: list) -> list[str]:
    """Give the completions of a run images, of which there are so many, and columns; return the names of the files.

    Each prompt has the next images, and after the last one the first again.
    """
    (folder / "completions" / "images").mkdir()
    names = []
    for number in range(images):
        names.append(f"{number:032x}.jpg")
        colour = (number * 37 % 256, number * 91 % 256, 128)
        Image.new("RGB", (160, 120), colour).save(folder / "completions" / "images" / names[-1])
    unused = itertools.cycle(names)
    for file in sorted((folder / "completions").glob("*.parquet")):
        table = parquet.read_table(file)
        prompts = table["prompt"].cast(pyarrow.binary()).to_pylist()
        of_prompt = {prompt: list(itertools.islice(unused, per_prompt)) for prompt in dict.fromkeys(prompts)}
        columns["thumbnails"] = [of_prompt[prompt] for prompt in prompts]
        for name, cells in columns.items():
            values = list(itertools.islice(itertools.cycle(cells), len(table)))
            table = table.drop_columns([name]) if name in table.column_names else table
            table = table.append_column(name, [values])
        parquet.write_table(table, file)
    return names


def show_tokens(folder: Path, text: str = "") -> None:
    """Give the first completions of each step of a run values per token: eight of them, of six tokens each."""
    for file in sorted((folder / "completions").glob("completions_*.parquet")):
        table = parquet.read_table(file)
        parquet.write_table(table.append_column("completion_id", [list(range(len(table)))]), file)
        rows = [
            {
                "completion_id": number,
                "token": ["The", " answer", f" {text[:200]}", " 4", " 2", "<eos>"],
                "kind": ["loss", "loss", "tool", "image", "loss", "loss"],
                "logp": [-0.1, -2.5, -0.01, -0.2, -4.0, -0.001],
                "entropy": [0.5, 2.0, 0.1, 0.2, 1.5, 0.01],
                "advantage": [(-1.0) ** number] * 6,
                "ratio": [1.0, 1.3, 0.7, 1.0, 0.9, 1.0],
                "clipped": [False, True, False, False, False, False],
            }
            for number in range(min(8, len(table)))
        ]
        tokens = file.with_name(file.name.replace("completions_", "tokens_"))
        parquet.write_table(pyarrow.Table.from_pylist(rows), tokens)
