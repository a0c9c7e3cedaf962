"""Evaluating the policy of a trainer on held-out problems, greedily, with the generator of its rollouts."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from trl.models import unwrap_model_for_generation

from grpo.evaluation.loop import Evaluation, evaluate
from grpo.generation.transformers.completer import Completer, Generate
from grpo.generation.vllm.engine import BATCH
from grpo.trainer import trl
from grpo.trainer.rollout.episodes import answers
from rewards.text import text_of


def evaluate_policy(trainer: Any, evaluation: Evaluation) -> dict[str, Any]:
    """Evaluate the policy of `trainer` as it is now; see `grpo.evaluation.loop.evaluate`.

    Args:
        trainer: an `ExactGRPOTrainer`.
        evaluation: its file is written anew; of `batch_size` vLLM takes `BATCH`, and an environment at most as many as
            a rollout.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    was_training = model.training
    model.eval()
    evaluation.own_file.unlink(missing_ok=True)
    length, template = evaluation.decoding.max_new_tokens, trainer.chat_template_kwargs
    generate: Generate = Completer(model, trainer.processing_class, length, template)
    if trainer.use_vllm:
        trainer.vllm_generation.sync_weights()
        generate = partial(answer, trainer, length=evaluation.decoding.max_new_tokens)
        evaluation = replace(evaluation, batch_size=BATCH)
    if trainer.tools:
        generate, evaluation = partial(converse, trainer), replace(evaluation, asked=dict)
    if trainer.environment_factories:  # TRL keeps them for the rollouts: no more than these use at once
        limit = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
        evaluation = replace(evaluation, batch_size=min(evaluation.batch_size, limit))
    scope: Any = nullcontext()
    if trainer.is_deepspeed_enabled and not trainer.use_vllm:  # as TRL generates rollouts
        gather = trainer.args.ds3_gather_for_generation
        scope = unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator, gather_deepspeed3_params=gather)

    def in_phase(prompts: list[Any], temperature: float, seeds: list[int]) -> list[str]:
        # autocast as training will wrap the model, so that both evaluations compute alike
        with trainer.memory.of("evaluate"), trainer.accelerator.autocast():
            return generate(prompts, temperature, seeds)

    with scope:
        result = evaluate(in_phase, evaluation)
    model.train(was_training)
    return result


def answer(
    trainer: Any, prompts: list[Any], temperature: float = 0.0, seeds: Sequence[int] = (), length: int | None = None
) -> list[str]:
    """Return the likeliest completion of each prompt, plain or conversational, by vLLM with the weights that it has.

    Args:
        trainer: an `ExactGRPOTrainer`.
        length: tokens after which a completion is truncated.
    """
    assert temperature == 0.0
    ids, images = trl.tokenize(trainer, prompts)
    completed = [completion[:length] for completion in trainer.vllm_generation.complete(ids, images)]
    return trl.tokenizer(trainer).batch_decode(completed, skip_special_tokens=True)


def converse(trainer: Any, rows: list[Any], temperature: float, seeds: list[int]) -> list[str]:
    """Return the policy's last message to each row's prompt after its tool calls, if it has the last word."""
    assert temperature == 0.0
    return [text_of(messages) for messages in answers(trainer, rows)]
