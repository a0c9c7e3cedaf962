"""Environments of other projects, behind `task.environment` and the rewards of a run."""
