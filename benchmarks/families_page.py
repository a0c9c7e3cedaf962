"""The page of `python -m benchmarks.families`, docs/models.md."""

import re
from typing import Any

from omegaconf import OmegaConf

from grpo.config.schema import ROOT

PAGE = ROOT / "docs" / "models.md"
CHOICES = sorted((ROOT / "conf" / "model").glob("*.yaml"))
EXACT = 1e-5
"""Relative difference of gradients up to which they are equal."""
YES = "yes"
COPIED = "read once, copied"
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


def with_choices(model_type: str) -> str:
    """Return a model type, with the choices of `conf/model` that have it."""
    types = {file.stem: OmegaConf.select(OmegaConf.load(file), "shape.model_type") for file in CHOICES}
    choices = [f"`{name}`" for name, its_type in types.items() if its_type == model_type]
    return f"`{model_type}`" + (f" ({', '.join(choices)})" if choices else "")


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
        f"`python -m benchmarks.families` builds a tiny random policy of each of the {len(families)} architectures",
        "with which transformers completes text, or text after images. Stock TRL and this trainer train it on the same",
        f"rollouts of text. The benchmark writes this page ({record['date']}; {versions}).",
        "`yes` was seen; the reason for a `no` is below the table, but for vLLM's, whose registry it is.",
        "",
        f"- This trainer trains {len(trained)} of them, stock TRL {len(by_trl_alone)}.",
        f"- The gradients of {len(exact)} are TRL's within {EXACT:.0e} (relative; float64 where float32 rounds more).",
        f"- {len(shares)} share their prompts in the update, and {len(joins)} read prompts once in generation.",
        "",
        "- In brackets stand choices of `model=` with this type; one that ends in `_text` is the language model of a",
        "  model that sees images.",
        "- *planned*: the difference of the planned number of parameters from the real one; `model.shape.parameters`",
        "  corrects it.",
        "- *prompts shared, generation*: `copied` where a prompt is read once, and its keys or states are copied for",
        "  each completion.",
        "- *resumes*: a run that continues from a checkpoint has the same weights, bit for bit. *exported*: a saved",
        "  policy loads with the same logits. *vLLM*: its registry has the architecture.",
        "",
        "| model type | " + " | ".join(COLUMNS.values()) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    lines += [f"| {with_choices(family['model_type'])} | " + " | ".join(cells(family)) + " |" for family in trained]
    lines += ["", "## Reasons", ""]
    for family in trained:
        reasons = (
            (title, family[name]) for name, title in COLUMNS.items() if name != "vllm" and no_cell(name, family[name])
        )
        named = [f"{title}: {escaped(reason)}" for title, reason in reasons]
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
