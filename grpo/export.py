"""Weights that anybody can load: `python -m grpo.export RUN_DIR` merges the adapter and writes a model card.

The result is a folder for `from_pretrained`, `vllm serve`, or an upload to the hub.
"""

import argparse
import logging
from pathlib import Path

from grpo.cli import leave
from grpo.errors import ConfigError
from grpo.reporting.model_card import model_card
from grpo.runs.run_dir import Run, read_run

PROGRAM = "grpo.export"
DTYPES = ("float32", "bfloat16", "float16")


def export(run: Run, output: Path, dtype: str | None = None) -> None:
    """Write the model of a run, merged in float32, with its tokenizer and its card.

    Args:
        output: a folder that is not there yet.
        dtype: in which the weights are written; None takes that of the weights that were trained.

    Raises:
        ConfigError: the base cannot be loaded, or the folder is there.
    """
    if output.exists():
        raise ConfigError(f"{output} is there already; name another folder with --output")
    import torch

    from grpo import policy

    model, tokenizer = policy.load(run.model, run.config.model, "float32", "cpu")
    name = dtype or str(run.config.model.dtype)
    written = torch.float32 if name == "auto" else getattr(torch, name)
    partial = output.with_name(output.name + ".partial")
    model.to(written).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / "README.md").write_text(model_card(run))
    partial.rename(output)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__.splitlines()[0])
    parser.add_argument("run", help="a run directory")
    parser.add_argument("--output", type=Path, help="the folder to write; RUN/export if it is left out")
    parser.add_argument("--dtype", choices=DTYPES, help="of the written weights; model.dtype of the run if left out")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    try:
        run = read_run(Path(asked.run))
        output = asked.output or run.folder / "export"
        export(run, output, asked.dtype)
    except (ConfigError, OSError) as error:
        leave(error, PROGRAM)
    print(f"{output}: load it with AutoModelForCausalLM.from_pretrained, or: vllm serve {output}")


if __name__ == "__main__":
    main()
