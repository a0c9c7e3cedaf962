"""TRL's `GRPOTrainer` with the same gradient for less work: `from grpo.trainer import ExactGRPOTrainer, Update`."""

from grpo.options import Update
from grpo.trainer.exact import ExactGRPOTrainer
from grpo.utils.errors import DoesNotFit

__all__ = ["DoesNotFit", "ExactGRPOTrainer", "Update"]
