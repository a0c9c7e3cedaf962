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
import re
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
from grpo.model.adapted import pattern_of, unfit
from grpo.options import Update
from grpo.planning.shape import shape_of
from grpo.testing.stock_trl import Record, make, relative_difference, train
from grpo.trainer import ExactGRPOTrainer
from grpo.trainer.placement import balance_routers_alone, show_to_trl

FILE, PAGE = ROOT / "benchmarks" / "families.json", ROOT / "docs" / "models.md"
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


def by_trl(model: PreTrainedModel, folder: Path, helped: bool, **options: Any) -> Record:
    """Train by stock TRL.

    Args:
        model: a policy.
        folder: for output.
        helped: whether TRL gets the names of the policy's parts, as from our trainer.
        options: further ones of `make`.
    """
    trainer = make(trl.GRPOTrainer, folder, model=model, **options)
    if helped:
        show_to_trl(trainer.model)
        balance_routers_alone(trainer)
    return train(trainer)


def by_ours(model: PreTrainedModel, folder: Path, theirs: Record | None, **options: Any) -> tuple[float | None, Any]:
    """Train by ours on the rollouts of TRL's record; return the largest relative difference, and our trainer."""
    trainer = make(ExactGRPOTrainer, folder, model=model, update=Update(200), **options)
    ours = train(trainer, start_from=theirs.weights if theirs else ())
    pairs = zip(ours.gradients, theirs.gradients, strict=True) if theirs else ()
    return max((relative_difference(with_zeros(*pair), pair[1]) for pair in pairs), default=None), trainer


def with_zeros(gradient: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a gradient with zeros where only the other has one, as of an expert without tokens."""
    return {name: torch.zeros_like(value) for name, value in other.items()} | gradient


def judged(difference: float | None, theirs: Record | None) -> str:
    """Return whether a relative difference from TRL's record is one of rounding."""
    if difference is None or theirs is None:
        return "TRL has no gradient"
    if any(value.isnan().any() for gradient in theirs.gradients for value in gradient.values()):
        return "TRL's gradient is not a number"
    return YES if difference <= EXACT else f"differs by {difference:.1e}"


def trained_by_trl(family: str, folder: Path) -> tuple[Record | None, str]:
    """Return the record of stock TRL, with help where it needs some, and whether it needed none."""
    try:
        return by_trl(policy_of(family), folder, helped=False), YES
    except Exception as error:
        reason = line_of(error)
    try:
        return by_trl(policy_of(family), folder, helped=True), reason
    except Exception:  # our trainer is asked next
        return None, reason


def with_lora(family: str, folder: Path, adapter: LoraConfig, helped: bool) -> str:
    """Return whether gradients of adapters are TRL's."""
    options = {"peft_config": adapter, "max_steps": 1}
    theirs = by_trl(policy_of(family), folder, helped, **copy.deepcopy(options))
    return judged(by_ours(policy_of(family), folder, theirs, **options)[0], theirs)


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
        modules = pattern_of(unfit(policy_of(family)))
        adapter = LoraConfig(target_modules="all-linear", exclude_modules=modules, init_lora_weights=False)
        theirs, answers.trl = trained_by_trl(family, folder)
        try:
            answers.difference, trainer = by_ours(policy_of(family), folder, theirs)
        except Exception as error:
            answers.trained = line_of(error)
            return answers
        answers.trained, answers.exact = YES, judged(answers.difference, theirs)
        answers.update = shared(said, trainer)
        answers.generation = asked(lambda: joined(trainer.model.eval()))
        answers.lora = asked(lambda: with_lora(family, folder, adapter, answers.trl != YES))
        answers.resumed = asked(lambda: resumed(lambda: policy_of(family), folder))
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


COLUMNS = {
    "planned": "planned",
    "trl": "TRL trains it",
    "trained": "trained",
    "exact": "gradient is TRL's",
    "update": "prompts shared, update",
    "generation": "prompts shared, generation",
    "lora": "LoRA",
    "resumed": "resumes",
    "exported": "exported",
    "vllm": "vLLM",
}
"""Heading of each answer."""


def page(record: dict[str, Any]) -> str:
    """Return the page of a record, as Markdown."""
    families = record["families"]
    trained = [family for family in families if family["trained"] == YES]
    exact = [family for family in trained if family["exact"] == YES]
    by_trl_alone = [family for family in families if family["trl"] == YES]
    shares = [family for family in trained if family["update"] == YES]
    joins = [family for family in trained if family["generation"] in (YES, COPIED)]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    lines = [
        "# Models",
        "",
        f"`python -m benchmarks.families` builds a tiny random policy of each of the {len(families)} architectures with",
        "which transformers completes text, or text after images, trains it by stock TRL and by this trainer on the same",
        f"rollouts of text, and writes this page ({record['date']}; {versions}). `yes` was seen; anything else is a",
        "reason, below the table.",
        "",
        f"- This trainer trains {len(trained)} of them, stock TRL {len(by_trl_alone)}.",
        f"- The gradients of {len(exact)} are TRL's within {EXACT:.0e} (relative, float32).",
        f"- {len(shares)} share their prompts in the update, and {len(joins)} read prompts once in generation.",
        "",
        "- *planned*: the difference of the planned number of parameters from the real one; a choice of `conf/model` or",
        "  a `model.shape.parameters` of your own corrects it.",
        "- *prompts shared, generation*: `copied` where a prompt is read once and its keys or states are copied for each",
        "  completion.",
        "- *resumes*: a run that continues from a checkpoint has the same weights, bit for bit. *exported*: a saved policy",
        "  loads with the same logits. *vLLM*: its registry has the architecture.",
        "",
        "| model type | " + " | ".join(COLUMNS.values()) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    lines += [f"| `{family['model_type']}` | " + " | ".join(cells(family)) + " |" for family in trained]
    lines += ["", "## Reasons", ""]
    for family in trained:
        named = [f"{title}: {escaped(family[name])}" for name, title in COLUMNS.items() if no_cell(name, family[name])]
        lines += [f"- `{family['model_type']}`: {'; '.join(named)}"] if named else []
    lines += ["", "## Not trained", ""]
    lines += [f"- `{of['model_type']}`: {escaped(of['trained'])}" for of in families if of["trained"] != YES]
    return "\n".join(lines) + "\n"


def cells(family: dict[str, Any]) -> list[str]:
    """Return the cells of a family's row."""
    shown = {name: "no" if no_cell(name, family[name]) else family[name] for name in COLUMNS}
    shown["planned"] = shown["planned"].removeprefix("parameters ")
    shown["generation"] = "copied" if shown["generation"] == COPIED else shown["generation"]
    if family["difference"] is not None and shown["exact"] == YES:
        shown["exact"] = f"{family['difference']:.0e}"
    return [shown[name] for name in COLUMNS]


def no_cell(name: str, answer: str) -> bool:
    """Return whether an answer is a reason, for below the table."""
    return answer not in (YES, COPIED) and not (name == "planned" and answer.startswith("parameters"))


def escaped(reason: str) -> str:
    """Return a reason as text of Markdown."""
    return re.sub(r"([<>*_`|\[\]])", r"\\\1", reason)


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
