"""Rounds of dynamic sampling: completions are generated, scored, and given to TRL as if generated at once."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from accelerate.utils import gather_object

from grpo.trainer.processes import own_part
from grpo.trainer.rollout.advantages import learned, zero_variance
from grpo.trainer.rollout.dynamic_sampling import Completion, Group, generation_metrics
from grpo.trainer.rollout.episodes import rollouts, without_metrics


def rows_of(trainer: Any, problems: Sequence[int], size: int) -> list[dict[str, Any]]:
    """Return the rows of this process's part of some problems, each as often as a group has completions."""
    with trainer.rollouts.clock.of("data"):
        return [trainer.problems[problem] for problem in own_part(trainer.accelerator, problems) for _ in range(size)]


def score_groups(trainer: Any, problems: Sequence[int], given: list[dict[str, Any]]) -> list[tuple[Group, bool]]:
    """Return the groups of some problems, of all processes, each with whether all of its rewards are equal.

    Args:
        trainer: an `ExactGRPOTrainer`.
        problems: of all processes.
        given: as of `rows_of`.
    """
    size, accelerator = trainer.num_generations, trainer.accelerator
    mine = [problem for problem in own_part(accelerator, problems) for _ in range(size)]
    with without_metrics(trainer):  # TRL's metrics are of what is trained on
        rows, prompts, found = rollouts(trainer, given)
        prompt_ids, ids, masks, messages, logps, *_ = found
        rewards = trainer._calculate_rewards(rows, prompts, messages, ids)
    columns, trainer._pending_extra_logs = trainer._pending_extra_logs, defaultdict(list)
    columns.pop("completion_id", None)  # that of the step's rows, of which these may be some
    optional = ([None] * len(mine) if values is None else values for values in (masks, logps))
    by_row = [{name: values[row] for name, values in columns.items()} for row in range(len(mine))]
    own_rewards = own_part(accelerator, rewards.tolist())
    made = zip(mine, prompt_ids, ids, *optional, prompts, messages, own_rewards, by_row, strict=True)
    own = [Completion(*values) for values in made]
    everyones = own if accelerator.num_processes == 1 else gather_object(own)
    groups = [everyones[first : first + size] for first in range(0, len(everyones), size)]
    equal = zero_variance(*learned(trainer, rewards, size), size, trainer.multi_objective_aggregation)
    return list(zip(groups, equal.view(-1, size)[:, 0].tolist(), strict=True))


def as_generated(trainer: Any, kept: Sequence[Completion]) -> tuple:
    """Return this process's part of completions as TRL's `_generate` does, and log what it logs of them."""
    ends = [*trainer.eos_token_ids, trainer._tokenizer.pad_token_id]
    metrics = trainer._metrics["train"]
    for name, value in generation_metrics(kept, ends, tools=bool(trainer.tools)).items():
        metrics[name].append(value)
    lengths = [
        len(completion.prompt_ids) + (len(completion.ids) if completion.mask is None else sum(completion.mask))
        for completion in kept
    ]
    trainer.state.num_input_tokens_seen += sum(lengths)
    metrics["num_tokens"] = [trainer.state.num_input_tokens_seen]
    mine = own_part(trainer.accelerator, kept)
    masks = [completion.mask for completion in mine] if kept[0].mask is not None else None
    logps = [completion.logps for completion in mine] if kept[0].logps is not None else None
    ids, messages = [completion.ids for completion in mine], [completion.messages for completion in mine]
    return [completion.prompt_ids for completion in mine], ids, masks, messages, logps, {}, None, []
