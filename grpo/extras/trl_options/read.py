"""Reads the options of a run of TRL: a YAML of `trl grpo --config`, a shell script, or the words of a command."""

import re
import shlex
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from grpo.config.library import package_folder
from grpo.utils.errors import ConfigError

LISTS = ("reward_funcs", "reward_weights", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save")
"""Options that take several values, so that one value is a list of one."""
SHELL = re.compile(r"&&|\|\|?|&|;|\d*[<>].*|&>.*")
"""Words that end a command in a script."""
Options = dict[str, Any]


def options_of(words: list[str]) -> Options:
    """Return the options of a command line, or of the file that is its only word, by TRL's names.

    Options of `accelerate launch` are among them; its configuration file, or TRL's, is read as `accelerate_config`.

    Raises:
        ConfigError: there is no such file, or it holds neither options nor a command.
    """
    if len(words) == 1 and not words[0].startswith("-"):
        file = Path(words[0])
        if not file.is_file():
            raise ConfigError(f"{file}: no such file; name TRL's YAML, a shell script, or the command: trl grpo --…")
        if file.suffix == ".py":
            raise ConfigError(
                f"{file}: a Python script is not converted; replace its GRPOTrainer by grpo.trainer.ExactGRPOTrainer, "
                "see docs/exact_update.md"
            )
        if file.suffix in (".yaml", ".yml", ".json"):
            return with_lists(from_yaml(file))
        words = words_of(file)
    return with_lists(from_words(words))


def from_yaml(file: Path) -> Options:
    """Return the options of TRL's YAML, or of accelerate's.

    Raises:
        ConfigError: it cannot be read, or holds another thing than options.
    """
    if not file.is_file():
        raise ConfigError(f"{file}: no such file")
    try:
        options = OmegaConf.to_container(OmegaConf.load(file))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        place = getattr(error, "problem_mark", None)
        where = f" in line {place.line + 1}" if place else ""
        raise ConfigError(f"{file}: cannot be read as YAML{where}") from error
    if not isinstance(options, dict) or not options:
        raise ConfigError(f"{file}: TRL's YAML has a line `option: value` for each option")
    if {"defaults", "hydra", "train", "task"} & options.keys():
        raise ConfigError(f"{file}: a configuration of this project already")
    return {str(name).replace("-", "_"): value for name, value in options.items()}


def words_of(file: Path) -> list[str]:
    """Return the words of the command in a shell script that runs `trl grpo` or a Python script with options.

    Variables that the script sets to a text before have their values.

    Raises:
        ConfigError: there is no such command, or there are several.
    """
    try:
        text = re.sub(r"\\[ \t]*\n", " ", file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as text") from error
    variables, commands = dict[str, str](), list[list[str]]()
    for line in text.splitlines():
        filled = re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda name: variables.get(name[1] or name[2], name[0]), line)
        try:
            words = shlex.split(filled, comments=True)
        except ValueError:  # a quotation over several lines, of something else
            continue
        for word in words:
            if word in ("export", "declare", "local"):
                continue
            name, equals, value = word.partition("=")
            if not (equals and name.isidentifier()):
                break
            variables[name] = value
        if is_command(words):
            end = next((place for place, word in enumerate(words) if SHELL.fullmatch(word)), None)
            commands.append(words[:end])
    if len(commands) != 1:
        raise ConfigError(
            f"{file}: {len(commands) or 'no'} commands `trl grpo --…`, or of a Python script with options; give one as "
            f"words: python -m grpo.from_trl trl grpo --…"
        )
    return commands[0]


def is_command(words: list[str]) -> bool:
    """Return whether these words run `trl grpo`, its module or a Python script, with options."""
    runs = any(word.endswith((".py", "grpo")) for word in words)
    return runs and any(word.startswith("--") for word in words)


def from_words(words: list[str]) -> Options:
    """Return the options of a command line; those of its YAML (`--config`) come first, as in TRL.

    Raises:
        ConfigError: it has no option, a variable of the shell, or is of another command of TRL.
    """
    if variables := re.findall(r"\$\{?\w+\}?", " ".join(words)):
        raise ConfigError(f"{variables[0]} is known to the shell alone; write its value")
    if "trl" in words and (other := words[words.index("trl") + 1 :][:1]) != ["grpo"]:
        raise ConfigError(f"trl {''.join(other)}: only the options of `trl grpo` have a place here")
    script = next((place for place in range(len(words)) if is_script(words, place)), 0)
    launcher, options = flags(words[:script]), flags(words[script:])
    if not launcher and not options:
        raise ConfigError(f"{' '.join(words)!r} has no options: trl grpo --model_name_or_path … --dataset_name …")
    file = options.pop("config", None)
    return (from_yaml(Path(str(file))) if file else {}) | of_launcher(launcher) | options


def of_launcher(launcher: Options) -> Options:
    """Return what the words before a script decide, of `accelerate launch` or `torchrun`, by TRL's names."""
    launcher = dict(launcher)
    if "nproc_per_node" in launcher:  # torchrun's
        count = launcher.pop("nproc_per_node")
        launcher["num_processes"] = "auto" if count in ("gpu", "auto") else count
    deepspeed = {"use_deepspeed", "zero_stage"} & launcher.keys()
    kind = "DEEPSPEED" if deepspeed else "FSDP" if "use_fsdp" in launcher else "NO"
    options = launch_of(launcher | {"distributed_type": kind, "deepspeed_config": launcher, "fsdp_config": launcher})
    options |= {name: launcher[name] for name in ("config_file", "num_machines") if name in launcher}
    taken = {"use_deepspeed", "zero_stage", "use_fsdp", "multi_gpu", "num_processes", "mixed_precision", *options}
    taken |= {"offload_param_device", "offload_optimizer_device", "fsdp_offload_params"}
    others = sorted(launcher.keys() - taken)
    return options | ({"launcher": others} if others else {})


def is_script(words: list[str], place: int) -> bool:
    """Return whether a launcher's words end here: at a Python script, `trl grpo`, or a module."""
    before = words[place - 1] if place else ""
    return words[place].endswith(".py") or words[place] == "-m" or (before, words[place]) == ("trl", "grpo")


def flags(words: list[str]) -> Options:
    """Return the values of `--option value`, `--option=value`, `--option` (true) and `--no_option` (false)."""
    given, name = Options(), ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            given[name] = [value_of(value)] if equals else []
        elif name:
            given[name].append(value_of(word))
    options = Options()
    for name, values in given.items():
        if not values and name.startswith("no_"):
            options[name.removeprefix("no_")] = False
        else:
            options[name] = True if not values else values[0] if len(values) == 1 else values
    return options


def value_of(word: str) -> Any:
    """Return the value that YAML has for a word: a number, a truth value, a dictionary, or the word."""
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={word}"]))["value"]  # type: ignore[index, call-overload]
    except YAMLError:
        return word


def with_lists(options: Options) -> Options:
    """Return the options with lists where TRL wants some, and those of accelerate's configuration beside them."""
    for name in ("eval_strategy", "logging_strategy", "save_strategy"):
        if options.get(name) is False:  # YAML's `no`
            options[name] = "no"
    for name in LISTS:
        if name in options and not isinstance(options[name], list):
            options[name] = [options[name]]
    if file := options.pop("config_file", None):
        options["accelerate_config"] = file
    if name := options.pop("accelerate_config", None):
        folder = Path(package_folder("trl")) / "accelerate_configs"
        file = folder / f"{name}.yaml"
        if not (file.is_file() or Path(str(name)).is_file()):
            shipped = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
            raise ConfigError(f"{name}: neither a file of accelerate's, nor one of TRL's: {shipped}")
        options = launch_of(from_yaml(file if file.is_file() else Path(str(name)))) | options
    return options


def launch_of(accelerate: Options) -> Options:
    """Return what a configuration of accelerate decides, by TRL's names; `accelerate_shard` is a choice of `shard`."""
    options = {"num_processes": accelerate["num_processes"]} if accelerate.get("num_processes") else {}
    if accelerate.get("mixed_precision") in ("bf16", "fp16"):
        options[accelerate["mixed_precision"]] = True
    kind, deepspeed = accelerate.get("distributed_type"), accelerate.get("deepspeed_config") or {}
    if kind == "DEEPSPEED":
        stage = int(deepspeed.get("zero_stage", 2))
        devices = {deepspeed.get(f"offload_{part}_device", "none") for part in ("param", "optimizer")}
        offload = "_offload" if stage == 3 and devices != {"none"} else ""
        options["accelerate_shard"] = f"zero{max(2, stage)}{offload}"
    elif kind == "FSDP":
        offload = "_offload" if (accelerate.get("fsdp_config") or {}).get("fsdp_offload_params") else ""
        options["accelerate_shard"] = f"fsdp2{offload}"
    return options
