"""Export the weights of a run: `python -m grpo.export RUN_DIR` merges the adapter and writes a model card.

The result is a folder for `from_pretrained` or `vllm serve`; `--push` uploads it to the hub, `--gguf` adds a file for
llama.cpp.
"""

import argparse
import json
import logging
import shutil
from pathlib import Path

from grpo.cli import leave, quick_imports
from grpo.extras.publishing import gguf, hub
from grpo.extras.publishing.model_card import model_card
from grpo.rundir.history import named_run
from grpo.rundir.run_dir import Run, read_run
from grpo.utils.atomic import atomic
from grpo.utils.errors import ConfigError, RunError
from rewards.checking import Parser

PROGRAM = "grpo.export"
DTYPES = ("float32", "bfloat16", "float16")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def export(run: Run, output: Path, dtype: str | None = None) -> str:
    """Write the model of a run, merged in float32, with its tokenizer or processor and its model card.

    Returns the class of transformers that loads it. `dtype` is the data type of the written weights; None takes the
    run's.

    Raises:
        ConfigError: the base cannot be loaded.
    """
    with quick_imports():
        import torch

        from grpo.model import policy
        from grpo.model.vision import takes_images

    model, processing_class = policy.load(run.model, run.config.model, "float32", "cpu")
    name = dtype or str(run.config.model.dtype)
    written_dtype = torch.float32 if name == "auto" else getattr(torch, name)
    with atomic(output) as partial:
        model.to(written_dtype).save_pretrained(partial)
        processing_class.save_pretrained(partial)
        (partial / "README.md").write_text(model_card(run))
    return "AutoModelForImageTextToText" if takes_images(model.config) else "AutoModelForCausalLM"


def export_adapter(run: Run, output: Path) -> str:
    """Write the adapter of a run as it is, with its tokenizer or processor and its model card; return PEFT's class.

    Raises:
        ConfigError: the tokenizer cannot be loaded.
    """
    with quick_imports():
        from grpo.model import policy

    processing_class = policy.load_processing_class(run.config.model, str(run.model))
    with atomic(output) as partial:
        processing_class.save_pretrained(partial)
        for file in ADAPTER:
            shutil.copyfile(run.model / file, partial / file)
        (partial / "README.md").write_text(model_card(run, merged=False))
    return "AutoPeftModelForCausalLM"


def check(args: argparse.Namespace, run: Run, output: Path) -> list[str] | None:
    """Return the command of the GGUF converter, if there is to be such a file; refuse what cannot work.

    Raises:
        ConfigError: the folder exists, the run has no weights or no such adapter, there is no converter, or the hub
            refuses.
    """
    model = run.model
    if output.exists() and not is_export_of(output, model, args):
        raise ConfigError(f"{output} is there already; name another folder with --output")
    if args.adapter:
        file = model / ADAPTER[0]
        if not file.is_file():
            raise ConfigError(f"--adapter: {model} has no adapter, all weights were trained")
        base = json.loads(file.read_text())["base_model_name_or_path"]
        if args.push and Path(base).exists():
            raise ConfigError(
                "--adapter: nobody else has its base, a folder of this machine; without --adapter both are merged"
            )
    if args.gguf and run.config.task.images:
        raise ConfigError(
            "--gguf: llama.cpp has a model that takes images in two files; export it, then convert the folder with "
            "convert_hf_to_gguf.py, and again with --mmproj"
        )
    converter = gguf.converter() if args.gguf else None
    if args.push:
        hub.create_repository(args.push, args.public)
    return converter


def is_export_of(output: Path, model: Path, args: argparse.Namespace) -> bool:
    """Return whether `--push` or `--gguf` can use a folder: an export that is younger than the model, of its kind."""
    files = [*output.glob("*.safetensors")]
    is_adapter = (output / ADAPTER[0]).is_file()
    youngest = max((file.stat().st_mtime for file in model.glob("*.safetensors")), default=0.0)
    wanted = (args.push or args.gguf) and not args.dtype and is_adapter == args.adapter
    return bool(wanted and files and min(file.stat().st_mtime for file in files) >= youngest)


def main() -> None:
    """Run the command line."""
    parser = Parser(prog=f"python -m {PROGRAM}", description=__doc__.splitlines()[0])
    parser.add_argument("run", help="a run directory; latest: of the run that was started last")
    parser.add_argument("--output", type=Path, help="folder to write; default: RUN/export")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="data type of the written weights; default: model.dtype of the run"
    )
    parser.add_argument("--adapter", action="store_true", help="the adapter as it is, not merged into its base")
    parser.add_argument("--gguf", action="store_true", help="a GGUF file, too, by llama.cpp's converter")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload the folder to this repository of the hub")
    parser.add_argument("--public", action="store_true", help="everybody may read the repository; default: private")
    args = parser.parse_args()
    if args.public and not args.push:
        parser.error("--public: it is a property of the repository; add --push OWNER/NAME")
    if args.adapter and (args.gguf or args.dtype):
        parser.error("--adapter: the adapter is written as it is, without --gguf and --dtype")
    logging.basicConfig(level=logging.ERROR)
    try:
        run = read_run(named_run(args.run))
        output = args.output or run.folder / "export"
        converter = check(args, run, output)
        if output.exists():
            print(f"{output}: exported before, from the same weights")
        else:
            loader = export_adapter(run, output) if args.adapter else export(run, output, args.dtype)
            served = "" if args.adapter else f", or: vllm serve {output}"
            print(f"{output}: load it with {loader}.from_pretrained{served}")
        if converter:
            print(gguf.convert(converter, output, Path(run.config.model.model_name_or_path).name))
        if args.push:
            print(hub.upload(output, args.push))
    except (ConfigError, RunError, OSError) as error:
        leave(error, PROGRAM)


if __name__ == "__main__":
    main()
