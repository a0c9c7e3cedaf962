"""Rewards of the guide: a number per completion, from the completions and the columns of the data."""

from rewards.brevity import brevity as brevity_of
from rewards.text import final_answer, text_of


def brevity(completions, limit=60, **columns):
    """Return 1 for an empty completion, down to 0 for `limit` characters and more."""
    return [max(0.0, 1 - len(text_of(completion)) / limit) for completion in completions]


def brevity_later(completions, completion_ids, trainer_state, log_metric, **columns):
    """Return the built-in reward of brevity, with a weight that grows from 0 to 1 over the run."""
    rewards = brevity_of(completions, completion_ids, enough=12, limit=60)
    log_metric("rewards/brevity/unweighted", sum(rewards) / len(rewards))
    return [reward * trainer_state.global_step / trainer_state.max_steps for reward in rewards]


def marked_answer(completions, answer, **columns):
    """Return 1 for the correct answer after ####, else 0; `answer` is the reference answer of the row."""
    texts = [text_of(completion) for completion in completions]
    return [float(final_answer(text, ["hash"]) == due) for text, due in zip(texts, answer, strict=True)]


def contains(completions, answer, **columns):
    """Return 1 where the answer is anywhere in the completion: docs/rewards.md shows how it can be exploited."""
    return [float(due in text_of(completion)) for completion, due in zip(completions, answer, strict=True)]
