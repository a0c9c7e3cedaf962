"""From the options of a run of TRL to an experiment of this project with the same settings."""

import difflib
from dataclasses import dataclass, field
from typing import Any

from hydra import compose
from omegaconf import DictConfig, OmegaConf

from grpo.config.library import GRPO_CONFIG, library_fields
from grpo.config.schema import NOT_SETTABLE, PLANNED, REWARD_MODEL, ROOT
from grpo.extras.trl_options.read import Options
from grpo.utils.errors import ConfigError

MODEL_CONFIG = (("trl", "trainer/model_config.py", "ModelConfig"),)
SCRIPT = (("trl", "scripts/utils.py", "ScriptArguments"), ("trl", "scripts/grpo.py", "GRPOScriptArguments"))
KEPT = {
    *("logging_steps", "log_completions", "log_multimodal", "num_completions_to_print", "report_to"),
    *("save_steps", "save_total_limit", "per_device_eval_batch_size", *PLANNED),
    *("deepspeed", "fsdp", "fsdp_config"),
}
"""Options of TRL's trainer whose defaults here stay: they write more, or the plan or a choice of `shard` sets them."""
LORA = {
    **{"lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_rslora": "use_rslora"},
    **{"lora_target_modules": "target_modules", "lora_target_parameters": "target_parameters"},
    **{"lora_modules_to_save": "modules_to_save", "use_dora": "use_dora"},
}
"""Options of TRL's adapters, and of PEFT's."""
QUANTIZATION = {
    "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "use_bnb_nested_quant": "bnb_4bit_use_double_quant",
    "bnb_4bit_quant_storage": "bnb_4bit_quant_storage",
}
"""Options of TRL's quantization, and of `transformers.BitsAndBytesConfig`."""
OVERLONG = {"fn": "rewards.overlong.overlong", "kwargs": {"max_completion_length": 1280, "cache": 256}}
BY_TRL: dict[str, dict[str, Any]] = {
    **{f"{name}_reward": {"fn": f"trl.rewards.{name}_reward"} for name in ("accuracy", "reasoning_accuracy")},
    **{"think_format_reward": {"fn": "trl.rewards.think_format_reward"}, "get_soft_overlong_punishment": OVERLONG},
}
"""Rewards that TRL's script knows by a name, with the arguments that it gives."""
REFUSED = {
    "trust_remote_code": "code from the hub is never run; convert the model to an architecture of transformers",
    "datasets": "a mixture: docs/mixtures.md has the form of one here",
    "env": "set these variables in the shell",
    "load_in_8bit": "4 bits are supported: load_in_4bit, which is peft=qlora",
    "num_machines": "launch.nodes=N, or an external launcher: docs/scaling.md",
    **NOT_SETTABLE,
}
"""Options without a counterpart in a file, and the reason or the way."""
IGNORED = ("lora_task_type", "dataset_num_proc", "ignore_bias_buffers")
"""Options that change nothing in TRL's GRPO with a causal language model."""


@dataclass
class Experiment:
    """An experiment, and where each option of TRL is in it."""

    choices: dict[str, Any] = field(default_factory=dict)
    """Choices of configuration groups."""
    values: dict[str, Any] = field(default_factory=dict)
    """Values, by group."""
    train_defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of `trl.GRPOConfig` that differ from those here, or that a GPU profile would set."""
    mapped: dict[str, str] = field(default_factory=dict)
    """Key here of each option that was taken."""
    refused: dict[str, str] = field(default_factory=dict)
    """Reason of each option that was not taken."""


def convert(options: Options) -> Experiment:
    """Return the experiment with the settings of TRL's options; Hydra has been initialized with `conf/`.

    Raises:
        ConfigError: there is no model.
    """
    if not options.get("model_name_or_path"):  # the only option without which nothing can be said
        raise ConfigError("no model_name_or_path: the options are those of `trl grpo`, which needs it")
    for name in ("use_vllm", "use_peft", "load_in_4bit"):
        if not isinstance(options.get(name, False), bool):
            raise ConfigError(f"{name}: {options[name]}: true or false is needed")
    experiment, rest = Experiment(), dict(options)
    refuse(rest, experiment)
    for part in (convert_model, convert_adapter, convert_data, convert_rewards, convert_launch, convert_training):
        part(rest, experiment)
    for name in rest:
        if name not in IGNORED:
            close = difflib.get_close_matches(name, known_options(), n=1)
            experiment.refused[name] = f"no option of TRL{f'; did you mean {close[0]}?' if close else ''}"
    return experiment


def refuse(rest: Options, experiment: Experiment) -> None:
    """Take the options without a place out of the rest, with their reasons, and note what is missing."""
    for name in rest.pop("launcher", ()):
        experiment.refused[name] = "the launcher's: docs/scaling.md"
    if not {"dataset_name", "datasets"} & rest.keys():
        experiment.refused["dataset_name"] = "it is not set; add task.dataset.path to the file"
    if not {"reward_funcs", "reward_model_name_or_path"} & rest.keys():
        experiment.refused["reward_funcs"] = "it is not set; add reward.NAME.fn to the file"
    for name in ("trust_remote_code", "load_in_8bit"):
        if rest.get(name) is False:
            rest.pop(name)
    for name in [name for name in rest if name in REFUSED]:
        experiment.refused[name] = f"{REFUSED[name]} (it is {rest.pop(name)!r})"


def known_options() -> dict[str, tuple[Any, Any]]:
    """Return type and default of all options of `trl grpo`."""
    return library_fields(GRPO_CONFIG) | library_fields(MODEL_CONFIG) | library_fields(SCRIPT)


def take(rest: Options, experiment: Experiment, name: str, key: str) -> Any:
    """Take an option out of the rest, note its key here, and return its value."""
    experiment.mapped[name] = key
    return rest.pop(name)


def convert_model(rest: Options, experiment: Experiment) -> None:
    """Convert which model is trained."""
    names = ("model_name_or_path", "model_revision", "dtype", "attn_implementation")
    taken = {name: take(rest, experiment, name, f"model.{name}") for name in names if name in rest}
    experiment.values["model"] = {"dtype": library_fields(MODEL_CONFIG)["dtype"][1]} | taken


def convert_adapter(rest: Options, experiment: Experiment) -> None:
    """Convert adapters, and the quantization of the weights beneath them."""
    known = library_fields(MODEL_CONFIG)
    if not rest.get("use_peft"):
        for name in [name for name in rest if name in (*LORA, *QUANTIZATION, "load_in_4bit")]:
            value = rest.pop(name)
            if name == "load_in_4bit" and value:
                experiment.refused[name] = "weights in 4 bits are trained by adapters: use_peft"
        rest.pop("use_peft", None)
        experiment.choices["peft"] = "none"
        return
    quantized = bool(rest.get("load_in_4bit"))
    experiment.choices["peft"] = "qlora" if quantized else "lora"
    take(rest, experiment, "use_peft", f"peft={experiment.choices['peft']}")
    peft = experiment.values["peft"] = chosen(rest, experiment, LORA, "peft", known)
    if isinstance(targets := peft.get("target_modules"), list) and len(targets) == 1:
        peft["target_modules"] = targets[0]  # as TRL: the name may be `all-linear`
    if "load_in_4bit" in rest:
        take(rest, experiment, "load_in_4bit", f"peft={experiment.choices['peft']}")
    quantization = chosen(rest, experiment, QUANTIZATION, "peft.quantization", known)
    if quantized:
        peft["quantization"] = quantization


def chosen(
    rest: Options, experiment: Experiment, names: dict[str, str], group: str, known: dict[str, tuple[Any, Any]]
) -> dict[str, Any]:
    """Return the values of options under their names here, TRL's defaults among them."""
    values = {ours: known[name][1] for name, ours in names.items() if known[name][1] is not None or name in rest}
    if group == "peft":
        values["target_modules"] = None  # PEFT's own for the architecture
    for name in [name for name in names if name in rest]:
        values[names[name]] = take(rest, experiment, name, f"{group}.{names[name]}")
    return values


def convert_data(rest: Options, experiment: Experiment) -> None:
    """Convert the data set: TRL's has its prompts in the column `prompt`, and no answers of ours."""
    experiment.choices["task"] = "jsonl"
    dataset = {
        ours: take(rest, experiment, name, f"task.dataset.{ours}")
        for name, ours in (("dataset_name", "path"), ("dataset_config", "name"), ("dataset_streaming", "streaming"))
        if name in rest
    }
    task = experiment.values["task"] = {"dataset": dataset, "split": "train", "prompt": "prompt"}
    task |= {"conversational": False, "thinking": None, "answer": {"column": None}, "eval": {"size": 0}}
    if "dataset_train_split" in rest:
        task["split"] = take(rest, experiment, "dataset_train_split", "task.split")
    split = library_fields(SCRIPT)["dataset_test_split"][1]
    if "dataset_test_split" in rest:
        split = take(rest, experiment, "dataset_test_split", "task.eval.split")
    if rest.get("eval_strategy", "no") not in ("no", False):
        task["eval"] = {"split": split}


def convert_rewards(rest: Options, experiment: Experiment) -> None:
    """Convert reward functions and reward model, with their weights."""
    rewards = dict[str, dict[str, Any]]()
    if "reward_model_name_or_path" in rest:
        name = take(rest, experiment, "reward_model_name_or_path", "reward.model.kwargs.model_name_or_path")
        rewards["model"] = {"fn": REWARD_MODEL, "kwargs": {"model_name_or_path": name}}
    if "reward_funcs" in rest:
        for path in map(str, take(rest, experiment, "reward_funcs", "reward.NAME.fn")):
            name = path.rpartition(".")[2]
            while name in rewards:  # twice, as TRL adds it twice
                name += "_again"
            if "." not in path and path not in BY_TRL:
                raise ConfigError(
                    f"reward_funcs: {path}: TRL has {', '.join(BY_TRL)}; others are package.module.function"
                )
            rewards[name] = dict(BY_TRL.get(path, {"fn": path}))
    if "reward_weights" in rest:
        weights = take(rest, experiment, "reward_weights", "reward.NAME.weight")
        if len(weights) != len(rewards):
            raise ConfigError(f"reward_weights={weights}: there are {len(rewards)} rewards: {', '.join(rewards)}")
        for reward, weight in zip(rewards.values(), weights, strict=True):
            reward["weight"] = weight
    experiment.choices["reward"] = []
    experiment.values["reward"] = rewards
    if rewards:
        experiment.values["task"]["eval"]["reward"] = next(iter(rewards))


def convert_launch(rest: Options, experiment: Experiment) -> None:
    """Convert who generates, how many processes there are, and what is divided over them."""
    experiment.choices["generation"] = "transformers"
    if rest.get("use_vllm"):
        mode = rest.get("vllm_mode", library_fields(GRPO_CONFIG)["vllm_mode"][1])
        if mode not in ("colocate", "server"):
            raise ConfigError(f"vllm_mode={mode}: colocate or server")
        experiment.choices["generation"] = f"vllm_{mode}"
        take(rest, experiment, "use_vllm", f"generation=vllm_{mode}")
    if "num_processes" in rest:
        experiment.values["launch"] = {"processes": take(rest, experiment, "num_processes", "launch.processes")}
    if "accelerate_shard" in rest:
        experiment.choices["shard"] = rest["accelerate_shard"]
        take(rest, experiment, "accelerate_shard", f"shard={experiment.choices['shard']}")


def convert_training(rest: Options, experiment: Experiment) -> None:
    """Convert the options of the trainer, and add TRL's defaults where those here differ."""
    known = library_fields(GRPO_CONFIG)
    experiment.values["train"] = {
        name: take(rest, experiment, name, f"train.{name}") for name in [name for name in rest if name in known]
    }
    words = [f"{group}={choice}" for group, choice in experiment.choices.items()]
    here: DictConfig = compose("config", words).train
    OmegaConf.merge(here, experiment.values["train"])  # or a line about the first value of another type
    profiles = (OmegaConf.to_container(OmegaConf.load(file)) for file in (ROOT / "conf" / "gpu").glob("*.yaml"))
    by_profiles = {key for profile in profiles if isinstance(profile, dict) for key in profile.get("train") or ()}
    for name, (_, default) in known.items():
        is_open = name in here and name not in KEPT and name not in experiment.values["train"]
        if is_open and (name in by_profiles or OmegaConf.is_interpolation(here, name) or here[name] != default):
            experiment.train_defaults[name] = default
