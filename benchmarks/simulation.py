"""The memory of an update: simulation and plan compared, `python -m benchmarks.simulation`.

PyTorch's `MemTracker` follows every tensor of a real policy, TRL's head, autograd and the optimizer, which under
`FakeTensorMode` compute shapes and no numbers. It shares no formula with `grpo.planning.memory`. Of TRL's
head only the kernels are replaced, as Triton's work in place on a GPU and those for the CPU do not.
"""

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import date
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head

from grpo.config.schema import ROOT
from grpo.extras.measuring.tensors import PeakTracker
from grpo.model.adapted import pattern_of, unfit
from grpo.planning.hub_config import shape_of
from grpo.planning.memory import update
from grpo.planning.workload import Adapter, Workload
from grpo.trainer.adapter_inputs import keep_inputs_uncast
from grpo.trainer.tiled_mlp import tile_mlps
from grpo.utils.limits import GB

HERE = Path(__file__).parent
MODELS = ("qwen2_5_0_5b", "llama3_2_1b")
MICROBATCHES = ((1, 1042), (4, 1042), (8, 2048))  # sequences, tokens per sequence
LONG = 16384
"""Tokens of a sequence that is a micro-batch of its own."""
TILE = 4096
"""Tokens that its feed-forward layers compute at once, in half of the cases."""


def main() -> None:
    """Simulate and plan all cases, print a table, and write `simulation.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=MODELS, help="names of conf/model")
    parser.add_argument("--output", type=Path, default=HERE / "simulation.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    console = Console()
    cases = [
        (model, method, checkpointing, rows, length, 0)
        for model in options.models
        for method in ("full", "lora")
        for checkpointing in (False, True)
        for rows, length in MICROBATCHES
    ]
    long = product(options.models, ("full", "lora"), (0, TILE))
    cases += [(model, method, True, 1, LONG, tile) for model, method, tile in long]
    results = [compare(*case) for case in track(cases, "simulating", console=console)]
    table = Table("model", "method", "checkpointing", "micro-batch", "simulated GiB", "planned GiB", "difference")
    for row in results:
        table.add_row(
            row["model"],
            row["method"],
            "yes" if row["checkpointing"] else "no",
            f"{row['rows']} x {row['length']}" + f", tiles of {row['mlp_tile']}" * bool(row["mlp_tile"]),
            f"{row['simulated_gb']:.2f}",
            f"{row['planned_gb']:.2f}",
            f"{row['difference']:+.1%}",
        )
    console.print(table)
    worst = max(abs(row["difference"]) for row in results)
    console.print(f"largest difference {worst:.1%}")
    content = {"date": str(date.today()), "torch": torch.__version__, "worst": worst, "cases": results}
    options.output.write_text(json.dumps(content, indent=1) + "\n")


def compare(model: str, method: str, checkpointing: bool, rows: int, length: int, mlp_tile: int) -> dict[str, Any]:
    """Return the memory of an update, simulated and planned, GiB."""
    numbers = dict(OmegaConf.load(ROOT / "conf" / "model" / f"{model}.yaml").shape)
    started = time.monotonic()
    masked = length != LONG
    simulated = simulate(numbers, method, checkpointing, rows, length, masked=masked, mlp_tile=mlp_tile) / GB
    workload = Workload(
        prompt=0,
        completion=length,
        sequences=rows,
        tokens=rows * length if masked else length // 2,
        adapter=Adapter(16) if method == "lora" else None,
        optimizer="adamw_torch_fused",
        checkpointing=checkpointing,
        mlp_tile=mlp_tile,
    )
    parts = update(shape_of(numbers), workload)
    planned = (sum(parts.values()) - parts["context"]) / GB  # which is not a tensor
    return {
        "model": model,
        "method": method,
        "checkpointing": checkpointing,
        "rows": rows,
        "length": length,
        "mlp_tile": mlp_tile,
        "simulated_gb": round(simulated, 3),
        "planned_gb": round(planned, 3),
        "difference": planned / simulated - 1,
        "seconds": round(time.monotonic() - started, 1),
    }


def simulate(*case: Any, **options: Any) -> float:
    """Return the peak in bytes; arguments of `snapshot`."""
    return snapshot(*case, **options)["Total"]


def snapshot(
    numbers: dict[str, Any],
    method: str,
    checkpointing: bool,
    rows: int,
    length: int,
    processes: int = 1,
    masked: bool = True,
    mlp_tile: int = 0,
) -> dict[Any, int]:
    """Return the bytes of each kind at the peak of two optimizer steps of two micro-batches each, in bfloat16.

    Args:
        masked: whether attention has a mask, as for several sequences; a sequence alone has none.
        mlp_tile: tokens that a feed-forward layer computes at once; 0 for all.
        processes: over which FSDP2 divides the policy, of which one is simulated. The peak is then that of the forward
            and backward passes: in the optimizer's step DTensor computes shapes with whole tensors, fakes as well.
    """
    with one_process_of(processes) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        model = policy(numbers, method, checkpointing)
        if mlp_tile:
            tile_mlps(mlp_tile, model)
        if mesh:
            shard(model, mesh)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, foreach=False)
        tracker = PeakTracker()
        tracker.track_external(model, optimizer)
        with tracker, in_place_kernels(), without_mask(model, not masked):
            ids = torch.zeros(rows, length, dtype=torch.long)
            mask = torch.ones(rows, 1, length, length, dtype=torch.bool) if masked else None
            for _ in range(2):
                for _ in range(2):
                    with torch.autocast("cpu", torch.bfloat16):
                        output = model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True)
                    output.log_probs.mean().backward()
                    del output
                tracker.follows = processes == 1
                optimizer.step()
                optimizer.zero_grad()
                tracker.follows = True
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]


@contextmanager
def one_process_of(processes: int) -> Iterator[DeviceMesh | None]:
    """Stand for the first of several processes whose messages go nowhere."""
    if processes == 1:
        yield None
        return
    dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (processes,), mesh_dim_names=("shards",))
    finally:
        dist.destroy_process_group()


def shard(model: Any, mesh: DeviceMesh) -> None:
    """Divide a policy as `shard=fsdp2` does, by accelerate."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    plugin.set_mixed_precision("bf16")
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=("shards",)),
        mixed_precision="bf16",
        is_main_process=False,
        device=torch.device("cpu"),
    )
    fsdp2_prepare_model(accelerator, model)


def policy(numbers: dict[str, Any], method: str, checkpointing: bool) -> Any:
    """Return a policy of a shape, with fake weights."""
    shape = {name: value for name, value in numbers.items() if name != "parameters"}
    config = AutoConfig.for_model(**shape, use_cache=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        if method == "lora":
            linear = {"target_modules": "all-linear", "exclude_modules": pattern_of(unfit(model))}
            model = get_peft_model(model, LoraConfig(r=16, task_type="CAUSAL_LM", **linear))
            keep_inputs_uncast(model)
    return with_fakes(model, checkpointing, method == "lora")


def with_fakes(model: Any, checkpointing: bool, adapted: bool) -> Any:
    """Return a policy that was built on the meta device with fake weights, as TRL prepares it."""
    fakes: dict[int, torch.Tensor] = {}  # tied weights stay tied
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    if isinstance(tensor, torch.nn.Parameter):
                        fake = torch.nn.Parameter(fake, tensor.requires_grad)
                    tensors[name] = fakes.setdefault(id(tensor), fake)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if adapted:
            model.enable_input_require_grads()
    return model.train()


def without_mask(model: Any, wanted: bool) -> Any:
    """Replace the mask by none, as transformers does where no token is padding; a fake tensor hides that from it."""
    module = type(next(part for part in model.modules() if isinstance(part, PreTrainedModel))).__module__
    return patch(f"{module}.create_causal_mask", lambda **options: None) if wanted else nullcontext()


def in_place_kernels() -> Any:
    """Replace the kernels of TRL's head by functions that take no memory of their own, as Triton's do."""
    return patch.multiple(
        chunked_logprob,
        _forward_tile=lambda *args, **options: None,
        _backward_tile=lambda *args, **options: None,
        _addmm_fp32=lambda total, a, b: None,
    )


if __name__ == "__main__":
    main()
