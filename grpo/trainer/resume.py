"""Checkpoints from which a training continues bit for bit: rollouts in use, order of the data, what was learned."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers.trainer
from accelerate.utils import set_seed
from accelerate.utils.constants import FSDP_MODEL_NAME
from safetensors import safe_open
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from trl.trainer.utils import RepeatSampler

from grpo.trainer import trl
from grpo.trainer.batch import Batch, padded_alike
from grpo.trainer.rollout.columns import from_tensor, to_tensor
from grpo.trainer.rollout.rollouts import Rollouts
from grpo.trainer.update.step_update import StepUpdate
from grpo.utils.atomic import remove, settle
from grpo.utils.distributed import is_main_process
from grpo.utils.manifest import is_sealed, seal
from grpo.utils.patching import patched
from grpo.view.stream import Stream

log = logging.getLogger(__name__)
State = dict[str, Any]
"""See `Resume.state_dict`."""


class EpochSampler(RepeatSampler):
    """TRL's sampler, which can also begin at an epoch: its order is drawn after those of the epochs before."""

    @classmethod
    def like(cls, sampler: RepeatSampler) -> "EpochSampler":
        """Return one with the options of TRL's."""
        names = ("data_source", "mini_repeat_count", "batch_size", "repeat_count", "shuffle", "seed")
        return cls(**{name: getattr(sampler, name) for name in names})

    def set_epoch(self, epoch: int) -> None:
        """Put the generator where it is when an epoch begins."""
        if self.shuffle and self.seed is not None:
            self.generator.manual_seed(self.seed)
            for _ in range(epoch):
                torch.randperm(self.num_samples, generator=self.generator)


class Resume:
    """The state that transformers does not save and the next steps depend on: of TRL's trainer, and of parts of ours.

    Args:
        rollouts: of the trainer.
        step_update: likewise.
        stream: the problems, if they are read while the run trains.
    """

    def __init__(self, rollouts: Rollouts, step_update: StepUpdate, stream: Stream | None = None) -> None:
        self.rollouts, self.step_update, self.stream = rollouts, step_update, stream
        self.unlogged: tuple[float, int] | None = None
        """Sum of the losses since the last log, and its step, of a checkpoint between two logs."""

    def state_dict(self, trainer: Any) -> dict[str, Any]:
        """Return it as numbers, texts and tensors, which `torch.load` takes with `weights_only`."""
        state = trl.state_dict(trainer) | {
            "rollouts": self.rollouts.state_dict(),
            "step_update": self.step_update.state_dict(),
            "stream": self.stream.state_dict() if self.stream else None,
            "entropy_coef": trainer.entropy_coef,
            "last_step": trainer.state.max_steps,
        }
        state["extra"] = {name: to_tensor(values) for name, values in state["extra"].items()}
        if trainer.args.sync_ref_model and trainer.ref_model is not None:
            state["reference"] = [own_shard(weight) for weight in trainer.ref_model.parameters()]
        return state

    def load_state_dict(self, trainer: Any, state: dict[str, Any]) -> None:
        """Put back what `state_dict` has returned."""
        self.rollouts.load_state_dict(state["rollouts"])
        self.step_update.load_state_dict(state["step_update"])
        if self.stream and state["stream"]:  # else a run whose data was no stream
            self.stream.load_state_dict(state["stream"])
        self.unlogged = state["unlogged"]
        extra = {name: from_tensor(column) for name, column in state["extra"].items()}
        trl.load_state_dict(trainer, state | {"extra": extra})
        if self.rollouts.source.has_taken_all(trainer.args):
            trainer.state.max_steps = state["last_step"]
        self.load_learned(trainer, state)

    def load_learned(self, trainer: Any, state: dict[str, Any]) -> None:
        """Put back what is learned beside the policy: the weight of the entropy bonus, and a synchronized reference."""
        if trainer.use_adaptive_entropy:  # else a new value counts
            trainer.entropy_coef = state["entropy_coef"]
        if "reference" in state and trainer.ref_model is not None:
            with torch.no_grad():
                for weight, saved in zip(trainer.ref_model.parameters(), state["reference"], strict=True):
                    own_shard(weight).copy_(saved)

    def load(self, trainer: Any, checkpoint: Path, device: torch.device) -> None:
        """Continue from this process's part of a checkpoint, or from all parts of another number of processes.

        Raises:
            ValueError: the loss depends on the number of processes, and it is another one.
        """
        files = sorted(checkpoint.glob("grpo_state*.pt"), key=lambda file: int(f"0{file.stem[11:]}"))
        rank, processes = trainer.accelerator.process_index, trainer.accelerator.num_processes
        if len(files) == processes:
            self.load_state_dict(trainer, torch.load(files[rank], map_location=device, weights_only=True))
        elif files:
            traits = self.step_update.traits
            if traits.by_slice or traits.router or not traits.divisible:
                raise ValueError(f"this loss depends on the number of processes: {len(files)} before, {processes} now")
            states = [torch.load(file, map_location=device, weights_only=True) for file in files]
            self.load_state_dict(trainer, resharded(states, rank, processes))
            set_seed(trainer.args.seed + int(checkpoint.name[11:]), device_specific=True)  # of those that are new

    def begin_epoch(self, trainer: Any) -> None:
        """Continue the sum of the losses since the last log, and log and save as often as is configured now."""
        trainer.state.compute_steps(trainer.args, trainer.state.max_steps)  # else as often as the checkpoint's run
        if self.unlogged:
            trl.continue_losses(trainer, self.unlogged)
            self.unlogged = None

    @contextmanager
    def sealed(self, trainer: Any, folder: Path) -> Iterator[None]:
        """While inside, a checkpoint is written; it gets our state, and is sealed before older ones are deleted.

        Its folder is emptied first: a killed process may have left half of one there, with states of other processes.
        Half of one is removed. Steps tell which are older, as a clock may be set back. One without an optimizer
        (`save_only_model`) is not sealed: nothing can continue from it.
        """
        rotate, complete = transformers.trainer.rotate_checkpoints, False

        def seal_first(**options: Any) -> None:
            nonlocal complete
            (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle, perhaps with secrets, nobody reads it
            if not trainer.args.save_only_model:
                seal(folder)
            complete = True
            rotate(**options | {"use_mtime": False})

        try:
            if is_main_process():
                for left in folder.glob("*"):
                    remove(left)
            trainer.accelerator.wait_for_everyone()
            if not trainer.args.save_only_model:
                folder.mkdir(parents=True, exist_ok=True)
                torch.save(self.state_dict(trainer), state_file(trainer, folder))
                trainer.accelerator.wait_for_everyone()  # until each has written its part
            with patched("transformers.trainer:rotate_checkpoints", seal_first):
                yield
        except Exception:
            if not complete and trainer.args.should_save:  # half of one would only fill the disk
                shutil.rmtree(folder, ignore_errors=True)
            raise


def own_shard(weight: torch.Tensor) -> torch.Tensor:
    """Return the part of a weight that this process holds: all of it, unless FSDP2 or ZeRO-3 shards it."""
    if isinstance(weight, DTensor):
        return weight.to_local().detach()
    return getattr(weight, "ds_tensor", weight).detach()


def state_file(trainer: Any, folder: Path) -> Path:
    """Return the file in a checkpoint that has this process's part of `state_dict`."""
    several = trainer.accelerator.num_processes > 1
    return folder / (f"grpo_state_{trainer.accelerator.process_index}.pt" if several else "grpo_state.pt")


def keep_steps(trainer: Any) -> None:
    """After an exception, write a checkpoint of the completed steps, unless there is one.

    Not where one of several processes failed: each has a part of a checkpoint.
    """
    done = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
    is_kept = done.exists() if trainer.args.save_only_model else is_sealed(done)
    if trainer.state.global_step and not is_kept and trainer.accelerator.num_processes == 1:
        try:
            trl.save_checkpoint(trainer)
        except Exception:  # what broke the run may break this too, and is what has to be reported
            log.exception("no checkpoint of step %d could be written", trainer.state.global_step)


def load_weights(trainer: Any, checkpoint: Path, load: Callable[[], None]) -> None:
    """Load the weights of a checkpoint, also of a policy that is saved under other names than its weights have.

    Many policies that see images are; transformers' trainer skips such weights with a warning, and would continue
    from those that the run began with.

    Args:
        load: does it as transformers' trainer.
    """
    file = checkpoint / f"{FSDP_MODEL_NAME}.bin"
    if trainer.accelerator.is_fsdp2 and getattr(trainer.model, "is_quantized", False) and file.exists():
        load_trained(trainer.model, file)
        return
    if trainer.is_fsdp_enabled or names_in(checkpoint) <= trainer.model.state_dict().keys():
        load()
        return
    dtype = max((weight.dtype for weight in trainer.model.parameters()), key=lambda kind: kind.itemsize)
    saved = type(trainer.model).from_pretrained(checkpoint, dtype=dtype)
    trainer.model.load_state_dict(saved.state_dict())


@torch.no_grad()
def load_trained(model: torch.nn.Module, file: Path) -> None:
    """Load the weights that are trained of a policy that FSDP2 shards, from a file with all of them unsharded.

    accelerate loads a quantized base too, and fails because of the tensors that bitsandbytes saves beside its weights.
    """
    saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            full = saved[name].to(weight.device)
            weight.copy_(distribute_tensor(full, weight.device_mesh, weight.placements))


def names_in(checkpoint: Path) -> set[str]:
    """Return the names of the weights in a checkpoint; none where it has an adapter."""
    if (index := checkpoint / SAFE_WEIGHTS_INDEX_NAME).exists():
        return set(json.loads(index.read_bytes())["weight_map"])
    if not (file := checkpoint / SAFE_WEIGHTS_NAME).exists():
        return set()
    with safe_open(file, "pt") as weights:
        return set(weights.keys())


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
            trl.save_weights(trainer, str(partial), weights)
    else:
        trainer.save_model(str(partial))
    trainer.accelerator.wait_for_everyone()
    if is_main_process():
        (partial / "training_args.bin").unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        settle(partial, folder)


def resharded(states: Sequence[State], rank: int, processes: int) -> State:
    """Return the state of a process among `processes` from those of all processes of a checkpoint.

    A limit on what is computed at once is the lowest of all. Everything else but the completions of a generation is
    the same on each process.
    """
    first, buffers = states[0], [state["buffer"] for state in states]
    limits = [state["rollouts"].get("completions_at_once") for state in states]
    rollouts = first["rollouts"] | {"completions_at_once": min(filter(None, limits), default=None)}
    if rank and rollouts.get("in_flight"):  # rank 0 has them
        rollouts["in_flight"] = rollouts["in_flight"] | {"finished": [], "again": []}
    most_careful = min(states, key=lambda state: state["step_update"]["budget"]["tokens"])
    return first | {
        "rollouts": rollouts,
        "step_update": most_careful["step_update"],
        "step": first["step"] * len(states) // processes if buffers[0] else 0,  # 0, as any beginning of a generation
        "buffer": dealt(buffers, rank, processes) if buffers[0] else None,
        "unlogged": (fmean(state["unlogged"][0] for state in states), first["unlogged"][1]),
    }


def dealt(buffers: Sequence[Sequence[Batch]], rank: int, processes: int) -> list[Batch]:
    """Return the slices that a process gets of a generation, so that each step has the same slices as before.

    Args:
        buffers: the slices of each process, in the order of the steps.
    """
    slices = padded_alike([part for at_once in zip(*buffers, strict=True) for part in at_once])
    return slices[rank::processes]
