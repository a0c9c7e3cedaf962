"""A run whose number of machines may change: `launch.nodes=2:4`."""

import math

from omegaconf import DictConfig

from grpo.config.batch import SLICES, completions, keep_batch, node_range
from grpo.config.facts import generator_of
from grpo.options import LOSS_MEANS, steps_in_backward
from grpo.utils.errors import ConfigError


def with_nodes(config: DictConfig, overrides: list[str], nodes: int) -> tuple[DictConfig, list[str]]:
    """Return a configuration and its overrides for so many machines of a range, with the batch of the least."""
    config = config.copy()
    changes = keep_batch(config.train, node_range(config)[0], nodes)
    config.launch.nodes = nodes
    return config, [*overrides, f"launch.nodes={nodes}", *changes]


def check_range(config: DictConfig) -> None:
    """Check that a run can change its number of machines, and that each number of them has the same batch.

    Raises:
        ConfigError: it cannot.
    """
    train, where, (least, most) = config.train, f"launch.nodes={config.launch.nodes}", node_range(config)
    if least == most:
        return
    if reason := why_fixed(config):
        raise ConfigError(f"{where}: {reason}")
    resume_from = train.resume_from_checkpoint
    if resume_from and resume_from not in ("auto", True):
        raise ConfigError(
            f"{where} train.resume_from_checkpoint={resume_from}: it continues from the newest checkpoint of its run "
            "directory each time; use train.resume_from_checkpoint=auto hydra.run.dir=…"
        )
    if config.plan.processes is not None:
        raise ConfigError(f"{where} plan.processes={config.plan.processes}: leave one of them out")
    numbers = range(least, most + 1)
    for key in SLICES:
        multiple = math.lcm(*numbers) // least
        if train[key] and train[key] % multiple:
            raise ConfigError(
                f"{where}: train.{key}={train[key]} is no multiple of {multiple}, so that each number of machines can "
                f"divide a batch: train.{key}={-(-train[key] // multiple) * multiple}"
            )
    for nodes in numbers:
        check_number(config, nodes, f"{where}: with {nodes} of them")


def check_number(config: DictConfig, nodes: int, when: str) -> None:
    """Check a number of machines of a range."""
    train, count = config.train.copy(), nodes * config.launch.processes
    keep_batch(train, node_range(config)[0], nodes)
    whole, size = completions(train, count), train.per_device_train_batch_size
    if whole % (size * count):
        raise ConfigError(
            f"{when}, {count} processes cannot share train.generation_batch_size={whole} in slices of {size}"
        )
    if whole // count % train.num_generations:  # some rewards compare a group, which is known once they are loaded
        raise ConfigError(
            f"{when}, a process generates {whole // count} completions, not whole groups of "
            f"train.num_generations={train.num_generations}: raise train.per_device_train_batch_size={size}"
        )


def why_fixed(config: DictConfig) -> str | None:
    """Return why a run cannot change its number of processes exactly; None if it can."""
    train, slices = config.train, "depends on the completions that are computed together on a process"
    colocated = generator_of(train) in ("colocated", "undecided")
    several = train.num_iterations > 1 or train.steps_per_generation or train.generation_batch_size
    reasons = {
        "train.deepspeed: DeepSpeed loads its state into as many processes as have saved it; use shard=fsdp2": (
            train.deepspeed
        ),
        f"train.loss_type={train.loss_type}: its mean {slices}; use dapo": LOSS_MEANS.get(train.loss_type) == "tokens",
        f"train.entropy_coef: an entropy bonus {slices}": train.entropy_coef or train.use_adaptive_entropy,
        f"train.top_entropy_quantile={train.top_entropy_quantile}: it {slices}": train.top_entropy_quantile < 1,
        f"train.optim={train.optim}: it steps for each slice": steps_in_backward(str(train.optim)),
        "train.sync_ref_model=true: FSDP2 saves the moving reference by process; use shard=none": (
            train.sync_ref_model and train.fsdp
        ),
        "update.gradients_on_host=true: it works with one process": config["update"].gradients_on_host,
        f"train.vllm_tensor_parallel_size={train.vllm_tensor_parallel_size}: it has to divide launch.processes="
        f"{config.launch.processes}": colocated and config.launch.processes % train.vllm_tensor_parallel_size,
        "task.images: images of a generation cannot move to other processes between its steps; leave out "
        "train.num_iterations, train.steps_per_generation and train.generation_batch_size": (
            config.task.images and several
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def why_routers_fixed(train: DictConfig, experts: int) -> str | None:
    """Return why a run of a policy with so many experts a layer keeps its number of processes; None if it need not."""
    if experts and train.router_aux_loss_coef != 0:
        return (
            "the loss of a mixture's routers depends on the completions that are computed together on a process; leave "
            "it out with train.router_aux_loss_coef=0"
        )
    return None
