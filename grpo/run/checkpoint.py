"""The checkpoint that a run continues from."""

from pathlib import Path

from rich.console import Console

from grpo.config.nodes import why_routers_fixed
from grpo.config.resolve import Resolved
from grpo.planning.from_config import find_shape
from grpo.planning.hub_config import shape_of
from grpo.rundir.files import read_json
from grpo.rundir.resume import differences, is_auto, named_checkpoint, processes_of
from grpo.utils.distributed import agreed, is_main_process, world_size
from grpo.utils.errors import ConfigError
from grpo.utils.spoken import shown

NUMBERS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Fields of a `Shape` in which weights of another architecture differ."""


def checkpoint_for(settings: Resolved, run_dir: Path, console: Console) -> Path | None:
    """Return the checkpoint to resume from, if there is one, and say so.

    Raises:
        ConfigError: one was asked for by name and is not there, it is that of another run than this, or of another
            model, or it leaves no step to train.
    """
    resume_from = settings.train.resume_from_checkpoint
    # read whole, by one process
    name = agreed("checkpoint", lambda: str(named_checkpoint(resume_from, run_dir) or ""))
    checkpoint = Path(name) if name else None
    agreed("fit", lambda: check_fits(settings, checkpoint, run_dir) if checkpoint else None)
    # before that process writes its configuration there
    other = agreed("differences", lambda: differences(settings.config, checkpoint) if checkpoint else None)
    if checkpoint and other:
        if is_auto(resume_from):
            raise ConfigError(
                f"{shown(checkpoint)} is of a run with {other}; "
                f"train.resume_from_checkpoint={shown(checkpoint)} continues it all the same"
            )
        where = f"the weights of {shown(checkpoint)}, of a run with {other}"
        console.print(f"this run continues {where}", soft_wrap=True)
    if checkpoint and (before := processes_of(checkpoint)) not in (None, world_size()):
        if why := why_routers_fixed(settings.config.train, find_shape(settings.config.model).num_experts):
            where = f"{shown(checkpoint)} is of {before} processes instead of {world_size()}"
            raise ConfigError(f"{where}: {why}")
        console.print(f"processes: {before} before, {world_size()} now", soft_wrap=True)
    if resume_from:
        text = f"resuming from {shown(checkpoint)}" if checkpoint else "nothing to resume: starting a new run"
        console.print(text, soft_wrap=True)
    if checkpoint is None and is_main_process():
        (run_dir / "evaluation.json").unlink(missing_ok=True)  # of a run that left no checkpoint
    return checkpoint


def check_fits(settings: Resolved, checkpoint: Path, run_dir: Path) -> None:
    """Raise a ConfigError if a checkpoint has weights of another architecture, or leaves a new run no step.

    A run that has its own last step is only completed.
    """
    steps, done = settings.train.max_steps, read_json(checkpoint / "trainer_state.json").get("global_step", 0)
    if 0 < steps <= done and not checkpoint.parent.samefile(run_dir):
        raise ConfigError(
            f"train.max_steps={steps}: {shown(checkpoint)} has {done} steps, so that none is left; give more"
        )
    if not (config := read_json(checkpoint / "config.json")):
        return  # of an adapter
    of_checkpoint, of_policy = shape_of(config), find_shape(settings.model)
    for name in NUMBERS:
        if (old := getattr(of_checkpoint, name)) != (new := getattr(of_policy, name)):
            raise ConfigError(
                f"{shown(checkpoint)} has the weights of another model than {settings.model.model_name_or_path}: "
                f"{name}={old} instead of {new}; choose the model of its run"
            )


def continued(checkpoint: Path | None, run_dir: Path) -> str | None:
    """Return the checkpoint of another run that this one begins with."""
    return None if checkpoint is None or checkpoint.parent.samefile(run_dir) else shown(checkpoint)
