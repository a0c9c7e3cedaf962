"""Every architecture of the installed transformers that completes text, with a tiny random policy, as a table.

`python -m benchmarks.families` takes ... on two cores, prints the table, and writes `docs/models.md` and
`benchmarks/families.json`; names of model types after it restrict it to these and write nothing.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from peft import LoraConfig
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from benchmarks.tiny_policies import VOCABULARY, tiny_config
from grpo.config.schema import ROOT
from grpo.generation.transformers.trial import why_not_joined
from grpo.options import Update
from grpo.planning.shape import shape_of
from grpo.testing.stock_trl import make, relative_difference, train
from grpo.trainer import ExactGRPOTrainer

FAMILIES = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES]
"""Model types, some of them twice."""
LARGEST = 30_000_000
"""Parameters of a policy that is tried."""
SECONDS = 300
"""For a family."""
EXACT = 1e-5
YES = "yes"
COPIED = "read once, copied"


@dataclass
class Family:
    """Answers about a model type: `yes`, or one line with the reason."""

    model_type: str
    parameters: int = 0
    planned: str = ""
    trained: str = ""
    """By stock TRL."""
    exact: str = ""
    difference: float | None = None
    """Relative difference of the gradients of all steps from stock TRL's, the largest."""
    update: str = ""
    """Whether completions share their prompts in the update."""
    generation: str = ""
    """Whether completions share their prompts in generation, and leave and join its batch."""
    lora: str = ""
    lora_difference: float | None = None
    resumed: str = ""
    exported: str = ""
    vllm: str = ""


def line_of(error: BaseException) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def asked(question: Callable[[], str]) -> str:
    """Return an answer, or the line of the error that came in its place."""
    try:
        return question()
    except Exception as error:  # whatever any of 250 architectures raises is the answer
        return line_of(error)


def policy_of(family: str) -> PreTrainedModel:
    """Return a tiny random policy of a model type; ValueError if it would not be tiny."""
    config = tiny_config(family)
    text = family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and family not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    auto = AutoModelForCausalLM if text else AutoModelForImageTextToText
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in auto.from_config(config).parameters())
    if parameters > LARGEST:
        raise ValueError(f"its smallest policy known here has {parameters:,} parameters")
    torch.manual_seed(0)
    return auto.from_config(config)


def planned(model: PreTrainedModel) -> str:
    """Return whether the plan knows the number of parameters."""
    counted = sum(weight.numel() for weight in model.parameters())
    difference = shape_of(model.config.to_dict()).parameters() / counted - 1
    return YES if abs(difference) < 1e-3 else f"parameters {difference:+.0%}"


def train_both(model: Callable[[], PreTrainedModel], folder: Path, **options: Any) -> tuple[float, Any]:
    """Train by TRL and by ours on the same rollouts; return the largest relative difference, and our trainer."""
    theirs = train(make(trl.GRPOTrainer, folder, model=model(), **options))
    trainer = make(ExactGRPOTrainer, folder, model=model(), update=Update(200), **options)
    ours = train(trainer, start_from=theirs.weights)
    pairs = zip(ours.gradients, theirs.gradients, strict=True)
    return max(relative_difference(with_zeros(mine, stock), stock) for mine, stock in pairs), trainer


def with_zeros(gradient: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a gradient with zeros where only the other has one, as of an expert without tokens."""
    return {name: torch.zeros_like(value) for name, value in other.items()} | gradient


def judged(difference: float) -> str:
    """Return whether a relative difference is one of rounding."""
    return YES if difference <= EXACT else f"differs by {difference:.1e}"


@contextlib.contextmanager
def quiet() -> Any:
    """While inside, nothing is printed; what the trainer warns of is in the list."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("grpo")
    logger.addHandler(handler)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield said
    finally:
        logger.removeHandler(handler)


def shared(said: Iterable[str], trainer: Any) -> str:
    """Return whether completions shared their prompts in the update, or the reason that was logged."""
    if trainer.packing.shared_prompts.results.get("text"):
        return YES
    return next((line.partition(": ")[2] for line in said if "do not share their prompts" in line), "no")


def resumed(model: Callable[[], PreTrainedModel], folder: Path, **options: Any) -> str:
    """Return whether a run that continues from a checkpoint ends with the same weights, bit for bit."""
    options |= {"update": Update(200), "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    whole = make(ExactGRPOTrainer, folder, model=model(), **options)
    whole.train()
    again = make(ExactGRPOTrainer, folder, model=model(), **options)
    again.generations = whole.num_iterations - 1  # the fixed rollouts are numbered
    again.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    weights, others = whole.model.state_dict(), again.model.state_dict()
    return YES if all(torch.equal(weights[name], others[name]) for name in weights) else "other weights"


def exported(model: PreTrainedModel, folder: Path) -> str:
    """Return whether a saved policy loads with the same logits."""
    model.eval().save_pretrained(folder)
    again = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(3, 15)[None] % VOCABULARY
    with torch.no_grad():
        same = torch.equal(model(input_ids=ids).logits, again(input_ids=ids).logits)
    return YES if same else "other logits"


def joined(model: PreTrainedModel) -> str:
    """Return whether completions leave and join a batch in generation, sharing their prompts' keys or copying them."""
    if why_not_joined(model, True) is None:
        return YES
    return why_not_joined(model, False) or COPIED


def in_vllm(model: PreTrainedModel) -> str:
    """Return whether the registry of the installed vLLM has the architecture."""
    if not importlib.util.find_spec("vllm"):
        return "vLLM is not installed"
    from vllm.model_executor.models.registry import ModelRegistry

    return YES if type(model).__name__ in ModelRegistry.get_supported_archs() else "not in its registry"


def out_of_time(*args: Any) -> None:
    """Stop a family that takes too long."""
    raise TimeoutError(f"more than {SECONDS} seconds")


def examine(family: str) -> Family:
    """Answer all questions about a model type."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(SECONDS)
    answers = Family(family)
    with tempfile.TemporaryDirectory() as name, quiet() as said:
        folder = Path(name)
        try:
            model = policy_of(family)
        except Exception as error:  # a library is missing, or the family has no causal language model
            answers.trained = line_of(error)
            return answers
        answers.parameters = sum(weight.numel() for weight in model.parameters())
        answers.planned = asked(lambda: planned(model))
        answers.vllm = asked(lambda: in_vllm(model))
        answers.exported = asked(lambda: exported(model, folder / "exported"))
        make_policy = lambda: policy_of(family)  # noqa: E731
        try:
            difference, trainer = train_both(make_policy, folder)
        except Exception as error:
            answers.trained = line_of(error)
            return answers
        answers.trained, answers.exact, answers.difference = YES, judged(difference), difference
        answers.update = shared(said, trainer)
        answers.generation = asked(lambda: joined(trainer.model.eval()))
        lora = {"peft_config": LoraConfig(target_modules="all-linear", init_lora_weights=False), "max_steps": 1}

        def with_lora() -> str:
            answers.lora_difference = train_both(make_policy, folder, **lora)[0]
            return judged(answers.lora_difference)

        answers.lora = asked(with_lora)
        answers.resumed = asked(lambda: resumed(make_policy, folder))
    signal.alarm(0)
    return answers


def examined(families: Iterable[str], workers: int) -> list[Family]:
    """Examine model types in processes of their own, in the order of their names."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["grpo.testing.stock_trl"])
    with ProcessPoolExecutor(workers, context) as pool:
        tasks = [pool.submit(examine, family) for family in families]
        answers = [task.result() for task in track(as_completed(tasks), "families", total=len(tasks))]
    return sorted(answers, key=lambda family: family.model_type)


def main() -> None:
    """Examine, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", help="model types; default: all")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    families = examined(args.families or sorted(set(FAMILIES)), args.workers)
    for family in families:
        print(json.dumps(asdict(family)))
    if args.families:
        return
    versions = {name: version(name) for name in ("torch", "transformers", "trl", "peft")}
    record = {"date": str(date.today()), "versions": versions, "families": [asdict(family) for family in families]}
    (ROOT / "benchmarks" / "families.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
