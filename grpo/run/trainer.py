"""The trainer of a resolved configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from omegaconf import DictConfig
from transformers import PrinterCallback
from trl import GRPOConfig

from grpo.config.batch import check_batch, check_whole_groups, completions, problems_taken
from grpo.config.mixture import mixture_of, scored_by
from grpo.config.resolve import Resolved
from grpo.config.schema import REWARD_MODEL, train_arguments
from grpo.config.secrets import is_secret
from grpo.data.rewards import load_reward_model
from grpo.data.task import Problems
from grpo.model import policy
from grpo.model.image_features import keep_image_features
from grpo.model.vision import detach_frozen_tower, freeze
from grpo.planning.sharding import Sharding, sharding_of
from grpo.tools.running import Tools
from grpo.trainer import ExactGRPOTrainer
from grpo.trainer.batch import check
from grpo.trainer.context import Context
from grpo.trainer.measurements import MemoryReadings
from grpo.utils.distributed import world_size
from grpo.utils.errors import ConfigError
from grpo.view.stream import NUMBER
from rewards.isolation.reward import Reward


def make_trainer(
    settings: Resolved,
    run_dir: Path,
    problems: Problems,
    processing_class: Any,
    rewards: Mapping[str, Reward],
    tools: Tools,
    memory: MemoryReadings | None = None,
) -> ExactGRPOTrainer:
    """Return the trainer of a resolved configuration.

    Raises:
        ConfigError: TRL, transformers or PEFT refused it.
    """
    dataset = dataset_of(settings.train, problems)
    comparing = [name for name, reward in rewards.items() if reward.compares and name in settings.reward]
    check_whole_groups(settings.train, comparing, world_size())
    model, peft, task, rewarded = settings.model, settings.peft, settings.task, settings.reward
    scorers, shares = scorers_of(task, rewarded, rewards), settings.engine.share_weights is True
    try:
        check(problems.view.fields() if problems.view else ())
        adapter = policy.peft_config(peft, model)  # before ZeRO-3, by TRL's arguments, divides what is made
        trainer = ExactGRPOTrainer(
            model=policy.without_weights(model) if shares else model.model_name_or_path,
            reward_funcs=[scorer for scorer, _ in scorers],
            reward_processing_classes=[tokenizer for _, tokenizer in scorers],
            args=GRPOConfig(
                output_dir=str(run_dir),
                reward_weights=[reward.get("weight", 1.0) for reward in rewarded.values()],
                disable_tqdm=True,
                **arguments_of(settings),
            ),
            train_dataset=dataset,
            eval_dataset=evaluated_by_trl(settings.train, problems),
            processing_class=processing_class,
            quantization_config=policy.quantization_config(peft),
            peft_config=adapter,
            update=settings.update,
            engine=settings.engine,
            rollout=settings.rollout,
            tools=tools.functions or None,
            environment_factory=tools.environment,
            mixture=mixture_of(task, settings.train, rewarded),
            context=context_of(settings, problems, tools, memory),
        )
    except (ValueError, TypeError, ImportError, NotImplementedError, OSError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if trainer.accelerator.num_processes != world_size() or (settings.train.fsdp and not trainer.sharded):
        raise ConfigError("shard: accelerate shards on GPUs only, and there are none here; use shard=none")
    used = trainer.args.model_init_kwargs or {}  # TensorBoard and others write them
    trainer.args.model_init_kwargs = {key: value for key, value in used.items() if not is_secret(key, value)}
    trainer.remove_callback(PrinterCallback)
    freeze(trainer.model, model.freeze, unused=peft is None and not task.images)
    detach_frozen_tower(trainer.model)
    if problems.view and not trainer.sharded:  # one process may not wait for another within the tower
        prompts = trainer.args.generation_batch_size // trainer.args.num_generations
        keep_image_features(trainer.model, most=(problems.most_images or 1) * -(-prompts // world_size()))
    return trainer


def context_of(settings: Resolved, problems: Problems, tools: Tools, memory: MemoryReadings | None) -> Context:
    """Return the surroundings of the trainer in a run."""
    grader = settings.task.eval.reward
    return Context(
        stream=problems.stream,
        view=problems.view,
        most_images=None if tools.functions or tools.environment else problems.most_images,
        memory=memory,
        keep_columns=True,
        log_tokens=settings.completions.tokens,
        tool_counts=tools.counts,
        correct=grader if grader in settings.reward else None,
    )


def dataset_of(train: DictConfig, problems: Problems) -> Dataset:
    """Return what the data loader gives: the problems with unopened images, or the numbers of those of a stream.

    Raises:
        ConfigError: there are too few problems for a batch.
    """
    if stream := problems.stream:
        check_batch(train, stream.up_to(completions(train, None) // train.num_generations))
        return Dataset.from_dict({NUMBER: range(problems_taken(train))})
    check_batch(train, len(problems.train))
    return problems.train.with_format(None)


def evaluated_by_trl(train: DictConfig, problems: Problems) -> Dataset | None:
    """Return what TRL evaluates every `train.eval_steps` steps, sampling as in training; None unless it is asked to.

    Raises:
        ConfigError: there are no held-out problems.
    """
    if train.eval_strategy in ("no", False):
        return None
    if problems.held_out is None:
        raise ConfigError(f"train.eval_strategy={train.eval_strategy}: needs held-out problems, task.eval.size=200")
    return problems.held_out.with_format(None)


def arguments_of(settings: Resolved) -> dict[str, Any]:
    """Return the arguments of `trl.GRPOConfig` in this process, but for those that follow from the run."""
    arguments = train_arguments(settings.train)
    for name in ("resume_from_checkpoint", "push_to_hub"):  # which the run does itself
        arguments.pop(name, None)
    user_init_kwargs = arguments.pop("model_init_kwargs", {})
    if settings.engine.share_weights is not True:
        arguments["model_init_kwargs"] = {**policy.model_init_kwargs(settings.model), **user_init_kwargs}
    if world_size() > 1 and not torch.accelerator.is_available() and not arguments.get("deepspeed"):
        arguments["use_cpu"] = True  # else accelerate takes each process for the only one
    if settings.task.dataset.get("streaming"):
        arguments["shuffle_dataset"] = False  # a stream shuffles by itself
    if backend := backend_of(settings.train, sharding_of(settings.config)):
        arguments["ddp_backend"] = backend
    return arguments


def backend_of(train: DictConfig, sharding: Sharding) -> str | None:
    """Return `train.ddp_backend`, with gloo beside NCCL where FSDP offloads to CPU, so that gradients can be clipped.

    accelerate adds gloo only for `accelerate launch`: its variables stand before the process group is made, and those
    of `fsdp_config` after it.
    """
    backend = train.get("ddp_backend")
    offloads = sharding.library == "fsdp" and sharding.offload_weights and not train.use_cpu
    return "cpu:gloo,cuda:nccl" if offloads and torch.cuda.is_available() and backend in (None, "nccl") else backend


def scorers_of(task: DictConfig, rewarded: DictConfig, rewards: Mapping[str, Reward]) -> list[tuple[Any, Any]]:
    """Return TRL's reward functions, each with its tokenizer if it is a reward model.

    In a mixture, a function gives None to completions of tasks that it does not score.

    Raises:
        ConfigError: a reward model cannot be loaded.
    """
    return [
        load_reward_model(str(name), options.kwargs)
        if options.fn == REWARD_MODEL
        else (rewards[str(name)].as_function(scored_by(task, str(name)) if task.tasks else None), None)
        for name, options in rewarded.items()
    ]
