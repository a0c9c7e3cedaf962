"""Rewards of this project: a number per completion, from the completions and the columns of the data."""

from rewards.text import final_answer, text_of


def exact_answer(completions, answer, **columns):
    """Return 1 for the answer after ####, else 0; `answer` is a column of problems.jsonl."""
    return [float(final_answer(text_of(said), ["hash"]) == due) for said, due in zip(completions, answer, strict=True)]
