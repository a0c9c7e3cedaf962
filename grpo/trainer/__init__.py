"""TRL's `GRPOTrainer` with the same gradient for less work: `from grpo.trainer import ExactGRPOTrainer, Update`."""

from grpo.config.options import Update
from grpo.errors import DoesNotFit
from grpo.trainer.exact import ExactGRPOTrainer

__all__ = ["DoesNotFit", "ExactGRPOTrainer", "Update"]
