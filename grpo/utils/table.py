"""The names of the columns of a table of completions."""

OF_COMPLETIONS = (
    *("step", "prompt", "completion", "completion_id", "completion_ids", "advantage", "completion_tokens", "truncated"),
    *("images", "thumbnails"),
)
"""Columns that the trainer writes; rewards, columns of the data and logged columns have other names."""
