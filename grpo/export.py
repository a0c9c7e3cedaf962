"""Export the weights of a run: `python -m grpo.export RUN_DIR` merges the adapter and writes a model card.

The result is a folder for `from_pretrained`, `vllm serve`, or an upload to the hub.
"""

import argparse
import logging
from pathlib import Path

from grpo.cli import leave, quick_imports
from grpo.reporting.model_card import model_card
from grpo.rundir.history import named_run
from grpo.rundir.run_dir import Run, read_run
from grpo.utils.atomic import atomic
from grpo.utils.errors import ConfigError

PROGRAM = "grpo.export"
DTYPES = ("float32", "bfloat16", "float16")


def export(run: Run, output: Path, dtype: str | None = None) -> str:
    """Write the model of a run, merged in float32, with its tokenizer or processor and its model card.

    Returns the class of transformers that loads it. `dtype` is the data type of the written weights; None takes the
    run's.

    Raises:
        ConfigError: the base cannot be loaded, or the folder exists.
    """
    if output.exists():
        raise ConfigError(f"{output} is there already; name another folder with --output")
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


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__.splitlines()[0])
    parser.add_argument("run", help="a run directory; latest: of the run that was started last")
    parser.add_argument("--output", type=Path, help="folder to write; default: RUN/export")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="data type of the written weights; default: model.dtype of the run"
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    try:
        run = read_run(named_run(args.run))
        output = args.output or run.folder / "export"
        loader = export(run, output, args.dtype)
    except (ConfigError, OSError) as error:
        leave(error, PROGRAM)
    print(f"{output}: load it with {loader}.from_pretrained, or: vllm serve {output}")


if __name__ == "__main__":
    main()
