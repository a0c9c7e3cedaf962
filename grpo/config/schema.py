"""The schema of the configuration.

Composition has to be quick, and importing `trl.GRPOConfig` takes seconds. So the names, types and defaults of the
libraries' own options are read from the source text of the installed libraries, which is never out of date.
"""

from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import MISSING, DictConfig, OmegaConf

from grpo.config import gpus, mixture
from grpo.config.library import GRPO_CONFIG, library_fields, package_folder
from grpo.config.task_schema import Task
from grpo.options import Engine, Rollout, Update

ROOT = Path(__file__).resolve().parents[2]
# Fields of GRPOConfig that are not for the configuration, and what to use instead.
NOT_SETTABLE = {
    "output_dir": "the run directory is Hydra's, hydra.run.dir=…",
    "hub_token": "it would be written to disk; set HF_TOKEN in the environment",
}
# Fields of GRPOConfig that null leaves to the plan.
PLANNED = ("use_vllm", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_max_model_length")
# Fields that may be null: with `per_device_eval_batch_size` an evaluation takes as many problems at once as a rollout.
NULLABLE = (*PLANNED, "per_device_eval_batch_size")

GROUPS = (
    *("model", "task", "reward", "peft", "train", "update", "rollout"),
    *("engine", "completions", "replay", "guard", "callbacks", "gpu", "plan", "preflight", "evaluate", "launch"),
    "sweep",
)
"""Names of the configuration's groups."""
REWARD_MODEL = "rewards.model.model"
"""`fn` of a reward model, which is part of the trainer and no function in a process of its own."""
PARTS = ("vision", "projector")
"""Parts of a vision-language model that `model.freeze` may name."""


@dataclass
class Model:
    """The policy; keys have the names of `trl.ModelConfig`."""

    model_name_or_path: str = MISSING
    """A folder with `config.json` and safetensors, or the name of a model on the Hugging Face hub."""
    model_revision: str = "main"
    """Branch, tag or commit on the hub."""
    dtype: str = "float32"
    """Data type of the loaded weights: `auto`, `float32`, `bfloat16` or `float16`."""
    bfloat16: bool = True
    """Whether a GPU profile chooses bfloat16 where the GPU has it; `false` chooses float16."""
    attn_implementation: str | None = None
    """For example `sdpa` or `flash_attention_2`; None lets transformers choose."""
    freeze: list[str] = field(default_factory=list)
    """Frozen parts of a vision-language model: `vision` (the tower), `projector`."""
    shape: dict[str, Any] = field(default_factory=dict)
    """The architecture's numbers, so that planning needs no download."""


@dataclass
class Evaluate:
    """Options of `python -m grpo.evaluate`, which also answers the held-out problems greedily."""

    model: str | None = None
    """A folder with a model or an adapter, or a name on the hub; None takes `model.model_name_or_path`."""
    samples: int = 8
    """Completions per problem for pass@k and maj@k; 0 for greedy accuracy alone."""
    temperature: float = 1.0
    """Sampling temperature of these completions."""
    batch_size: int = 64
    """Completions generated at once by transformers; vLLM takes all at once."""


@dataclass
class Reward:
    """A reward function."""

    fn: str = MISSING
    """`package.module.function`, `path/to/file.py:function`, or an entry point of the group `grpo.rewards`."""
    weight: float = 1.0
    """Factor of this reward in the sum of all rewards."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments passed at every call."""
    timeout: float = 60.0
    """Seconds for a call with a batch; after a timeout each completion is scored alone, with as many seconds."""
    on_error: str = "skip"
    """Handling of a completion on which the function fails: `skip` it and count it, or `raise` and end the run."""
    workers: int = 1
    """Number of processes that share the completions of a batch; completions of a prompt stay together."""


@dataclass
class Gpu:
    """The facts of the GPU that a profile was made for."""

    profile: str | None = None
    """Row of `grpo/config/gpus.json` that has the facts; `auto`: of the GPU of this machine."""
    name: str = MISSING
    vendor: str = "nvidia"
    """`nvidia`, `amd` (ROCm) or `apple` (MPS)."""
    architecture: str = MISSING
    memory_gb: float = MISSING
    """Its memory, GiB; with `shared` that of the whole machine."""
    shared: bool = False
    """Whether CPU and GPU share the memory."""
    bf16: bool = MISSING
    """Whether the GPU computes in bfloat16."""
    tflops: float | None = None
    """Dense 16-bit matrix products with sums in float32, 10^12 operations per second, by its maker."""
    bandwidth_gb_s: float | None = None
    """Bandwidth of its memory, 10^9 bytes per second, by its maker."""
    formats: list[str] = field(default_factory=list)
    """Numbers of 8 and 4 bits that it multiplies, and that this trainer does not use."""
    found: str | None = None
    """With `profile: auto`, a line about the GPU that was found and the profile that it resembles."""


@dataclass
class Plan:
    """Planning: whether a run fits into memory, before anything is loaded."""

    enforce: bool = True
    """Refuse a run that does not fit, or a machine without the GPU of the profile; `false` trains anyway."""
    format: str = "text"
    """Output of `python -m grpo.plan`: `text` or `json`."""
    table: bool = False
    """Print the least memory of models x methods for this GPU instead of a single plan."""
    longest: bool = False
    """Print the longest completion that fits, by method and generation, instead of a single plan."""
    processes: int | None = None
    """Number of processes to plan for; None takes those that were started, else `launch.processes`."""
    host_gb: float | None = None
    """Host memory to plan with and to stay below, GiB; None takes this machine's, if it is the training machine."""
    hourly_price: float | None = None
    """Price per hour of all machines of the run, in any currency; `python -m grpo.plan` then gives the cost."""


@dataclass
class Preflight:
    """Options of `python -m grpo.preflight`: whether a run will learn, from completions of its own policy."""

    problems: int = 64
    """Number of problems of the training split."""
    samples: int = 8
    """Completions per problem."""
    format: str = "text"
    """Output: `text` or `json`."""


@dataclass
class Completions:
    """Additional files in `completions/`, beside all completions of the steps that `train.logging_steps` names."""

    tokens: bool = False
    """Whether the run also keeps the log-probability, entropy, advantage and importance ratio of each token of 8
    completions per logged step, which the page shows as colours."""


@dataclass
class Replay:
    """Records of steps for `python -m grpo.replay` and `python -m grpo.why`."""

    keep: int = 0
    """Number of steps, counted back from the last, that can be computed again: `replay/` keeps their rollouts, and
    fingerprints of all steps. 0 keeps nothing."""


@dataclass
class Launch:
    """Processes that train. Under `torchrun` and the like, which have started them, leave it out."""

    processes: Any = 1
    """Number of processes per machine, one per GPU; `auto`: one per visible GPU."""
    nodes: Any = 1
    """Number of machines; the same command starts on each machine. A range, `2:4`: the least and the most; the run
    continues as machines leave and join."""
    rendezvous: str | None = None
    """With several machines, `host:port` of the first machine, reachable from the others."""
    max_restarts: int = 0
    """Number of restarts of all processes, from the newest complete checkpoint, after a process has died."""
    timeout: int = 600
    """Seconds to wait for all processes to start, for the others to end after a process has failed, and for all to end
    after a machine has fallen silent."""


@dataclass
class Sweep:
    """Options of a sweep, `python -m grpo.train -m`."""

    resume: bool = False
    """Continue a sweep, `hydra.sweep.dir=…` or the newest of this command: run jobs that are missing or failed."""


def register() -> None:
    """Register the schema with Hydra, and the resolvers `${project:path}`, `${package:name}`, `${not:…}` and `${if:…}`.

    `project` returns a path in this project, `package` the folder of an installed package; `if` takes a value, the
    result if it is true, and the result if it is false.
    """
    OmegaConf.register_new_resolver("project", lambda path: str(ROOT / path), replace=True)
    OmegaConf.register_new_resolver("not", lambda value: not value, replace=True)
    OmegaConf.register_new_resolver("if", lambda value, then, otherwise: then if value else otherwise, replace=True)
    OmegaConf.register_new_resolver("package", package_folder, replace=True)
    mixture.register()
    gpus.register()
    train = [
        (name, kind | None if name in NULLABLE else kind, field(default=default))
        for name, (kind, default) in library_fields(GRPO_CONFIG).items()
        if name not in NOT_SETTABLE
    ]
    grpo_config = make_dataclass("GRPOConfig", train)
    groups: list[tuple[str, Any, Any]] = [
        ("model", Model, field(default_factory=Model)),
        ("task", Task, field(default_factory=Task)),
        ("reward", dict[str, Any], field(default_factory=dict)),
        ("peft", Any, field(default=None)),
        ("train", grpo_config, field(default_factory=grpo_config)),
        ("update", Update, field(default_factory=Update)),
        ("rollout", Rollout, field(default_factory=Rollout)),
        ("engine", Engine, field(default_factory=Engine)),
        ("completions", Completions, field(default_factory=Completions)),
        ("replay", Replay, field(default_factory=Replay)),
        ("guard", dict[str, Any], field(default_factory=dict)),  # of an extra, whose keys conf/guard has
        ("callbacks", dict[str, Any], field(default_factory=dict)),
        ("gpu", Gpu | None, field(default=None)),
        ("plan", Plan, field(default_factory=Plan)),
        ("preflight", Preflight, field(default_factory=Preflight)),
        ("evaluate", Evaluate, field(default_factory=Evaluate)),
        ("launch", Launch, field(default_factory=Launch)),
        ("sweep", Sweep, field(default_factory=Sweep)),
    ]
    assert tuple(name for name, _, _ in groups) == GROUPS
    ConfigStore.instance().store(name="schema", node=make_dataclass("Config", groups))
    for group in ("launcher", "sweeper"):
        make_room(group)


def make_room(group: str) -> None:
    """Put an underscore before the plugins' own configurations if `conf/hydra` has a configuration of the same name.

    The configurations in `conf/hydra` extend those of the plugins. Hydra would merge two configurations of a name by a
    deprecated rule, and refuses to do so for Optuna.
    """
    Plugins.instance()  # imports the plugins, which store their configurations
    stored = ConfigStore.instance().repo["hydra"][group]
    for file in (ROOT / "conf" / "hydra" / group).glob("*.yaml"):
        if file.name in stored:
            stored[f"_{file.name}"] = stored.pop(file.name)


def train_arguments(train: DictConfig) -> dict[str, Any]:
    """Return the arguments of `trl.GRPOConfig` that differ from TRL's own defaults and are not left to this program."""
    known = library_fields(GRPO_CONFIG)
    values = OmegaConf.to_container(train, resolve=True)
    assert isinstance(values, dict)
    changed = {str(name): value for name, value in values.items() if not (value is None and name in NULLABLE)}
    return {name: value for name, value in changed.items() if value != known[name][1]}
