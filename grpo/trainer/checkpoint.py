"""Checkpoints from which a training continues bit for bit: rollouts in use, order of the data, what was learned."""

import logging
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from torch.utils.data import Sampler
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from grpo.trainer.extra_columns import from_tensor, to_tensor
from grpo.utils.distributed import is_main_process
from grpo.utils.manifest import seal
from grpo.utils.patching import patched, replaced

log = logging.getLogger(__name__)


class EpochSampler(RepeatSampler):
    """TRL's sampler, which can also begin at an epoch: its order is drawn after those of the epochs before."""

    def set_epoch(self, epoch: int) -> None:
        """Put the generator where it is when an epoch begins."""
        if self.shuffle and self.seed is not None:
            self.generator.manual_seed(self.seed)
            for _ in range(epoch):
                torch.randperm(self.num_samples, generator=self.generator)


class CheckpointTrainer(GRPOTrainer):
    """TRL's trainer with complete checkpoints, each with a manifest; `RolloutTrainer` adds the rollouts."""

    sharded: bool
    _epoch_sampler: EpochSampler | None = None
    _has_other_names = False
    _unlogged: tuple[float, int] | None = None
    """Of a checkpoint between two logs: the sum of the losses since the last log, and its step."""

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        stock = super()._get_train_sampler(dataset)
        names = ("data_source", "mini_repeat_count", "batch_size", "repeat_count", "shuffle", "seed")
        self._epoch_sampler = EpochSampler(**{name: getattr(stock, name) for name in names})
        return self._epoch_sampler

    def _run_epoch(self, *args: Any, epoch: int, **options: Any) -> None:
        """Train an epoch, unless all steps have been done before."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        if self._epoch_sampler:
            self._epoch_sampler.set_epoch(epoch)
        if self._unlogged:
            loss, self._globalstep_last_logged = self._unlogged
            self._tr_loss += loss
            self._unlogged = None
        super()._run_epoch(*args, epoch=epoch, **options)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save as transformers does, and seal the checkpoint before older ones are deleted; half of one is removed.

        One without an optimizer (`save_only_model`) is not sealed: nothing can continue from it.
        """
        rotate, complete = transformers.trainer.rotate_checkpoints, False
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"

        def seal_first(**options: Any) -> None:
            nonlocal complete
            (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle, perhaps with secrets, that nothing reads
            if not self.args.save_only_model:
                seal(folder)
            complete = True
            rotate(**options)

        with patched("transformers.trainer:rotate_checkpoints", seal_first):
            try:
                super()._save_checkpoint(model, trial)
            except Exception:
                if not complete and self.args.should_save:  # half of one would only fill the disk
                    shutil.rmtree(folder, ignore_errors=True)
                raise

    def keep(self) -> None:
        """After an exception, write a checkpoint of the completed steps, unless there is one.

        Not where one of several processes failed: each has a part of a checkpoint.
        """
        done = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if self.state.global_step and not done.exists() and self.accelerator.num_processes == 1:
            try:
                self._save_checkpoint(self.model, None)
            except Exception:  # what broke the run may break this too, and is what has to be reported
                log.exception("no checkpoint of step %d could be written", self.state.global_step)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Save as TRL does, and a tied weight, of which gathering a sharded policy makes two, once."""
        tied = getattr(self.accelerator.unwrap_model(self.model), "all_tied_weights_keys", None) or {}
        if state_dict:
            state_dict = {name: weight for name, weight in state_dict.items() if name not in tied}
        super()._save(output_dir, state_dict)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        torch.save(state_of(self), self._state_file(output_dir))
        self.accelerator.wait_for_everyone()  # until each has written its part

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a checkpoint, also of a policy that is saved under other names than its weights have.

        Many policies that see images are; transformers' trainer skips such weights with a warning, and would continue
        from those that the run began with.
        """
        self._has_other_names = False
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._has_other_names:
            dtype = max((weight.dtype for weight in self.model.parameters()), key=lambda kind: kind.itemsize)
            saved = type(self.model).from_pretrained(resume_from_checkpoint, dtype=dtype)
            self.model.load_state_dict(saved.state_dict())

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        self._has_other_names = bool(load_result.unexpected_keys)
        if not self._has_other_names:
            super()._issue_warnings_after_load(load_result)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # several processes on CPUs have one numbered device each, which `torch.load` does not know
        device = torch.device("cpu") if self.args.device.type == "cpu" else self.args.device
        with replaced(self.args, "_setup_devices", device):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint and (file := self._state_file(checkpoint)).exists():
            restore(self, torch.load(file, map_location=device, weights_only=True))

    def _state_file(self, folder: str) -> Path:
        several = self.accelerator.num_processes > 1
        return Path(folder) / (f"grpo_state_{self.accelerator.process_index}.pt" if several else "grpo_state.pt")


def state_of(trainer: Any) -> dict[str, Any]:
    """Return what the next steps depend on and transformers does not save, as numbers, texts and tensors."""
    every = trainer.args.steps_per_generation * trainer.num_iterations
    logs = trainer._logs
    state = {
        "step": trainer._step,
        # the rollouts of a generation that later steps use too
        "rollouts": trainer._buffered_inputs if trainer._step % every else None,
        "unlogged": (float(trainer._tr_loss), trainer._globalstep_last_logged),
        "metrics": {name: list(values) for name, values in trainer._metrics["train"].items()},
        "logs": {name: list(logs[name]) for name in ("prompt", "completion", "advantages")},
        "rewards": {name: list(values) for name, values in logs["rewards"].items()},
        "extra": {name: to_tensor(values) for name, values in logs["extra"].items()},
        "budget_setting": trainer.update.max_tokens_per_microbatch,
        "budget": [trainer.budget.tokens, trainer.budget.ceiling, trainer.budget.begun],
        "prompts_at_once": trainer._prompts_at_once,
        "skipped_in_a_row": trainer._guard.in_a_row,
        "entropy_coef": trainer.entropy_coef,
        "order": (trainer.order.taken, trainer.order.correct) if trainer.takes_problems else None,
        "last_step": trainer.state.max_steps,
    }
    if trainer.args.sync_ref_model and trainer.ref_model is not None and not trainer.sharded:
        state["reference"] = trainer.accelerator.unwrap_model(trainer.ref_model).state_dict()
    return state


def restore(trainer: Any, state: dict[str, Any]) -> None:
    """Put back what `state_of` has returned."""
    trainer._step, trainer._buffered_inputs = state["step"], state["rollouts"]
    trainer._unlogged = state["unlogged"]
    trainer._metrics["train"].update(state["metrics"])
    for name, values in state["logs"].items():
        trainer._logs[name].extend(values)
    for name, values in state["rewards"].items():
        trainer._logs["rewards"][name].extend(values)
    for name, column in state["extra"].items():
        trainer._logs["extra"][name].extend(from_tensor(column))
    if state["budget_setting"] == trainer.update.max_tokens_per_microbatch:
        trainer.budget.tokens, trainer.budget.ceiling, trainer.budget.begun = state["budget"]
    trainer._prompts_at_once = state["prompts_at_once"]
    trainer._guard.in_a_row = state["skipped_in_a_row"]
    trainer.entropy_coef = state["entropy_coef"]
    if trainer.takes_problems and state["order"]:
        trainer.order.taken, trainer.order.correct = state["order"]
        if trainer.has_taken_all:
            trainer.state.max_steps = state["last_step"]
    if "reference" in state:
        trainer.accelerator.unwrap_model(trainer.ref_model).load_state_dict(state["reference"])


def save_model(trainer: Any, folder: Path) -> None:
    """Save the policy for `from_pretrained`, without a pickle of the arguments: the configuration is beside it.

    All processes write into one folder beside it, which takes its place once it is complete.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    if is_main_process():
        shutil.rmtree(partial, ignore_errors=True)  # of a save that was interrupted
    trainer.accelerator.wait_for_everyone()
    if trainer.is_fsdp_enabled:  # whole, also where a file of accelerate wants sharded checkpoints
        weights = trainer.accelerator.get_state_dict(trainer.model)
        if is_main_process():
            trainer._save(str(partial), state_dict=weights)
    else:
        trainer.save_model(str(partial))
    trainer.accelerator.wait_for_everyone()
    if is_main_process():
        (partial / "training_args.bin").unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
