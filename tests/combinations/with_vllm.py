"""Features together with the real vLLM, awake and asleep: stock TRL's gradient of the completions that it has made.

`python -m tests.combinations.with_vllm FOLDER`, as a process keeps its engines to its end. vLLM's CPU build cannot
sleep: what a sleeping engine has discarded is here not a number until it gets new weights.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from trl.generation import vllm_generation

from grpo.options import Engine
from grpo.trainer.rollout.sampling import Source
from tests.combinations.array import Row, few, name, rows
from tests.combinations.comparisons import compare
from tests.combinations.features import FEATURES
from tests.combinations.trainings import BASE, ours, stock
from tests.stock_trl import compare_engine_at, note_kept, train

SMALL = {"vllm_gpu_memory_utilization": 0.01}
"""The least cache that an engine has on a CPU, 0.5 GiB."""
KINDS: dict[str, dict[str, Any]] = {
    "awake": {},
    "asleep": {"vllm_enable_sleep_mode": True},
    "awake, merged weights": {},
    "awake, shared weights": {},
    "awake, drafts": {},
}
"""Of engines, with the fields of `GRPOConfig` that they set."""


def can_be(row: Row) -> bool:
    """Whether vLLM generates in a row of text whose weights it takes in this way."""
    lora = row["weights"] == "LoRA"
    kinds = {
        "awake": True,
        "asleep": True,
        "awake, merged weights": lora,
        "awake, shared weights": lora,
        "awake, drafts": True,
    }
    text = not row["policy"].startswith("images") and row["weights"] in ("all", "LoRA")
    return row["engine"].startswith("vLLM") and text and kinds[row["kind"]]


def with_engines() -> list[Row]:
    """As few rows as have each value that goes with an engine of vLLM."""
    plain = {"policy": "full attention", "resume": "no"}
    left = [row | plain | {"kind": kind} for row in rows() for kind in KINDS]
    return few([row for row in left if can_be(row)])


class Sleeping(vllm_generation.LLM):
    def __init__(self, *args: Any, enable_sleep_mode: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)

    def sleep(self, level: int) -> None:
        for weight in self.llm_engine.model_executor.driver_worker.model_runner.model.parameters():
            weight.data.fill_(torch.nan)

    def wake_up(self, tags: list[str]) -> None:
        pass


def replayed(made: list[Any]) -> Any:
    """A `rollout_func` that gives what an engine has made, in the same order."""
    generations: Iterator[Any] = iter(made)

    def replay(prompts: list, trainer: Any) -> dict[str, Any]:
        found = next(generations) if trainer.model.training else made[0]
        ids, completions, masks, _, logps = (values and values[: len(prompts)] for values in found[:5])
        masked = {"env_mask": masks} if masks else {}
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logps} | masked

    return replay


def seeded(trainer: Any) -> None:
    """Let TRL deal completions out to slices alike, whatever has taken random numbers before."""
    generate = trainer._generate_and_score_completions

    def then_seed(rows: Any) -> Any:
        batch = generate(rows)
        torch.manual_seed(trainer.state.global_step)
        return batch

    trainer._generate_and_score_completions = then_seed


def identifier(row: Row) -> str:
    return f"{row['kind']}, {name({feature: row[feature] for feature in FEATURES})}"


def check_with_engine(row: Row, kind: str, folder: Path) -> None:
    """Train with an engine, have stock TRL replay its completions, and compare the gradients."""
    adapter = row["weights"] == "LoRA" and kind in ("awake", "awake, shared weights", "awake, drafts")
    drafts = "ngram" if kind == "awake, drafts" else None
    engine = Engine("adapter" if adapter else "merged", share_weights=kind == "awake, shared weights", drafts=drafts)
    trainer = ours(row, folder / "ours", engine=engine, model=str(BASE), vllm_mode="colocate", **KINDS[kind], **SMALL)
    del trainer._generate_single_turn  # `drawn`
    compare_engine_at(trainer, 0)
    seeded(trainer)
    made, generate = list[Any](), trainer._generate

    def noting(prompts: list) -> Any:
        made.append(generate(prompts))
        return made[-1]

    kept = note_kept(trainer)
    if type(trainer.rollouts.source) is Source:
        trainer._generate = lambda prompts: noting(prompts) if trainer.model.training else generate(prompts)
    mine = train(trainer)
    options: dict[str, Any] = {"model": str(BASE)}
    if not kept:
        row = row | {"tools": "none"}  # whose results are in what is replayed
        options["rollout_func"] = replayed(made)
    theirs = stock(row, folder, trainer, kept, **options)
    if not kept:
        del theirs._generate_single_turn
    seeded(theirs)
    compare(mine, train(theirs, mine.weights), 5e-5)  # of a trained policy, whose gradients cancel more
    assert any(row.get("engine/is_policy") == 1 for row in trainer.state.log_history)


def main(folder: Path) -> None:
    """Write what went wrong with each row, or null, into `found.json`."""
    vllm_generation.LLM = Sleeping
    found: dict[str, str | None] = {}
    drafted_last = sorted(with_engines(), key=lambda row: row["kind"] == "awake, drafts")  # numba, which vLLM loads for
    for place, row in enumerate(drafted_last):  # drafts, hinders the start of its next engine on a CPU
        try:
            check_with_engine({feature: row[feature] for feature in FEATURES}, row["kind"], folder / str(place))
            found[identifier(row)] = None
        except Exception as error:  # of this row; the others run
            found[identifier(row)] = f"{type(error).__name__}: {error}"[:500]
    (folder / "found.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
