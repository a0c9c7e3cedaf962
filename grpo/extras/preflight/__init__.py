"""Samples of the policy before a run, and what they say about it, for `python -m grpo.preflight`."""
