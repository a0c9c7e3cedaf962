"""Builds the rollouts of a trainer from its options."""

import sys
from pathlib import Path
from typing import Any

from torch.nn import Module

from grpo.config.options import Engine, Mixture, Rollout
from grpo.data.images import View
from grpo.data.stream import Stream
from grpo.generation.at_once import AtOnce
from grpo.generation.vllm_engine import compute_type
from grpo.trainer.rollout import episodes
from grpo.trainer.rollout.degenerate import Degenerate
from grpo.trainer.rollout.dynamic_sampling import DynamicSampling
from grpo.trainer.rollout.engine_check import EngineCheck
from grpo.trainer.rollout.filtered import Filtered
from grpo.trainer.rollout.in_flight import InFlight
from grpo.trainer.rollout.mixed_order import order_of
from grpo.trainer.rollout.problem_order import ProblemOrder
from grpo.trainer.rollout.rollouts import Rollouts
from grpo.trainer.rollout.thumbnails import Thumbnails
from grpo.trainer.rollout.tool_calls import Counts, ToolCalls
from grpo.utils.diagnosis import sampling_filters, why_biased, why_not_best_of, why_not_generated, why_not_stale


def rollouts_of(
    trainer: Any,
    engine: Engine,
    rollout: Rollout,
    stream: Stream | None,
    view: View | None,
    mixture: Mixture | None,
    keep_columns: bool,
    tool_counts: Counts,
    correct: str | None,
    numbered: bool,
) -> Rollouts:
    """Return the rollouts of a trainer, given the groups `engine` and `rollout` of the configuration.

    Args:
        trainer: with all that TRL's constructor sets.
        stream: as of `Rollouts`.
        view: likewise.
        mixture: the tasks of the data; None for a single task.
        keep_columns: as of `Rollouts`.
        tool_counts: returns calls and errors of this process so far, by tool.
        correct: name of the reward that is 1 for a correct completion; the first if None.
        numbered: as of `Rollouts`.

    Raises:
        ValueError: two of these features do not work together, or not with the arguments of TRL.
    """
    check_features(trainer, engine, rollout, mixture)
    corrected = trainer.use_vllm and trainer.rollout_func is None and trainer.vllm_importance_sampling_correction
    chooses = rollout.dynamic_sampling or rollout.prioritize or mixture or engine.staleness
    by = (rollout, stream, correct or trainer.reward_func_names[0], mixture)
    own = episodes.BY_TRL if trainer.environment_factories else ()
    names = [*(tool.__name__ for tool in trainer.tools or ()), *own]
    computed, device = compute_type(trainer.accelerator, trainer.model), trainer.accelerator.device.type
    dtype = "FP8" if engine.quantization else computed
    files = Path(trainer.args.output_dir) / "completions" / "images"
    return Rollouts(
        trainer.clock,
        trainer.memory,
        EngineCheck(dtype, device, of_script=trainer.rollout_func is not None),
        AtOnce(rollout.completions_at_once),
        Thumbnails(files, trainer.accelerator.num_processes),
        keep_columns=keep_columns,
        sampling=sampling_of(trainer, *by) if chooses else None,
        in_flight=InFlight(engine.staleness) if engine.staleness else None,
        tool_calls=ToolCalls(tool_counts, names) if trainer.tools else None,
        stream=stream,
        view=view,
        filtered=Filtered() if corrected and sampling_filters(trainer.args) else None,
        pass_at_k=rollout.pass_at_k,
        degenerate=None if rollout.max_repetition is None else Degenerate(rollout.max_repetition),
        numbered=numbered,
        limits=mixture.limits if mixture else {},
    )


def check_features(trainer: Any, engine: Engine, rollout: Rollout, mixture: Mixture | None) -> None:
    """Raise a ValueError if two features do not work together; arguments as of `rollouts_of`."""
    columns = getattr(trainer.problems, "column_names", None) or ()
    images = not {"image", "images"}.isdisjoint(columns)
    by_model = trainer.rollout_func is not None or any(isinstance(func, Module) for func in trainer.reward_funcs)
    traits = {"images": images, "in_process": by_model}
    if engine.staleness and (reason := why_not_stale(trainer.args, **traits)):
        raise ValueError(f"engine.staleness={engine.staleness}: {reason}")
    if reason := why_not_best_of(trainer.args, rollout):
        raise ValueError(reason)
    by_vllm = trainer.use_vllm and trainer.rollout_func is None
    if by_vllm and (reason := why_not_generated(trainer.args) or why_biased(trainer.args)):
        raise ValueError(reason)


def sampling_of(
    trainer: Any, rollout: Rollout, stream: Stream | None, correct: str, mixture: Mixture | None
) -> DynamicSampling:
    """Return the dynamic sampling of a trainer, in the place of its data loader. Arguments as of `rollouts_of`.

    Raises:
        ValueError: there are several environments.
    """
    if trainer._multi_environment and not mixture:
        raise ValueError("rollout.dynamic_sampling, rollout.prioritize and engine.staleness: work with one environment")
    if stream and mixture:
        raise ValueError("mixture: its tasks are read whole, and a stream has no end")
    if stream and rollout.prioritize:
        raise ValueError("rollout.prioritize: it takes problems again, and a stream has none twice")
    how = (trainer.args.seed, trainer.shuffle_dataset, rollout.prioritize)
    order = ProblemOrder(sys.maxsize, *how) if stream else order_of(trainer.train_dataset, mixture, *how)
    weights = dict(zip(trainer.reward_func_names, trainer.reward_weights.tolist(), strict=True))
    return DynamicSampling(rollout, order, trainer.accelerator.num_processes, weights, correct, mixture)
