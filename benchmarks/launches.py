"""Kernels that an update would start on a GPU, and places where the host would wait for it, counted on a CPU.

`python -m benchmarks.launches` (two minutes) runs updates of tiny policies of two and of four layers in bfloat16, sees
every operation that PyTorch dispatches, and tells tensors of the host from those that a GPU would have. Attention takes
the path of a GPU; its flash kernels and those of TRL's head count as one each. Of compiled layers it counts the kernels
in the code that PyTorch's compiler writes for a CPU. It prints a table and writes `benchmarks/launches.json`.
"""

import argparse
import collections
import io
import json
import logging
import re
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from trl.kernels import chunked_logprob

from grpo.options import Update
from grpo.trainer import ExactGRPOTrainer, compiled_layers
from grpo.trainer.shared_prompts import attention, varlen
from tests.stock_trl import make, rollouts

HERE = Path(__file__).parent
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero")
"""Operations whose result the host reads, or whose size it has to know."""
NOTHING = ("aten::empty", "aten::new_empty", "aten::detach", "aten::alias", "aten::lift_fresh")
KERNEL = re.compile(r"^\s+(?:\w+ = )?(cpp_fused_\w+|extern_kernels\.\w+|torch\.ops\.\w+\.\w+)", re.MULTILINE)
"""Calls in the code that the compiler writes."""
CASES = {
    "all weights": {},
    "LoRA": {"adapter": True},
    "LoRA, checkpointed": {"adapter": True, "gradient_checkpointing": True},
    "LoRA, prompts apart": {"adapter": True, "share_prompts": False},
}


def main() -> None:
    """Count all cases, print a table, and write `launches.json`."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    logging.disable()
    warnings.filterwarnings("ignore")
    console = Console()
    rows = {
        name: measure(case) | with_compiler(case) for name, case in track(CASES.items(), "counting", console=console)
    }
    headings = ("a micro-batch of", "kernels per layer", "besides layers", "waits", "waits per step", "compiled layer")
    table = Table(*headings)
    for name, row in rows.items():
        table.add_row(name, *(str(value) for value in row.values()))
    console.print(table)
    content = {"date": str(date.today()), "torch": torch.__version__, "cases": rows}
    (HERE / "launches.json").write_text(json.dumps(content, indent=1) + "\n")


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Return kernels per layer and besides layers of a micro-batch, and waits of a micro-batch and of a step."""
    (two, waits, number), (four, *_) = (counted(layers, **case) for layers in (2, 4))
    in_each = collections.Counter({place: count for place, count in waits.items() if count >= number})
    return {
        "layer": round((four - two) / 2 / number),
        "besides": round((2 * two - four) / number),
        "waits": in_each.total() // number,
        "waits_of_step": (waits - in_each).total(),
    }


def with_compiler(case: dict[str, Any]) -> dict[str, int | None]:
    """Return the kernels of a compiled layer in a micro-batch, None where prompts are not shared."""
    if not case.get("share_prompts", True):
        return {"compiled_layer": None}
    forward, backward = compiled(case.get("adapter", False))
    return {"compiled_layer": forward * (1 + case.get("gradient_checkpointing", False)) + backward}


class Launches(TorchDispatchMode):
    """Counts kernels, and places where the host waits, while it is entered; some tensors are a GPU's from the start."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self.on_device = {storage(tensor) for tensor in tree_leaves(tensors) if isinstance(tensor, torch.Tensor)}
        self.kernels = collections.Counter[str]()
        self.waits = collections.Counter[str]()
        self.paused = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.name().split(".")[0]
        if name.startswith("grpo::"):  # whose own operations would not be seen
            way = varlen.backward if name.endswith("backward") else varlen.forward
            arguments = (args[0], args[1:6], *args[6:]) if way is varlen.backward else (args[:3], *args[3:])
            with self:
                return tuple(way(*arguments))
        inputs = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        there = any(storage(tensor) in self.on_device for tensor in inputs)
        results = function(*args, **kwargs)
        outputs = [tensor for tensor in tree_leaves(results) if isinstance(tensor, torch.Tensor)]
        if self.paused:
            return results
        if not there:
            self.on_device -= {storage(tensor) for tensor in outputs}  # addresses of tensors that are gone
            return results
        self.on_device |= {storage(tensor) for tensor in outputs}
        indices = args[1] if name in ("aten::index", "aten::index_put", "aten::_index_put_impl_") else ()
        if name in READS or any(index is not None and index.dtype == torch.bool for index in indices):
            self.wait(name)
        elif not name.startswith(NOTHING):
            known = {storage(tensor) for tensor in inputs}
            is_view = outputs and all(storage(tensor) in known for tensor in outputs)
            self.kernels[name] += not is_view or function._schema.is_mutable
        return results

    def wait(self, what: str) -> None:
        """Count a place where the host waits."""
        frames = [of for of in traceback.extract_stack() if re.search(r"/(grpo|trl|transformers)/", of.filename)]
        place = f"{Path(frames[-1].filename).name}, {frames[-1].name}" if frames else "?"
        if place != "per_token.py, forward":  # which looks for the size of a tile on a CPU alone
            self.waits[f"{what} in {place}"] += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While inside, operations are counted, and copies to the host and from it, of which a CPU dispatches none."""

        def unseen(function: Any, *args: Any, **kwargs: Any) -> Any:
            self.paused, before = True, self.paused
            try:
                return function(*args, **kwargs)
            finally:
                self.paused = before

        def read(tensor: torch.Tensor) -> Any:
            if storage(tensor) in self.on_device and not self.paused:
                self.wait("tolist")
            return unseen(tolist, tensor)

        def to_host(tensor: torch.Tensor) -> torch.Tensor:
            if storage(tensor) in self.on_device:
                self.wait("copy to the host")
            result = unseen(torch.clone, tensor.detach())
            self.on_device.discard(storage(result))
            return result

        def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            result = to(tensor, *args, **kwargs)
            if any(isinstance(value, torch.device) for value in (*args, *kwargs.values())):
                self.kernels["copy to the device"] += storage(tensor) not in self.on_device
                self.on_device.add(storage(result))
            return result

        def made(data: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("device") is not None:
                self.wait("torch.tensor(device)")
            result = tensor(data, **kwargs)
            (self.on_device.add if "device" in kwargs else self.on_device.discard)(storage(result))
            return result

        tolist, to, tensor = torch.Tensor.tolist, torch.Tensor.to, torch.tensor
        with (
            patch.multiple(torch.Tensor, tolist=read, cpu=to_host, to=moved),
            patch.object(torch, "tensor", made),
            self,
        ):
            yield


def storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


class FlashKernel:
    """Stands for a GPU's flash attention; only shapes matter here. Its backward pass has three kernels."""

    @staticmethod
    def _flash_attention_forward(query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return torch.zeros_like(query), query.new_empty(query.shape[1::-1], dtype=torch.float32)

    @staticmethod
    def _flash_attention_backward(gradient: torch.Tensor, *tensors: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(tensor) for tensor in tensors[:3])


@contextmanager
def path_of_a_gpu() -> Iterator[None]:
    """While inside, attention and TRL's head are computed as on a GPU, whose kernels only have shapes here."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(attention, "SHORT", 0))
        stack.enter_context(patch.object(attention, "can_merge", lambda *tensors: True))
        stack.enter_context(
            patch.object(attention, "layout_on", lambda device, groups: varlen.segments_of(groups, device))
        )
        stack.enter_context(patch.object(varlen, "aten", FlashKernel))
        for name in ("_forward_tile", "_backward_tile"):
            stack.enter_context(patch.object(chunked_logprob, name, lambda logits, *rest, **options: logits.mul_(1)))
        stack.enter_context(patch.object(chunked_logprob, "_addmm_fp32", lambda total, a, b: total.mul_(1)))
        yield


def policy(layers: int) -> Any:
    """Return a small policy like Qwen2.5, in bfloat16."""
    config = Qwen2Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return Qwen2ForCausalLM(config).to(torch.bfloat16)


def trainer(folder: str, layers: int, adapter: bool = False, share_prompts: bool = True, **options: Any) -> Any:
    """Return a trainer of such a policy, in bfloat16."""
    return make(
        ExactGRPOTrainer,
        Path(folder),
        model=policy(layers),
        update=Update(600, share_prompts=share_prompts, compile=False),
        peft_config=LoraConfig(r=4, target_modules="all-linear") if adapter else None,
        rollout_func=lambda prompts, of: rollouts(
            prompts, of, lambda generator: 40 + int(torch.randint(0, 40, (1,), generator=generator))
        ),
        reward_funcs=lambda completion_ids, **columns: [(sum(ids) % 7) / 3 for ids in completion_ids],
        max_completion_length=128,
        per_device_train_batch_size=32,
        num_generations=8,
        max_steps=2,
        use_cpu=True,
        bf16=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )


def counted(layers: int, **case: Any) -> tuple[int, collections.Counter[str], int]:
    """Return the kernels of an update, the places where the host waits, and the micro-batches."""
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        made = trainer(folder, layers, **case)
        gradient = made.step_update.gradient

        def watched(model: Any, slices: Any, *others: Any) -> Any:
            launches = Launches([list(model.parameters()), list(model.buffers()), slices])
            with path_of_a_gpu(), launches.watching():
                result = gradient(model, slices, *others)
            found[:] = launches.kernels.total(), launches.waits, result[1]["update/microbatches"]
            return result

        made.step_update.gradient = watched
        made.train()
    return found[0], found[1], int(found[2])


def compiled(adapter: bool) -> tuple[int, int]:
    """Return the kernels of a compiled layer in the forward and in the backward pass, those of its attention too."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), ExitStack() as stack:
        made = trainer(folder, layers=1, adapter=adapter)
        made.packing.shared_prompts.decide()
        stack.enter_context(attention.shared_attention(made.model))
        stack.enter_context(patch.object(attention, "SHORT", 0))
        stack.enter_context(made.accelerator.autocast())
        layer = next(of for of in made.model.modules() if isinstance(of, GradientCheckpointingLayer))
        call = compiled_layers.calls_of(made.model, [layer], made.packing.shared_prompts)[layer]
        function = torch.compile(type(layer).forward, dynamic=True, fullgraph=True)
        with fresh_cache():
            _, codes = run_and_get_code(compiled_layers.results, function, layer, call)
    layout = varlen.segments_of(call[1]["attention_mask"].groups, torch.device("cpu"))
    forward, backward = (len(KERNEL.findall(code.split("def call(")[1])) for code in codes[:2])
    in_forward, in_backward = kernels_of_attention(layout, layer.self_attn.head_dim)
    return forward - 1 + in_forward, backward - 1 + in_backward


def kernels_of_attention(layout: list[torch.Tensor], size: int) -> tuple[int, int]:
    """Return the kernels of the attention of shared prompts, of four heads, in the forward and the backward pass."""
    tokens = int(layout[0][-1])
    query, key, value = (torch.zeros(tokens, heads, size) for heads in (4, 2, 2))
    counts = []
    with path_of_a_gpu():
        for backward in (False, True):
            tensors = (query, key, value, torch.zeros_like(query), torch.zeros(4, tokens))
            launches = Launches([tensors, layout[:-1]])
            with launches.watching():
                varlen.backward(query, tensors, layout, None) if backward else varlen.forward(tensors[:3], layout, None)
            counts.append(launches.kernels.total())
    return counts[0], counts[1]


if __name__ == "__main__":
    main()
