"""The memory of an update with images: simulation and plan compared, `python -m benchmarks.simulation_vision`.

As in `benchmarks.simulation`, `MemTracker` follows a real policy under `FakeTensorMode`. Fake tensors have no values,
so functions of transformers that read them are replaced: how many images there are, and where in the prompt. Layer
norms are computed in float32, as autocast does on a GPU and not on a CPU.
"""

import argparse
import gc
import importlib
import json
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMModel, SmolVLMVisionEmbeddings
from transformers.vision_utils import get_vision_window_index
from trl.trainer.utils import add_fused_lm_head

from benchmarks.simulation import in_place_kernels, with_fakes
from grpo.config.schema import ROOT
from grpo.extras.measuring.tensors import PeakTracker
from grpo.model.vision import detach_frozen_tower, freeze, parts
from grpo.planning import images, vision
from grpo.planning.hub_config import shape_of
from grpo.planning.memory import update
from grpo.planning.workload import Adapter, Images, Workload
from grpo.trainer.adapter_inputs import keep_inputs_uncast
from grpo.utils.limits import GB

HERE = Path(__file__).parent
TEXT = 64
"""Tokens of a sequence that are not of its image."""
FEWER = {"qwen2_5_vl_3b": {"text_config": 6, "vision_config": 16}}
"""Layers of models whose windows take too many operations to simulate."""
MODELS = {"qwen2_5_vl_3b": 32, "smolvlm2_500m": 0}
"""Patches in a row of an image; 0 where the size of images is fixed."""
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, tower frozen": {"freeze": ("vision",)},
    "full, tower and projector frozen": {"freeze": ("vision", "projector")},
    "LoRA": {"adapter": Adapter(16)},
    "LoRA, tower too": {"adapter": Adapter(16, vision=True)},
}
layer_norm = torch.nn.functional.layer_norm


class Scored(Workload):
    """A workload all tokens of which go through the head, as in the simulation."""

    def scored(self, tokens: int) -> int:
        """Tokens of a micro-batch that the head scores."""
        return tokens


def main() -> None:
    """Simulate and plan all cases, print a table, and write `simulation_vision.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=MODELS, help="names of conf/model")
    parser.add_argument("--output", type=Path, default=HERE / "simulation_vision.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    console = Console()
    cases = [
        (model, method, checkpointing)
        for model in options.models
        for method in METHODS
        for checkpointing in (False, True)
    ]
    results = [compare(*case) for case in track(cases, "simulating", console=console)]
    table = Table("model", "method", "checkpointing", "patches", "simulated GiB", "planned GiB", "difference")
    for row in results:
        numbers = (f"{row['simulated_gb']:.2f}", f"{row['planned_gb']:.2f}", f"{row['difference']:+.1%}")
        checkpointing = "yes" if row["checkpointing"] else "no"
        table.add_row(row["model"], row["method"], checkpointing, f"{row['rows']} x {row['patches']}", *numbers)
    console.print(table)
    worst = max(abs(row["difference"]) for row in results)
    console.print(f"largest difference {worst:.1%}")
    content = {"date": str(date.today()), "torch": torch.__version__, "worst": worst, "cases": results}
    options.output.write_text(json.dumps(content, indent=1) + "\n")


def compare(model: str, method: str, checkpointing: bool, rows: int = 2) -> dict[str, Any]:
    """Return the memory of an update, simulated and planned, GiB."""
    numbers: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "model" / f"{model}.yaml").shape)
    side = MODELS[model] or numbers["vision_config"]["image_size"] // numbers["vision_config"]["patch_size"]
    for part, layers in FEWER.get(model, {}).items():
        numbers[part]["depth" if "depth" in numbers[part] else "num_hidden_layers"] = layers
    started = time.monotonic()
    simulated = simulate(numbers, method, checkpointing, rows, side) / GB
    planned = plan(numbers, method, checkpointing, rows, side) / GB
    return {
        "model": model,
        "layers": {part: FEWER[model][part] for part in FEWER.get(model, {})},
        "method": method,
        "checkpointing": checkpointing,
        "rows": rows,
        "patches": side**2,
        "simulated_gb": round(simulated, 3),
        "planned_gb": round(planned, 3),
        "difference": planned / simulated - 1,
        "seconds": round(time.monotonic() - started, 1),
    }


def plan(numbers: dict[str, Any], method: str, checkpointing: bool, rows: int, side: int) -> float:
    """Return the planned bytes of an update, without what is no tensor and with one copy of the images."""
    shape = shape_of({name: value for name, value in numbers.items() if name != "parameters"})
    assert shape.vision
    image = side**2 // shape.vision.spatial_merge_size**2
    workload = Scored(
        prompt=image,
        completion=TEXT,
        sequences=rows,
        tokens=rows * (image + TEXT),
        optimizer="adamw_torch_fused",
        checkpointing=checkpointing,
        images=Images(rows, rows),
        **METHODS[method],
    )
    one_copy = {"context": 0.0, "pixel values": rows * images.pixel_values(shape.vision, workload)}
    return sum((update(shape, workload) | one_copy).values())


def simulate(numbers: dict[str, Any], method: str, checkpointing: bool, rows: int, side: int) -> float:
    """Return the peak in bytes over two optimizer steps of two micro-batches each, in bfloat16.

    Args:
        rows: sequences of a micro-batch, each with an image and 64 tokens of text.
        side: patches in a row of an image.
    """
    with valueless(numbers, rows, side), FakeTensorMode(allow_non_fake_inputs=True):
        model = policy(numbers, method, checkpointing)
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], foreach=False)
        tracker: MemTracker = PeakTracker()
        tracker.track_external(model, optimizer)
        with tracker, in_place_kernels(), torch.autocast("cpu", torch.bfloat16):
            inputs = batch(numbers, rows, side)
            for _ in range(2):
                for _ in range(2):
                    output = model(**inputs, labels=inputs["input_ids"], fused_lm_head=True)
                    output.log_probs.mean().backward()
                    del output
                    gc.collect()
                optimizer.step()
                optimizer.zero_grad()
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def policy(numbers: dict[str, Any], method: str, checkpointing: bool) -> Any:
    """Return a policy of a shape, with fake weights, frozen and adapted as `grpo.model.policy` does."""
    config = AutoConfig.for_model(**{name: value for name, value in numbers.items() if name != "parameters"})
    config.get_text_config().use_cache = False
    adapter = METHODS[method].get("adapter")
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        freeze(model, METHODS[method].get("freeze", ()))
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        if adapter:
            without = "|".join(f"{re.escape(name)}(\\..*)?" for name in chain.from_iterable(parts(model).values()))
            excluded = None if adapter.vision else without
            model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", exclude_modules=excluded))
            keep_inputs_uncast(model)
    detach_frozen_tower(model)
    return with_fakes(model, checkpointing, adapter is not None)


def batch(numbers: dict[str, Any], rows: int, side: int) -> dict[str, torch.Tensor]:
    """Return the inputs of a micro-batch."""
    found = vision.vision_of(numbers)
    assert found
    length = side**2 // found.spatial_merge_size**2 + TEXT
    inputs = {
        "input_ids": torch.zeros(rows, length, dtype=torch.long),
        "attention_mask": torch.ones(rows, 1, length, length, dtype=torch.bool),
    }
    if found.image_size:
        mask = torch.ones(rows, 1, found.image_size, found.image_size, dtype=torch.long)
        pixels = torch.zeros(rows, 1, 3, found.image_size, found.image_size)
        return inputs | {"pixel_values": pixels, "pixel_attention_mask": mask}
    return inputs | {
        "pixel_values": torch.zeros(rows * side**2, found.patch_numbers),
        "image_grid_thw": torch.tensor([[1, side, side]] * rows),
        "position_ids": torch.zeros(3, rows, length, dtype=torch.long),
    }


@contextmanager
def valueless(numbers: dict[str, Any], rows: int, side: int) -> Iterator[None]:
    """Replace what reads the values of tensors, and the type of layer norms."""
    module = importlib.import_module("transformers.models.{0}.modeling_{0}".format(numbers["model_type"]))
    replaced: list[Any] = [
        patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", 10**6),  # small tensors of known values stay known
        patch.object(torch.nn.functional, "layer_norm", in_float32),
        patch.object(module, "torch_compilable_check", lambda *args: None),
        patch.object(SmolVLMModel, "get_image_features", features_of_one_tile),
        patch.object(SmolVLMVisionEmbeddings, "forward", embedded),
    ]
    if hasattr(SmolVLMModel, "inputs_merger"):  # of transformers 5.19; that of 5.23 needs no values
        replaced.append(patch.object(SmolVLMModel, "inputs_merger", merged))
    if hasattr(module, "get_vision_window_index"):
        grid, config = torch.tensor([[1, side, side]] * rows), AutoConfig.for_model(**numbers).vision_config
        sizes = (config.spatial_merge_size, config.window_size, config.patch_size)
        index, ends = (values.tolist() for values in get_vision_window_index(grid, *sizes))
        windows = lambda *args, **options: (torch.tensor(index), torch.tensor(ends))  # noqa: E731
        replaced.append(patch.object(module, "get_vision_window_index", windows))
    with ExitStack() as stack:
        for one in replaced:
            stack.enter_context(one)
        yield


def in_float32(values: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> torch.Tensor:
    """Compute a layer norm as autocast does on a GPU."""
    with torch.autocast("cpu", enabled=False):
        whole = (None if one is None else one.float() for one in (weight, bias))
        return layer_norm(values.float(), shape, *whole, eps)


def features_of_one_tile(self: Any, pixel_values: Any, pixel_attention_mask: Any, **options: Any) -> Any:
    """Compute SmolVLM's features of images without looking for empty ones."""
    side = self.config.vision_config.image_size // self.config.vision_config.patch_size
    tiles = pixel_values.to(self.dtype).flatten(0, 1).contiguous()
    mask = torch.ones(len(tiles), side, side, dtype=torch.bool)
    output = self.vision_model(pixel_values=tiles, patch_attention_mask=mask, return_dict=True)
    output.pooler_output = self.connector(output.last_hidden_state)
    return output


def embedded(self: Any, pixel_values: Any, patch_attention_mask: Any) -> torch.Tensor:
    """Embed SmolVLM's patches of whole tiles."""
    patches = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
    return patches + self.position_embedding(torch.arange(self.num_positions).expand(len(patches), -1))


def merged(self: Any, input_ids: Any, inputs_embeds: Any, image_hidden_states: Any) -> Any:
    """Put SmolVLM's features of images among the embeddings, at the beginning."""
    images = image_hidden_states.reshape(len(input_ids), -1, inputs_embeds.size(-1))
    return torch.cat((images.to(inputs_embeds.dtype), inputs_embeds[:, images.size(1) :]), dim=1)


if __name__ == "__main__":
    main()
