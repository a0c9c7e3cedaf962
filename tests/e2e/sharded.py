"""Run by torchrun: stock TRL and ours on two processes that share one sharded policy; writes what it found as JSON."""

import copy
import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import accelerate.accelerator
import torch
from accelerate.utils import gather_object
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.distributed import DistributedBackend

from grpo.config.schema import ROOT, register
from grpo.generation.vllm.policy_weights import adapter_weights
from grpo.trainer import ExactGRPOTrainer, Update
from tests.sharding_on_cpus import enable
from tests.stock_trl import KL_FOUR_SLICES, idle_second, long_first, make, relative_difference, tiny_llama

SMALL = Update(max_tokens_per_microbatch=100)
CASES: dict[str, dict[str, Any]] = {
    "uneven lengths": {"rollout_func": long_first},
    "KL, two iterations, four slices": KL_FOUR_SLICES,
    "zero variance on one process": {"reward_funcs": idle_second},
    "a mean of each slice": {"loss_type": "bnpo"},
    "LoRA behind a frozen layer, checkpointing": {
        "gradient_checkpointing": True,
        "peft_config": LoraConfig(
            r=4, target_modules=["q_proj", "down_proj"], layers_to_transform=[1], init_lora_weights=False
        ),
    },
    "LoRA, checkpointing": {
        "gradient_checkpointing": True,
        "peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    },
}


class Weights(TrainerCallback):
    """The unsharded weights before the first step; `after` gives those at the end."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer

    def now(self) -> dict[str, torch.Tensor]:
        """Return all of them on the first process."""
        model = self.trainer.deepspeed if self.trainer.is_deepspeed_enabled else self.trainer.model
        found = self.trainer.accelerator.get_state_dict(model) or {}
        return {name: weight.detach().double().clone() for name, weight in found.items()}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.before = self.now()


def change(trainer: GRPOTrainer) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Train; return how the weights have changed, and what was logged."""
    weights = Weights(trainer)
    trainer.add_callback(weights)
    trainer.train()
    after = weights.now()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    return {name: after[name] - weight for name, weight in weights.before.items()}, logs


def shares_of_gradients(trainer: ExactGRPOTrainer) -> list[float]:
    """Let the trainer note, after each micro-batch, which share of the gradients' numbers this process holds."""
    shares: list[float] = []
    backward = trainer.step_update._backward

    def noting(*args: Any, **options: Any) -> Any:
        result = backward(*args, **options)
        trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
        held = sum(weight.grad.to_local().numel() for weight in trained)
        shares.append(held / sum(weight.numel() for weight in trained))
        return result

    trainer.step_update.__dict__["_backward"] = noting
    return shares


def shard_options(name: str) -> dict[str, Any]:
    """Return what a choice of `conf/shard` sets, for GRPOConfig."""
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        options = OmegaConf.to_container(compose("config", [f"shard={name}"]).train)
    assert isinstance(options, dict)
    return {key: options[key] for key in ("fsdp", "fsdp_config", "deepspeed") if options[key]}


def note_weights() -> list[str]:
    """Note where the weights of a policy are, on this process, when accelerate divides it."""
    devices: list[str] = []
    stock = accelerate.accelerator.fsdp2_prepare_model

    def noting(accelerator: Any, model: torch.nn.Module) -> torch.nn.Module:
        devices.append(" and ".join(sorted({weight.device.type for weight in model.parameters()})))
        return stock(accelerator, model)

    accelerate.accelerator.fsdp2_prepare_model = noting
    return devices


def fail_in_layers(trainer: ExactGRPOTrainer, call: int) -> None:
    """Let the second process run out of memory once, at a call of a feed-forward layer in an update.

    A micro-batch calls those of two layers in the forward pass, and again, the second one first, in the backward pass.
    """
    calls = [0]
    backward = trainer.step_update._backward

    def fault(*args: Any) -> None:
        calls[0] += updating[0]
        if updating[0] and calls[0] == call and trainer.accelerator.process_index == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def noting(*args: Any, **options: Any) -> Any:
        updating[0] = True
        try:
            return backward(*args, **options)
        finally:
            updating[0] = False

    updating = [False]
    trainer.step_update.__dict__["_backward"] = noting
    for module in trainer.model.modules():
        if type(module).__name__.endswith("MLP"):
            module.register_forward_pre_hook(fault)


def main() -> None:
    gc.freeze()  # accelerate collects garbage before each training: not what the libraries have created
    tiny_llama()  # before there are several: afterwards only the first would save its whole policy
    enable()
    shard, file = sys.argv[1:]
    options = {**shard_options(shard), "optim": "sgd", "learning_rate": 0.1}
    if "deepspeed" not in options:
        options["use_cpu"] = True
    found: dict[str, Any] = {}
    devices = note_weights()
    folder = Path(tempfile.mkdtemp())
    for name, case in CASES.items():
        torch.manual_seed(0)
        stock = make(GRPOTrainer, folder, **copy.deepcopy({**options, **case}))
        theirs, trl_logs = change(stock)
        torch.manual_seed(0)
        trainer = make(ExactGRPOTrainer, folder, update=SMALL, **copy.deepcopy({**options, **case}))
        shares = shares_of_gradients(trainer) if shard == "fsdp2" else []
        ours, logs = change(trainer)
        found[name] = {"sharding": trainer.accelerator.distributed_type.value, "logs": logs, "trl": trl_logs}
        assert not theirs or any(one.any() for one in theirs.values()), "nothing was trained"
        found[name] |= {"shares": shares, "change": relative_difference(ours, theirs) if theirs else None}
    if shard == "fsdp2":
        case = {"gradient_checkpointing": True, "rollout_func": long_first}
        found["out of memory"], free = [], {}
        for call in (0, 2, 3, 8):
            torch.manual_seed(0)
            failing = make(ExactGRPOTrainer, folder, update=SMALL, **copy.deepcopy({**options, **case}))
            fail_in_layers(failing, call)
            changes, logs = change(failing)
            free = free or changes
            retries = [row["update/oom_retries"] for row in logs]
            found["out of memory"].append([retries, relative_difference(changes, free) if changes else None])
    spoilt = make(ExactGRPOTrainer, folder, update=SMALL, **copy.deepcopy(options))
    if spoilt.accelerator.process_index == 1:
        compute = spoilt._compute_loss
        spoilt._compute_loss = lambda *args: compute(*args) * float("nan")
    changes, logs = change(spoilt)
    found["not finite"] = {"logs": logs, "unchanged": not any(weight.any() for weight in changes.values())}
    sent = adapter_weights(trainer.model, DistributedBackend(trainer.accelerator).gather_params)
    adapter = {name: weight for name, weight in Weights(trainer).now().items() if "lora_" in name}
    whole = {name.replace(".default.", "."): weight for name, weight in adapter.items()}
    found["devices"] = gather_object([devices])
    if trainer.accelerator.process_index == 0:
        found["adapter"] = relative_difference(sent, whole)
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
