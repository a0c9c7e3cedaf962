"""Run by `torchrun`: stock TRL and ours on two processes, several cases; writes what it found as JSON."""

import gc
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from datasets import Dataset
from trl import GRPOTrainer

from grpo.options import LOSS_MEANS, Rollout
from grpo.trainer import DoesNotFit, ExactGRPOTrainer, Update
from grpo.trainer.update import step_update
from grpo.utils.patching import replaced
from tests import vision_policies
from tests.derived_losses import DERIVED
from tests.stock_trl import (
    KL_FOUR_SLICES,
    LONGEST,
    Record,
    ScriptedEngine,
    any_length,
    generated_at_once,
    idle_second,
    long_first,
    make,
    note_kept,
    relative_difference,
    tiny_llama,
    tiny_mixture,
    train,
)

tiny_mixture()
tiny_llama()  # before there are several: afterwards only the first would save its whole policy
RANK = PartialState(cpu=True).process_index
OPTIONS: dict[str, Any] = {"use_cpu": True, "ddp_find_unused_parameters": False, "max_steps": 2}
SMALL = Update(max_tokens_per_microbatch=100)
LARGE = Update(max_tokens_per_microbatch=400)
"""Several completions per micro-batch, so that it can be halved twice."""


CASES: dict[str, dict[str, Any]] = {
    "unequal numbers": {"rollout_func": long_first},
    "one process has nothing to do": {"reward_funcs": idle_second},
    "nothing to do at all": {"reward_funcs": lambda prompts, **kwargs: [1.0] * len(prompts)},
    "sequence level, KL, 4 slices, 2 iterations": {
        "importance_sampling_level": "sequence",
        **KL_FOUR_SLICES,
    },
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 5.0, "max_steps": 3},
    "bnpo": {"loss_type": "bnpo"},
    "mixture of experts": {"model": tiny_mixture(), **KL_FOUR_SLICES, "max_steps": 2},
    "undivided": {"top_entropy_quantile": 0.2},
}


def with_images(family: str, method: str = "full", of: int = 16) -> dict[str, Any]:
    """Arguments for a policy that sees images; only the first `of` prompts have any."""
    given = vision_policies.options(family, method)
    rows = [row | {"images": row["images"] if place < of else []} for place, row in enumerate(given["train_dataset"])]
    data = Dataset.from_list(rows, features=given["train_dataset"].features)
    given |= {"rollout_func": images_long_first, "train_dataset": data, "max_steps": 2}
    # of DDP, the last layers of the tower, or all of it without images; TRL logs images of all processes or none
    return given | {"ddp_find_unused_parameters": True, "log_multimodal": False}


def images_long_first(prompts: list, trainer: Any) -> dict[str, Any]:
    """The completions of `long_first`, to prompts with images."""
    return long_first([""] * len(prompts), trainer) | {"prompt_ids": trainer._tokenize_prompts(prompts)[0]}


IMAGES = {f"images, {family}": partial(with_images, family) for family in vision_policies.FAMILIES}
IMAGES["images, LoRA of the tower too"] = partial(with_images, "qwen2_5_vl", vision_policies.METHODS[3])
IMAGES["images on one process at most"] = partial(with_images, "qwen2_vl", of=1)
CORRECTED = {
    loss_type: {"loss_type": loss_type, "num_iterations": 2, "vllm_importance_sampling_mode": "token_truncate"}
    for loss_type in LOSS_MEANS
}
"""Losses with vLLM's correction."""


def corrected(trainer: GRPOTrainer) -> GRPOTrainer:
    """Let an engine generate whose log-probabilities differ from the policy's, so that the correction acts.

    The first process has completions of all lengths, the second short ones, which get into micro-batches with these.
    """
    longest = LONGEST if RANK == 0 else 4
    ScriptedEngine(trainer, noise=0.05, length=lambda generator: 1 + any_length(generator) % longest)
    return trainer


def out_of_memory(trainer: GRPOTrainer, where: str, *calls: int) -> None:
    """Let the second process run out of memory at certain passes through a layer."""
    trainer.packing.shared_prompts.applies({})  # the trial is over before
    count = 0

    def fault(*args: Any) -> None:
        nonlocal count
        count += 1
        if RANK == 1 and count in calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    layer = trainer.model.model.layers[0]
    register = layer.register_forward_pre_hook if where == "forward" else layer.register_full_backward_pre_hook
    register(fault)


def differences(record: Record, reference: Record) -> list[float]:
    pairs = zip(record.gradients, reference.gradients, strict=True)
    return [relative_difference(mine, stock) for mine, stock in pairs]


def main() -> None:
    gc.freeze()  # accelerate collects garbage before each training: not what the libraries have created
    found: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp())
    for name, case in CASES.items():
        theirs = train(make(GRPOTrainer, folder, **{**OPTIONS, **case}))
        trainer = make(ExactGRPOTrainer, folder, update=SMALL, **{**OPTIONS, **case})
        ours = train(trainer, start_from=theirs.weights)
        found[name] = {"gradient": max(differences(ours, theirs)), "logs": ours.logs, "trl": theirs.logs}

    for name, case in CORRECTED.items():
        theirs = train(corrected(make(GRPOTrainer, folder, **{**OPTIONS, **case})))
        trainer = make(ExactGRPOTrainer, folder, update=LARGE, **{**OPTIONS, **case})
        ours = train(corrected(trainer), start_from=theirs.weights)
        found[f"{name} with correction"] = {"gradient": max(differences(ours, theirs)), "logs": ours.logs}

    for name, (derived, case) in DERIVED.items():
        theirs = train(make(derived, folder, **OPTIONS | case))
        ours = train(make(ExactGRPOTrainer, folder, update=SMALL, **OPTIONS | case), start_from=theirs.weights)
        found[name] = {"gradient": max(differences(ours, theirs)), "logs": ours.logs}

    for name, case in IMAGES.items():
        theirs = train(make(GRPOTrainer, folder, **{**OPTIONS, **case()}))
        ours = train(make(ExactGRPOTrainer, folder, update=SMALL, **{**OPTIONS, **case()}), start_from=theirs.weights)
        found[name] = {"gradient": max(differences(ours, theirs)), "logs": ours.logs}

    trainer = make(ExactGRPOTrainer, folder, update=SMALL, rollout=Rollout(dynamic_sampling=True), **OPTIONS)
    kept = note_kept(trainer)
    ours = train(trainer)
    theirs = train(make(GRPOTrainer, folder, **OPTIONS | generated_at_once(trainer, kept)), start_from=ours.weights)
    found["dynamic sampling"] = {"gradient": max(differences(ours, theirs)), "logs": ours.logs, "trl": theirs.logs}

    with replaced(step_update, "can_move", lambda *given: False):
        trainer = make(ExactGRPOTrainer, folder, update=SMALL, **{**OPTIONS, **CASES["unequal numbers"]})
        found["unequal numbers, not balanced"] = {"logs": train(trainer).logs}
        trainer = make(ExactGRPOTrainer, folder, update=SMALL, **{**OPTIONS, **IMAGES["images, llava_next"]()})
        found["images, llava_next, not balanced"] = {"logs": train(trainer).logs}

    reference = train(make(ExactGRPOTrainer, folder, update=LARGE, **OPTIONS))
    for where in ("forward", "backward"):
        trainer = make(ExactGRPOTrainer, folder, update=LARGE, **OPTIONS)
        out_of_memory(trainer, where, 1, 2)
        record = train(trainer)
        found[f"out of memory, {where}"] = {"gradient": max(differences(record, reference)), "logs": record.logs}

    trainer = make(ExactGRPOTrainer, folder, update=SMALL, **OPTIONS)
    out_of_memory(trainer, "forward", *range(1, 1000))
    try:
        trainer.train()
    except DoesNotFit as error:
        found["does not fit"] = str(error)

    trainer = make(ExactGRPOTrainer, folder, update=SMALL, **OPTIONS)
    if RANK == 1:
        compute = trainer._compute_loss
        trainer._compute_loss = lambda *args: compute(*args) * float("nan")
    record = train(trainer)
    found["not finite"] = {"logs": record.logs}
    weights = torch.cat([weight.flatten() for weight in trainer.model.state_dict().values()])
    everywhere = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(everywhere, weights)
    found["weights equal"] = torch.equal(*everywhere)
    if RANK == 0:  # the only one that writes
        found["not finite"]["rows"] = (folder / "skipped_rows.jsonl").read_text().splitlines()
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
