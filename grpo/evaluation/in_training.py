"""Evaluating the policy of a trainer on held-out problems, greedily, with the generator of its rollouts."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.console import Console
from trl.models import unwrap_model_for_generation

from grpo.data.images import prompt_of
from grpo.evaluation.loop import Decoding, evaluate, own_file
from grpo.generation.local import Completer, Generate
from grpo.generation.vllm_engine import BATCH, answer
from rewards.isolation.reward import Reward
from rewards.text import text_of


def evaluate_policy(
    trainer: Any,
    held_out: Dataset,
    grader: Reward,
    length: int,
    batch_size: int,
    difficulty: str | None,
    file: Path,
    console: Console,
) -> dict[str, Any]:
    """Evaluate the policy of `trainer` as it is now; see `grpo.evaluation.loop.evaluate`.

    Args:
        trainer: an `ExactGRPOTrainer`.
        length: tokens of the longest completion.
        batch_size: completions that transformers generates at once; vLLM takes `BATCH`; with an
            environment, at most as many as a rollout.
        file: gets the completions as JSON lines, in place of its former content.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    was_training = model.training
    model.eval()
    own_file(file).unlink(missing_ok=True)
    generate: Generate = Completer(model, trainer.processing_class, length)
    asked: Callable[[dict[str, Any]], Any] = prompt_of
    if trainer.use_vllm:
        trainer.vllm_generation.sync_weights()
        generate, batch_size = partial(answer, trainer), BATCH
    if trainer.tools:
        generate, asked = partial(converse, trainer), dict
    if trainer.environment_factories:  # TRL keeps them for the rollouts: no more than these use at once
        batch_size = min(batch_size, trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation)
    whole: Any = nullcontext()
    if trainer.is_deepspeed_enabled and not trainer.use_vllm:  # as TRL generates rollouts
        gather = trainer.args.ds3_gather_for_generation
        whole = unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator, gather_deepspeed3_params=gather)

    def in_phase(prompts: list[Any], temperature: float, seeds: list[int]) -> list[str]:
        # autocast as training will wrap the model, so that both evaluations compute alike
        with trainer.memory.of("evaluate"), trainer.accelerator.autocast():
            return generate(prompts, temperature, seeds)

    with whole:
        result = evaluate(
            generate=in_phase,
            problems=held_out,
            grader=grader,
            decoding=Decoding(length),
            file=file,
            batch_size=batch_size,
            console=console,
            difficulty=difficulty,
            asked=asked,
        )
    model.train(was_training)
    return result


def converse(trainer: Any, rows: list[Any], temperature: float, seeds: list[int]) -> list[str]:
    """Return the policy's last message to each row's prompt after its tool calls, if it has the last word."""
    assert temperature == 0.0
    return [text_of(messages) for messages in trainer.answers(rows)]
