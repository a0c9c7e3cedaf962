"""Turn a TRL configuration into one of this project: `python -m grpo.from_trl grpo.yaml`, or `… trl grpo --flags`.

Writes an experiment with the same settings, TRL's defaults among them, and prints the key here of each of TRL's
options, and those that have none.
"""

import argparse
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo.cli import leave
from grpo.config.schema import ROOT, register
from grpo.extras.trl_options.convert import Experiment, convert
from grpo.extras.trl_options.read import options_of
from grpo.utils.atomic import atomic
from grpo.utils.errors import ConfigError
from grpo.utils.spoken import shown
from rewards.checking import Parser

PROGRAM = "grpo.from_trl"


def main() -> None:
    """Run the command line."""
    parser = Parser(
        prog=f"python -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="file to write; default: experiment/NAME.yaml, NAME as the input's")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="FILE | trl grpo --…", help="TRL's configuration")
    args = parser.parse_args()
    try:
        if not args.words:
            raise ConfigError("name TRL's YAML, a shell script, or the command: trl grpo --model_name_or_path …")
        if "--output" in args.words[:-1]:  # behind TRL's words
            place = args.words.index("--output")
            args.output = Path(args.words.pop(place + 1))
            args.words.pop(place)
        if len(args.words) > 1 and Path(args.words[0]).is_file():
            raise ConfigError(f"{args.words[1]}: behind the file stands --output FILE, or nothing")
        name = Path(args.words[0]).stem if len(args.words) == 1 else "trl"
        output = args.output or Path("experiment") / f"{name}.yaml"
        if output.exists():
            raise ConfigError(f"{output} is there already; name another file with --output")
        options = options_of(args.words)
        register()
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            experiment = convert(options)
        output.parent.mkdir(parents=True, exist_ok=True)
        with atomic(output) as partial:
            partial.write_text(text_of(experiment))
    except (ConfigError, OSError, OmegaConfBaseException) as error:
        leave(error, PROGRAM)
    show(experiment, options, output)


def text_of(experiment: Experiment) -> str:
    """Return the YAML of an experiment."""
    lines = ["# @package _global_", "# The settings of a run of TRL, by python -m grpo.from_trl."]
    lines += [f"# Not taken: {name}: {' '.join(why.split())}" for name, why in experiment.refused.items()]
    lines.append(yaml({"defaults": [{f"override /{name}": choice} for name, choice in experiment.choices.items()]}))
    values = dict(experiment.values)
    train = values.pop("train")
    lines += [yaml({name: value}) for name, value in values.items()]
    if train or experiment.train_defaults:
        lines.append(yaml({"train": train}) if train else "train:")
    if experiment.train_defaults:
        lines.append("  # TRL's defaults, where those here or in a GPU profile differ")
        lines += [f"  {line}" for line in yaml(experiment.train_defaults).splitlines()]
    return "\n".join(lines) + "\n"


def yaml(values: dict[str, Any]) -> str:
    """Return a part of a YAML, without the empty line at its end."""
    return OmegaConf.to_yaml(OmegaConf.create(values)).rstrip()


def show(experiment: Experiment, options: dict[str, Any], output: Path) -> None:
    """Print where each option has gone, which have no place, and the next command."""
    width = max(map(len, experiment.mapped), default=0)
    for name, key in experiment.mapped.items():
        print(f"{name:{width}}  {key}: {options.get(name, '')}")
    for name, why in experiment.refused.items():
        print(f"not taken: {name}: {why}")
    if experiment.train_defaults:
        print(
            f"{len(experiment.train_defaults)} defaults of TRL's trainer are in the file too, as those here may differ"
        )
    print(
        "task.conversational is false: set it to true if the column `prompt` holds messages; prompts longer than "
        "task.max_prompt_length=512 tokens are filtered here, and not in TRL"
    )
    if output.parent.name != "experiment":
        print(f"{output}: move it into a folder experiment/, in which Hydra looks for it")
        return
    folder = shown(output.parent.parent)
    print(f"{output}: python -m grpo.plan --config-dir {folder} +gpu=any +experiment={output.stem}")


if __name__ == "__main__":
    main()
