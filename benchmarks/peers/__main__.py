"""One update by stock TRL, this trainer, verl and ms-swift, on the same rollouts, in turns: time, memory and gradient.

verl and ms-swift need other versions of transformers and TRL. Each gets an environment:

    python -m venv outputs/verl && outputs/verl/bin/pip install verl==0.9.1 prefix_grouper torch==2.13.0
    python -m venv outputs/swift && outputs/swift/bin/pip install ms-swift==4.6.0 msgspec torch==2.13.0
    python -m benchmarks.peers --verl outputs/verl/bin/python --swift outputs/swift/bin/python

The last prints a table and writes `benchmarks/peers_cpu.json`: SmolLM2-135M's shape in float32, half an hour on two
cores. The loss is DAPO's, TRL's default, with which the gradients of all four are equal. An update is all computation
between the rewards and the step of the optimizer. verl and ms-swift compute log-probabilities of the old policy in it,
which TRL and this trainer need only in later updates of the same completions. verl's micro-batches have at most as many
tokens as this trainer's; the completions of a micro-batch are packed into a sequence, or padded.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from benchmarks.peers.turns import GRADIENT, POLICY, ROLLOUTS, Peer
from benchmarks.update import GROUP, WORKLOADS, build_policy, rollout
from grpo.config.schema import ROOT
from grpo.utils.limits import UNMEASURED
from tests.stock_trl import relative_difference

VERL = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "benchmarks.peers.verl_cpu"}
"""verl's environment."""


def prepare(folder: Path, workload: str, model: str, rows: int) -> None:
    """Write the policy, and the rollouts with their advantages as TRL computes them."""
    policy = build_policy(model, "cpu")
    policy.save_pretrained(folder / POLICY)
    words = {f"<{token}>": token for token in range(policy.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    end = {"eos_token": "<2>", "pad_token": "<1>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<0>", **end).save_pretrained(folder / POLICY)
    fixed, rewards = rollout(WORKLOADS[workload], rows)
    groups = torch.tensor(rewards).view(-1, GROUP)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    content = {"prompts": fixed["prompt_ids"], "completions": fixed["completion_ids"], "rewards": rewards}
    content |= {"advantages": advantages.flatten().tolist(), "group": GROUP}
    (folder / ROLLOUTS).write_text(json.dumps(content))


def start(folder: Path, args: argparse.Namespace) -> dict[str, Peer]:
    """Start a process for each trainer."""
    ours = (sys.executable, "benchmarks.peers.with_trl", folder)
    workload = (args.workload, args.model, str(args.rows))
    peers = {name: Peer(*ours, name, *workload) for name in ("trl", "ours")}
    if args.verl:
        for padded in ([], ["--padded"]):
            name = "verl, padded" if padded else "verl"
            given = (str(UNMEASURED), *padded)
            peers[name] = Peer(args.verl, "benchmarks.peers.with_verl", folder, *given, environment=VERL)
        peers["verl, prefix grouper"] = Peer(args.verl, "benchmarks.peers.with_prefix_grouper", folder)
    if args.swift:
        peers["ms-swift"] = Peer(args.swift, "benchmarks.peers.with_swift", folder)
    return peers


def measure(peers: dict[str, Peer], folder: Path, repeats: int, only: list[str] | None = None) -> dict[str, Any]:
    """Update by all, or `only` some, in turns, each time from another beginning, after an uncounted round of all."""
    order = list(peers)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in order}
    gradients = {}
    for place in range(1 + repeats):
        turns = order[place % len(order) :] + order[: place % len(order)]
        for name in (name for name in turns if place == 0 or not only or name in only):
            found = peers[name].update(keep_gradient=place == 0)
            Console().print(f"{name}: {found}", highlight=False)
            if place == 0:
                gradients[name] = torch.load(folder / GRADIENT)
            else:
                rounds[name].append(found)
    return {
        name: {key: [found[key] for found in rounds[name]] for key in rounds[name][0]}
        | {"gradient_difference": relative_difference(gradients[name], gradients["trl"])}
        | {"versions": peers[name].versions}
        for name in order
        if rounds[name]
    }


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    medians = {name: statistics.median(result["seconds"]) for name, result in results.items()}
    table = Table("", "s", "slower than ours", "without old log-probabilities", "GiB", "gradient differs from TRL's by")
    for name, result in results.items():
        old = statistics.median(result.get("old_logprobs_seconds", [0.0]))
        table.add_row(
            name,
            f"{medians[name]:.1f}",
            f"{medians[name] / medians['ours']:.2f}x",
            f"{(medians[name] - old) / medians['ours']:.2f}x",
            f"{statistics.median(result['peak_gib']):.2f}",
            f"{result['gradient_difference']:.1e}",
        )
    Console(width=110).print(table)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--verl", help="interpreter of an environment with verl")
    parser.add_argument("--swift", help="interpreter of an environment with ms-swift")
    parser.add_argument("--model", default="smollm2_135m", help="a name of conf/model, or toy")
    parser.add_argument("--workload", default="b", choices=list(WORKLOADS))
    parser.add_argument("--rows", type=int, default=64, help="completions per step, in groups of 8")
    parser.add_argument("--repeats", type=int, default=2, help="updates by each that are counted")
    parser.add_argument("--only", nargs="+", help="names of peers; TRL's gradient is compared anyway")
    parser.add_argument("--output", default="peers_cpu.json", help="a file in benchmarks/; - for none")
    args = parser.parse_args()
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, args.workload, args.model, args.rows)
        peers = {
            name: peer for name, peer in start(folder, args).items() if not args.only or name in ("trl", *args.only)
        }
        results = measure(peers, folder, args.repeats, args.only)
        for peer in peers.values():
            peer.close()
    show(results)
    if args.output != "-":
        content = {"date": str(date.today()), "cpu_cores": os.cpu_count(), "model": args.model, "rows": args.rows}
        content |= {"workload": f"({args.workload}) {WORKLOADS[args.workload].name}", "verl_tokens": UNMEASURED}
        path = ROOT / "benchmarks" / args.output
        path.write_text(json.dumps(content | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
