"""Every architecture of the installed transformers that completes text, with a tiny random policy, as a table.

`python -m benchmarks.families` takes about ten minutes on two cores and writes `docs/models.md` and
`benchmarks/families.json`; names of model types after it restrict it to these and write nothing.
"""

import argparse
import contextlib
import copy
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
from functools import partial
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

from benchmarks.families_page import COPIED, EXACT, PAGE, YES, page
from benchmarks.tiny_policies import VOCABULARY, tiny_config
from grpo.config.schema import ROOT
from grpo.generation.transformers.continuous_batch import ContinuousBatch, why_not_shared
from grpo.generation.transformers.prompt_cache import why_repeated
from grpo.generation.transformers.trial import why_not_joined
from grpo.model.adapted import pattern_of, unfit
from grpo.options import Update
from grpo.planning.hub_config import shape_of
from grpo.trainer import ExactGRPOTrainer
from grpo.trainer.placement import balance_routers_alone, show_to_trl
from tests.stock_trl import Record, doubled, make, relative_difference, train

FILE = ROOT / "benchmarks" / "families.json"
FAMILIES = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES]
"""Model types, some of them twice."""
LARGEST = 30_000_000
"""Parameters of a policy that is tried."""
SECONDS = 300
"""For a family."""


@dataclass
class Family:
    """Answers about a model type: `yes`, or one line with the reason."""

    model_type: str
    parameters: int = 0
    planned: str = ""
    trl: str = ""
    """Whether stock TRL trains it."""
    trained: str = ""
    """Whether `ExactGRPOTrainer` trains it."""
    exact: str = ""
    """Whether the gradients are TRL's; of a family that TRL does not train, with the names of its parts for TRL."""
    difference: float | None = None
    """Relative difference of the gradients of all steps, the largest."""
    update: str = ""
    """Whether completions share their prompts in the update."""
    generation: str = ""
    """Whether completions share their prompts in generation, and leave and join its batch."""
    lora: str = ""
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
    model = auto.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:  # norms of ones would hide that they follow a rotation
                weight.mul_(1 + 0.2 * torch.randn_like(weight))
    return model


def planned(model: PreTrainedModel) -> str:
    """Return whether the plan knows the number of parameters."""
    counted = sum(weight.numel() for weight in model.parameters())
    difference = shape_of(model.config.to_dict()).parameters() / counted - 1
    return YES if abs(difference) < 1e-3 else f"parameters {difference:+.0%}"


def by_trl(family: str, folder: Path, helped: bool, double: bool = False, **options: Any) -> Record:
    """Train by stock TRL.

    Args:
        family: model type.
        folder: for output.
        helped: whether TRL gets the names of the policy's parts, as from our trainer.
        double: whether it computes in float64.
        options: further ones of `make`.
    """
    trainer = make(trl.GRPOTrainer, folder, model=policy_of(family), **copy.deepcopy(options))
    if helped:
        show_to_trl(trainer.model)
        balance_routers_alone(trainer)
    return train(doubled(trainer) if double else trainer)


def by_ours(
    family: str, folder: Path, theirs: Record | None, double: bool = False, **options: Any
) -> tuple[float | None, Any]:
    """Train by ours on the rollouts of TRL's record; return the largest relative difference, and our trainer."""
    trainer = make(ExactGRPOTrainer, folder, model=policy_of(family), update=Update(200), **copy.deepcopy(options))
    ours = train(doubled(trainer) if double else trainer, start_from=theirs.weights if theirs else ())
    pairs = zip(ours.gradients, theirs.gradients, strict=True) if theirs else ()
    return max((relative_difference(with_zeros(*pair), pair[1]) for pair in pairs), default=None), trainer


def with_zeros(gradient: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a gradient with zeros where only the other has one, as of an expert without tokens."""
    return {name: torch.zeros_like(value) for name, value in other.items()} | gradient


def trained_by_trl(family: str, folder: Path) -> tuple[Record | None, str]:
    """Return the record of stock TRL, with help where it needs some, and whether it needed none."""
    try:
        return by_trl(family, folder, helped=False), YES
    except Exception as error:
        reason = line_of(error)
    try:
        return by_trl(family, folder, helped=True), reason
    except Exception:  # our trainer is asked next
        return None, reason


def judged(difference: float | None, theirs: Record | None, again: Callable[[], float | None]) -> str:
    """Return whether a relative difference is one of rounding, which float64 shows where float32 does not.

    Args:
        difference: from TRL's record.
        theirs: TRL's record.
        again: computes it in float64.
    """
    if difference is None or theirs is None:
        return "TRL has no gradient"
    if any(value.isnan().any() for gradient in theirs.gradients for value in gradient.values()):
        return "TRL's gradient is not a number"
    if difference > EXACT:
        difference = again()
    return YES if difference is not None and difference <= EXACT else f"differs by {difference:.1e}"


def in_float64(family: str, folder: Path, helped: bool, **options: Any) -> float | None:
    """Return the relative difference from stock TRL in float64."""
    theirs = by_trl(family, folder, helped, double=True, **options)
    return by_ours(family, folder, theirs, double=True, **options)[0]


def with_lora(family: str, folder: Path, adapter: LoraConfig, helped: bool) -> str:
    """Return whether gradients of adapters are TRL's."""
    options = {"peft_config": adapter, "max_steps": 1}
    theirs = by_trl(family, folder, helped, **options)
    difference, _ = by_ours(family, folder, theirs, **options)
    return judged(difference, theirs, lambda: in_float64(family, folder, helped, **options))


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
    if reason := why_not_shared(model, ("input_ids", "attention_mask")):
        return reason
    if why_repeated(model) is None and why_not_joined(model, ContinuousBatch(shares_from=0)) is None:
        return YES
    return why_not_joined(model, ContinuousBatch()) or COPIED


def in_vllm(model: PreTrainedModel) -> str:
    """Return whether the registry of the installed vLLM has the architecture."""
    if not importlib.util.find_spec("vllm"):
        return "vLLM is not installed"
    from vllm.model_executor.models.registry import ModelRegistry

    return YES if type(model).__name__ in ModelRegistry.get_supported_archs() else "not in its registry"


def out_of_time(*args: Any) -> None:
    """Stop a family that takes too long."""
    raise TimeoutError(f"more than {SECONDS} seconds")


def in_time(family: str) -> Family:
    """Answer all questions about a model type, in a process of its own and some time."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(SECONDS)
    answers = examine(family)
    signal.alarm(0)
    return answers


def examine(family: str) -> Family:
    """Answer all questions about a model type."""
    answers = Family(family)
    with tempfile.TemporaryDirectory() as name, quiet() as said:
        folder = Path(name)
        try:
            model = policy_of(family)
        except Exception as error:  # a library is missing, or the family has no causal language model
            answers.trained = f"no tiny policy: {line_of(error)}"
            return answers
        answers.parameters = sum(weight.numel() for weight in model.parameters())
        answers.planned = asked(lambda: planned(model))
        answers.vllm = asked(lambda: in_vllm(model))
        answers.exported = asked(lambda: exported(model, folder / "exported"))
        modules = pattern_of(unfit(model))
        adapter = LoraConfig(target_modules="all-linear", exclude_modules=modules, init_lora_weights=False)
        theirs, answers.trl = trained_by_trl(family, folder)
        try:
            answers.difference, trainer = by_ours(family, folder, theirs)
        except Exception as error:
            answers.trained = line_of(error)
            return answers
        answers.trained, helped = YES, answers.trl != YES
        again = partial(in_float64, family, folder, helped)
        answers.exact = asked(lambda: judged(answers.difference, theirs, again))
        answers.update = shared(said, trainer)
        answers.generation = asked(lambda: joined(model.eval()))
        answers.lora = asked(lambda: with_lora(family, folder, adapter, helped))
        answers.resumed = asked(lambda: resumed(lambda: policy_of(family), folder))
    return answers


def examined(families: Iterable[str], workers: int) -> list[Family]:
    """Examine model types in processes of their own, in the order of their names."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.stock_trl"])
    with ProcessPoolExecutor(workers, context) as pool:
        tasks = [pool.submit(in_time, family) for family in families]
        answers = [task.result() for task in track(as_completed(tasks), "families", total=len(tasks))]
    return sorted(answers, key=lambda family: family.model_type)


def main() -> None:
    """Examine, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", help="model types; default: all")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    families = examined(args.families or sorted(set(FAMILIES)), args.workers)
    if args.families:
        for family in families:
            print(json.dumps(asdict(family), indent=1))
        return
    versions = {name: version(name) for name in ("torch", "transformers", "trl", "peft")}
    record = {"date": str(date.today()), "versions": versions, "families": [asdict(family) for family in families]}
    FILE.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(page(record))
    print(f"{PAGE}: {sum(family.trained == YES for family in families)} of {len(families)} are trained")


if __name__ == "__main__":
    main()
