"""Builds the rollouts of a trainer from its options."""

import sys
from pathlib import Path
from typing import Any

from grpo.generation.transformers.continuous_batching import ContinuousBatching
from grpo.generation.vllm.colocated import compute_type
from grpo.options import Engine, Mixture, Rollout
from grpo.trainer import trl
from grpo.trainer.context import Context
from grpo.trainer.rollout import episodes
from grpo.trainer.rollout.async_rollouts import AsyncRollouts
from grpo.trainer.rollout.columns import LoggedColumns, Numbers
from grpo.trainer.rollout.completer import Completer
from grpo.trainer.rollout.degenerate import Degenerate
from grpo.trainer.rollout.dynamic_sampling import DynamicSampling
from grpo.trainer.rollout.engine_check import EngineCheck
from grpo.trainer.rollout.mixed_order import order_of
from grpo.trainer.rollout.problem_order import ProblemOrder
from grpo.trainer.rollout.rollouts import Rollouts
from grpo.trainer.rollout.sampler_mismatch import SamplerMismatch
from grpo.trainer.rollout.sampling import Source
from grpo.trainer.rollout.stages import Stage
from grpo.trainer.rollout.thumbnails import Thumbnails
from grpo.trainer.rollout.tool_calls import ToolCalls
from grpo.trainer.rollout.truncated_sampling import TruncatedSampling
from grpo.utils.diagnosis import sampling_filters


def rollouts_of(trainer: Any, engine: Engine, rollout: Rollout, mixture: Mixture | None, context: Context) -> Rollouts:
    """Return the rollouts of a trainer, which has all that TRL's constructor sets; arguments as of `ExactGRPOTrainer`.

    Raises:
        ValueError: two of these features do not work together, or not with the arguments of TRL.
    """
    filters = bool(sampling_filters(trainer.args))
    corrected = trainer.use_vllm and trainer.rollout_func is None and trainer.vllm_importance_sampling_correction
    dtype = "FP8" if engine.quantization else compute_type(trainer.accelerator, trainer.model)
    of_script, filtered = trainer.rollout_func is not None, filters and not corrected
    check = EngineCheck(dtype, trainer.accelerator.device.type, of_script, filtered)
    by_engine: list[Stage] = [TruncatedSampling()] if filters and corrected else []
    by_engine += [check] if trainer.use_vllm else []
    source = Source(context.stream)
    if rollout.dynamic_sampling or rollout.prioritize or mixture or engine.staleness:
        sampling = source = sampling_of(trainer, rollout, mixture, context)
        if engine.staleness:
            source = AsyncRollouts(engine.staleness, sampling, check)
    completer = Completer(
        ContinuousBatching(rollout.completions_at_once), context.view, mixture.limits if mixture else None
    )
    stages = stages_of(trainer, rollout, by_engine, context)
    return Rollouts(source, completer, stages, rollout.pass_at_k)


def stages_of(trainer: Any, rollout: Rollout, by_engine: list[Stage], context: Context) -> list[Stage]:
    """Return the features that act on the rollouts of a trainer, those of its engine among them.

    The other arguments are those of `rollouts_of`.
    """
    stages: list[Stage] = []
    if context.keep_columns:
        folder = Path(trainer.args.output_dir) / "completions" / "images"
        stages.append(LoggedColumns(Thumbnails(folder, trainer.accelerator.num_processes)))
    if rollout.max_repetition is not None:
        stages.append(Degenerate(rollout.max_repetition))
    stages += by_engine
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        stages.append(SamplerMismatch())
    if context.log_tokens:
        stages.append(Numbers())
    if trainer.tools:
        by_trl = episodes.BY_TRL if trainer.environment_factories else ()
        stages.append(ToolCalls(context.tool_counts, [*(tool.__name__ for tool in trainer.tools), *by_trl]))
    return stages


def sampling_of(trainer: Any, rollout: Rollout, mixture: Mixture | None, context: Context) -> DynamicSampling:
    """Return the dynamic sampling of a trainer, in the place of its data loader. Arguments as of `rollouts_of`.

    Raises:
        ValueError: there are several environments.
    """
    stream, correct = context.stream, context.correct or trainer.reward_func_names[0]
    if trl.has_several_environments(trainer) and not mixture:
        raise ValueError("rollout.dynamic_sampling, rollout.prioritize and engine.staleness: work with one environment")
    options = (trainer.args.seed, trainer.shuffle_dataset, rollout.prioritize)
    order = ProblemOrder(sys.maxsize, *options) if stream else order_of(trainer.train_dataset, mixture, *options)
    weights = dict(zip(trainer.reward_func_names, trainer.reward_weights.tolist(), strict=True))
    return DynamicSampling(rollout, order, trainer.accelerator.num_processes, weights, correct, mixture, stream)
