"""docs/combinations.md, of the features: `python -m tests.combinations.document`."""

import re
from collections.abc import Iterable, Mapping
from itertools import groupby

from grpo.config.rules import RULES
from grpo.config.schema import ROOT
from tests.combinations.features import FEATURES, MEANINGLESS, REFUSED

FILE = ROOT / "docs" / "combinations.md"
INTRODUCTION = """# Which features work together

Tests train every pair of these values together for three steps (`tests/combinations/`), on one process and on two. On
the same rollouts the gradient is stock TRL's within 1e-5 in float64 (frozen towers in float32; QLoRA within 1e-4), and
a run that resumes from a checkpoint ends with the same weights bit for bit, unless rollouts are in flight. With dynamic
sampling, stock TRL replays the kept completions. MaxRL and DPPO are variants of TRL's losses and are compared with
them. Under top-k, stock TRL gets the importance ratio of the logits of all tokens.
`make test` runs a part of the pairs, `make test-all` all.

Other tests train each value with FSDP2 and with ZeRO-3 on two processes. The change of the weights in three steps is
that of stock TRL with the same sharding within 1e-4 (with AdamW, which divides rounding by small numbers, within 1e-3),
and runs resume bit for bit. With the real vLLM (`make test-vllm`), awake, asleep, with merged adapters, shared
weights and n-gram drafts, stock TRL replays the completions of each value with text, and the gradients agree within
5e-5.
"""


def page() -> str:
    """Return the page in Markdown."""
    lines = [INTRODUCTION, "| feature | values |", "|---|---|"]
    lines += [f"| {feature} | {'; '.join(values)} |" for feature, values in FEATURES.items()]
    lines += ["", "## Refused pairs", "", "The run ends with a one-line error before it trains:", ""]
    lines += ["| | with | reason |", "|---|---|---|", *refused()]
    lines += ["", "## Pairs that were not tried", "", *(f"- {line}" for line in meaningless())]
    lines += [
        "- Images with the real vLLM and with its server are tested with single features (`tests/e2e/`). The sleeping",
        "  engine is a simulation that loses its weights, because vLLM's sleep mode needs a GPU.",
        *("", "## All rules", "", "The commands and the constructor of `ExactGRPOTrainer` refuse these; … is a value:"),
        *("", *rules()),
    ]
    return "\n".join(lines) + "\n"


def rules() -> Iterable[str]:
    """A line for each rule that says more than a reason that it gets from elsewhere."""
    messages = [re.sub(r"{[^}]*}", "…", rule.message) for rule in RULES]
    return [f"- `{message}`" for message in messages if not message.startswith("…") and message != "train.…"]


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
