"""Private names of TRL's and transformers' trainers, each in a function that is called after its purpose.

Nothing else in this package touches one, but `exact.py`, which overrides methods. Written for TRL 1.16;
`tests/trl_contract.py` shows what a new version has changed. `trainer` is an `ExactGRPOTrainer` everywhere.
"""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Trainer
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import pad

from grpo.trainer.batch import Batch
from grpo.utils.patching import patched, replaced

# A step: its slices, its time, what a checkpoint needs of it


def next_slice(trainer: Any, inputs: Any) -> Batch:
    """Return the next slice of the rollouts, which TRL makes once for several slices, or for several steps."""
    return dict(trainer._prepare_inputs(inputs))


def end_slice(trainer: Any, seconds: float) -> None:
    """Count a slice and its time, as TRL's `training_step`; the last of a step logs the time of all."""
    trainer._step += 1
    trainer._current_train_step_time += seconds
    if trainer.accelerator.sync_gradients:
        trainer.note({"step_time": trainer._current_train_step_time})
        trainer._current_train_step_time = 0.0


def entropies_again(trainer: Any) -> Callable[[], None]:
    """Return a function that forgets the entropies counted from now on, for an update that starts again."""
    return partial(setattr, trainer, "_entropy_window_stats", trainer._entropy_window_stats)


def state_dict(trainer: Any) -> dict[str, Any]:
    """Return what the next steps depend on, and transformers does not save."""
    every, logs = trainer.args.steps_per_generation * trainer.num_iterations, trainer._logs
    return {
        "step": trainer._step,
        # the completions of a generation that later steps use too
        "buffer": trainer._buffered_inputs if trainer._step % every else None,
        "unlogged": (float(trainer._tr_loss), trainer._globalstep_last_logged),
        "metrics": {name: list(values) for name, values in trainer._metrics["train"].items()},
        "logs": {name: list(logs[name]) for name in ("prompt", "completion", "advantages")},
        "rewards": {name: list(values) for name, values in logs["rewards"].items()},
        "extra": {name: list(values) for name, values in logs["extra"].items()},
    }


def load_state_dict(trainer: Any, state: Mapping[str, Any]) -> None:
    """Continue with what `state_dict` has returned, but for the losses, see `continue_losses`."""
    trainer._step, trainer._buffered_inputs = state["step"], state["buffer"]
    trainer._metrics["train"].update(state["metrics"])
    for name, values in state["logs"].items():
        trainer._logs[name].extend(values)
    for kind in ("rewards", "extra"):
        for name, values in state[kind].items():
            trainer._logs[kind][name].extend(values)


def continue_losses(trainer: Any, unlogged: tuple[float, int]) -> None:
    """Continue the sum of the losses since the last log, and that log's step."""
    loss, trainer._globalstep_last_logged = unlogged
    trainer._tr_loss += loss


def save_checkpoint(trainer: Any) -> None:
    """Write a checkpoint of the steps so far."""
    trainer._save_checkpoint(trainer.model, None)


def load_weights(trainer: Any, checkpoint: str) -> None:
    """Load the weights of a checkpoint."""
    trainer._load_from_checkpoint(checkpoint)


def drop_rollouts(trainer: Any) -> None:
    """Have the next slice begin with new rollouts."""
    trainer._buffered_inputs = None


def halve_learning_rate(trainer: Any) -> None:
    """Halve the learning rate of the next steps; a checkpoint has it with the schedule."""
    schedule = trainer.lr_scheduler
    schedule.base_lrs = [rate / 2 for rate in schedule.base_lrs]
    schedule._last_lr = [rate / 2 for rate in schedule._last_lr]
    groups = trainer.optimizer.param_groups
    for group, base, rate in zip(groups, schedule.base_lrs, schedule._last_lr, strict=True):
        group["initial_lr"], group["lr"] = base, rate


def save_weights(trainer: Any, folder: str, weights: dict[str, torch.Tensor]) -> None:
    """Save these weights for `from_pretrained`."""
    trainer._save(folder, state_dict=weights)


def score(trainer: Any, model: Any, ids: torch.Tensor, mask: torch.Tensor, length: int, **options: Any) -> Any:
    """Return log-probabilities, entropies and the routers' loss of completions, as TRL calls for them."""
    return trainer._get_per_token_logps_and_entropies(model, ids, mask, length, **options)


def scored_by(trainer: Any, scores: Callable[..., Any]) -> AbstractContextManager[None]:
    """Return a context in which `scores` scores completions; its first argument is the trainer's own method."""
    name = "_get_per_token_logps_and_entropies"
    return replaced(trainer, name, partial(scores, getattr(trainer, name)))


def head_scores(only_labels: bool) -> AbstractContextManager[None]:
    """Return a context in which TRL's head looks for the tokens that have labels, and scores them alone, or scores all.

    The head of a GPU looks, while the host waits.
    """
    return patched("trl.trainer.utils:_use_triton", lambda device: only_labels)


def checkpointed_by(layer: Any, checkpoint: Callable[..., Any]) -> AbstractContextManager[None]:
    """Return a context in which `checkpoint` calls a layer; its first argument is the layer's own checkpointing."""
    name = "_gradient_checkpointing_func"
    return replaced(layer, name, partial(checkpoint, getattr(layer, name)))


def has_entropy_bonus(trainer: Any) -> bool:
    """Return whether the loss has an entropy bonus."""
    return trainer._entropy_bonus_enabled


def synchronize_gradients(accelerator: Any, wanted: bool) -> None:
    """Have the next backward pass average the gradients of all processes, or not."""
    accelerator.gradient_state._set_sync_gradients(wanted)


# Generation: prompts, tools and environments, the model


def sees_images(trainer: Any) -> bool:
    """Return whether the policy is a vision-language model."""
    return trainer._is_vlm


def image_tokens(trainer: Any) -> set[int]:
    """Return the tokens in whose places a policy sees images and videos."""
    tokens = (getattr(trainer.processing_class, "image_token_id", None), trainer._video_pad_token_id)
    return {token for token in tokens if token is not None}


def tokenizer(trainer: Any) -> Any:
    """Return the tokenizer, which the processor of a vision-language model holds."""
    return trainer._tokenizer


def end_tokens(trainer: Any) -> set[int]:
    """Return the tokens that end a completion; one that ends with another was truncated."""
    return {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}


def tokenize(trainer: Any, prompts: list) -> tuple[list[list[int]], list | None]:
    """Return the tokens of prompts, and their images."""
    ids, images, _ = trainer._tokenize_prompts(prompts)
    return ids, images


def parses_by(parse: Callable[..., Any]) -> AbstractContextManager[None]:
    """Return a context in which `parse` reads the calls of tools."""
    return patched("trl.trainer.grpo_trainer:parse_response", parse)


def generate(trainer: Any, prompts: list, parse: Callable[..., Any]) -> Any:
    """Return what TRL's `_generate` returns, whose calls of tools `parse` reads."""
    with parses_by(parse):
        return trainer._generate(prompts)


@contextmanager
def model_for_generation(trainer: Any) -> Iterator[Any]:
    """While inside, the policy is unwrapped, with weights that FSDP or ZeRO-3 has gathered where TRL gathers them."""
    unwrapped = unwrap_model_for_generation(
        trainer.model_wrapped,
        trainer.accelerator,
        gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
        generation_kwargs=trainer.generation_kwargs,
        gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
    )
    gathered = trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False)
    with unwrapped as model, torch.no_grad(), gathered:
        yield model


def model_inputs(trainer: Any, prompts: list[list[int]], fields: Batch, with_tool_images: bool) -> Batch:
    """Return the model's inputs for prompts, padded on the left, and the tensors of their images, as TRL does."""

    def padded(rows: list[list[int]], value: int) -> torch.Tensor:
        tensors = [torch.tensor(row) for row in rows]
        return pad(tensors, value, padding_side="left", pad_to_multiple_of=trainer.pad_to_multiple_of)

    ids = padded(prompts, trainer._tokenizer.pad_token_id)
    batch = {"input_ids": ids, "attention_mask": padded([[1] * len(prompt) for prompt in prompts], 0)}
    batch |= {key: padded(value, 0) if isinstance(value, list) else value for key, value in fields.items()}
    if trainer._is_vlm and trainer.tools and with_tool_images:
        kinds = torch.zeros_like(ids)
        for kind, token in ((1, trainer._image_pad_token_id), (2, trainer._video_pad_token_id)):
            if token is not None:
                kinds[ids == token] = kind
        batch["mm_token_type_ids" if "image_grid_thw" in batch else "token_type_ids"] = kinds
    return Trainer._prepare_inputs(trainer, batch)


def environments_of(trainer: Any, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return an instance of each row's environment, from TRL's pool, which grows by those that it lacks.

    Raises:
        ValueError: a row names an environment that the trainer was not given.
    """
    names = [row.get("environment") if trainer._multi_environment else None for row in rows]
    if unknown := [name for name in names if name not in trainer.environment_factories]:
        raise ValueError(f"environment={unknown[0]!r}: expected one of {list(trainer.environment_factories)}")
    trainer._batch_environments = names
    taken: list[Any] = []
    used = dict.fromkeys(names, 0)
    for name in names:
        pool = trainer._environment_pool[name]
        if used[name] == len(pool):
            pool.append(trainer.environment_factories[name]())
        taken.append(pool[used[name]])
        used[name] += 1
    return taken


def has_several_environments(trainer: Any) -> bool:
    """Return whether the column `environment` of the data names the environment of each row."""
    return trainer._multi_environment


def bind_tools(trainer: Any, methods: Sequence[list[Any]]) -> None:
    """Give the trainer the tools of each row, the methods of its environment among them."""
    kinds: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for of_row in methods:
        tools = [*trainer._standalone_tools, *of_row]
        for awaited, kind in enumerate(kinds):
            kind.append({tool.__name__: tool for tool in tools if inspect.iscoroutinefunction(tool) == awaited})
    trainer._sync_tool_dicts, trainer._async_tool_dicts = kinds


def load_engine(trainer: Any) -> None:
    """Give the engine the policy's weights, unless it has them."""
    if trainer.state.global_step != trainer._last_loaded_step:
        trainer.vllm_generation.sync_weights()
        trainer._last_loaded_step = trainer.state.global_step


def detached(trainer: Any, accelerator: Any, processing_class: Any, environments: dict[str, list[Any]]) -> Any:
    """Return a copy of a trainer whose rollouts change nothing of the trainer.

    Args:
        accelerator: of the copy.
        processing_class: likewise.
        environments: TRL's pool of instances by the name of the environment.
    """
    copied = copy.copy(trainer)
    copied.accelerator, copied.processing_class = accelerator, processing_class
    copied.model = SimpleNamespace(training=True, config=trainer.model.config)  # also while the policy is evaluated
    copied.state = copy.copy(trainer.state)
    copied._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    copied._pending_extra_logs, copied._pending_metrics = defaultdict(list), defaultdict(list)
    copied._tokenizer = getattr(processing_class, "tokenizer", processing_class)
    copied._environment_pool = environments
    return copied


# Rewards, columns, metrics


def calculate_rewards(trainer: Any, rows: list, prompts: list, completions: list, ids: list) -> torch.Tensor:
    """Return the rewards of the completions of all processes, (completions, rewards)."""
    return trainer._calculate_rewards(rows, prompts, completions, ids)


def log_column(trainer: Any, name: str, values: list) -> None:
    """Log a column of the next completions, or of some of them."""
    trainer._log_completion_extra(name, values)


def take_columns(trainer: Any) -> dict[str, list[Any]]:
    """Return the columns that were logged since the last batch, and forget them."""
    columns, trainer._pending_extra_logs = trainer._pending_extra_logs, defaultdict(list)
    return columns


def forget_logged(trainer: Any) -> None:
    """Forget the columns and the metrics that rewards have logged since the last batch."""
    trainer._pending_extra_logs.clear()
    trainer._pending_metrics.clear()


def log_metric(trainer: Any, name: str, values: Sequence[float]) -> None:
    """Log values, of which TRL logs the mean over all processes with the next batch."""
    trainer._pending_metrics[name] += values


def logged_metrics(trainer: Any) -> dict[str, list[float]]:
    """Return the values that were logged since the last batch."""
    return dict(trainer._pending_metrics)


def set_tokens_seen(trainer: Any, count: int) -> None:
    """Log the number of tokens, of prompts and completions, that the training has seen."""
    trainer.state.num_input_tokens_seen = count
    trainer._metrics["train"]["num_tokens"] = [count]


def logged_advantages(trainer: Any) -> Any:
    """Return the advantages that wait for the next log, which may be changed: the newest, as many as a table has."""
    return trainer._logs["advantages"]


@contextmanager
def own_metrics(trainer: Any) -> Iterator[dict[str, list[float]]]:
    """While inside, the metrics of a training go into the dictionary that this yields."""
    metrics: dict[str, list[float]] = defaultdict(list)
    with replaced(trainer, "_metrics", {"train": metrics}):
        yield metrics


@contextmanager
def without_metrics(trainer: Any) -> Iterator[None]:
    """Keep what is generated inside out of the metrics."""
    seen = trainer.state.num_input_tokens_seen
    try:
        with replaced(trainer, "_metrics", {"train": defaultdict(list), "eval": defaultdict(list)}):
            yield
    finally:
        trainer.state.num_input_tokens_seen = seen


class Ended:
    """An environment whose episode is over."""

    def reset(self, **row: Any) -> None:
        """Observe nothing."""


def assemble(
    trainer: Any, rows: list, generated: tuple, rewards: torch.Tensor, columns: Mapping[str, list], stock: Callable
) -> Batch:
    """Return TRL's batch of finished completions: padding, images, log-probabilities, metrics and tables.

    Args:
        rows: of this process: a prompt and the name of its environment.
        generated: as `_generate` returns it.
        rewards: of the completions of all processes, (completions, rewards).
        columns: of this process's completions.
        stock: TRL's `_generate_and_score_completions`.
    """
    table = trainer._logs["extra"]
    for name in {**dict.fromkeys(table), **columns}:  # a table has all columns or none of a row
        trainer._log_completion_extra(name, columns.get(name, [None] * len(rows)))
    with ExitStack() as stack:
        stack.enter_context(replaced(trainer, "_generate", lambda prompts: generated))
        stack.enter_context(replaced(trainer, "_calculate_rewards", lambda *_: rewards))
        if trainer.environment_factories is not None:
            over = dict.fromkeys(trainer.environment_factories, Ended)
            stack.enter_context(replaced(trainer, "environment_factories", over))
            stack.enter_context(replaced(trainer, "_environment_pool", defaultdict(list)))
            stack.enter_context(replaced(trainer, "environments", None))
        batch = stock(rows)
    for values in table.values():  # a column that begins after other rows were logged
        values.extendleft([None] * (len(trainer._logs["prompt"]) - len(values)))
    return batch
