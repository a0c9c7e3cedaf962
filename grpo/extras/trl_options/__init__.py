"""The options of a run of TRL, and the same settings here, for `python -m grpo.from_trl`."""
