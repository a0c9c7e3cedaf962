"""docs/combinations.md, of the features: `python -m tests.combinations.document`."""

from collections.abc import Iterable, Mapping
from itertools import groupby

from grpo.config.schema import ROOT
from tests.combinations.features import FEATURES, MEANINGLESS, REFUSED

FILE = ROOT / "docs" / "combinations.md"
INTRODUCTION = """# Which features work together

Every two of these values have met in a training of three steps (`tests/combinations/`), on one process and on two,
whose gradients are stock TRL's on the same rollouts within 1e-5 in float64 (frozen towers in float32; QLoRA within
1e-4), and which, where it is resumed from a checkpoint, ends with the same weights bit for bit. With dynamic sampling,
stock TRL replays the completions that were kept; MaxRL and DPPO are compared with TRL's losses of which they are
variants, and under top-k stock TRL is given the importance ratio that the logits of all tokens make. `make test` runs a
part of it, `make test-all` all.

Each value has also met FSDP2 and ZeRO-3 on two processes, where the weights change as stock TRL's sharded alike within
1e-4 in three steps (with AdamW, which divides rounding by small numbers, within 1e-3), and resume bit for bit; and the
real vLLM with text, awake, asleep, with merged adapters and with shared weights (`make test-vllm`), whose completions
stock TRL replays, within 5e-5.
"""


def page() -> str:
    """Return the page in Markdown."""
    lines = [INTRODUCTION, "| feature | values |", "|---|---|"]
    lines += [f"| {feature} | {'; '.join(values)} |" for feature, values in FEATURES.items()]
    lines += ["", "## What is refused", "", "In one line, before anything is trained:", "", "| | with | reason |"]
    lines += ["|---|---|---|", *refused()]
    lines += ["", "## What was not tried", "", *(f"- {line}" for line in meaningless())]
    lines += [
        "- Images with the real vLLM, and its server, are tested with single features (`tests/e2e/`); a sleeping",
        "  engine is a simulated one, whose weights are lost, as vLLM's needs a GPU.",
    ]
    return "\n".join(lines) + "\n"


def refused() -> Iterable[str]:
    """A line for the first value of each refused pair and reason, with all others."""
    for (first, reason), pairs in groupby(REFUSED, key=lambda entry: (next(iter(entry[0].items())), entry[1])):
        others = [": ".join(list(pair.items())[1]) for pair, _ in pairs]
        yield f"| {': '.join(first)} | {'; '.join(others)} | `{reason.replace('.*', ' … ')}` |"


def meaningless() -> Iterable[str]:
    """A line for each pair that says nothing."""

    def second(pair: Mapping[str, str]) -> str:
        return ": ".join(list(pair.items())[1])

    for of, pairs in groupby(MEANINGLESS, key=second):
        yield f"{of} with {'; '.join(next(iter(pair.values())) for pair in pairs)}"


if __name__ == "__main__":
    FILE.write_text(page())
