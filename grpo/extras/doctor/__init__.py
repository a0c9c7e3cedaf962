"""The logs of runs by any trainer, and findings about them, for `python -m grpo.doctor`."""
