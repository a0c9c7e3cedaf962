"""The plan of Gemma 3n's streams against the memory that they really take."""

from typing import Any

import pytest

from benchmarks.simulation import simulate
from grpo.planning.hub_config import shape_of
from grpo.planning.memory import update
from grpo.planning.persistent import trained
from grpo.planning.workload import Adapter, Workload
from tests.unit.planning.test_memory import NUMBERS, model

FULL = "full_attention"
WIDTHS = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 1}
WIDTHS |= {"head_dim": 64, "hidden_size_per_layer_input": 64, "vocab_size": 8000, "vocab_size_per_layer_input": 8000}


def numbers(layers: int, **more: Any) -> dict[str, Any]:
    """The numbers of a policy with so many layers."""
    of_layers = {"num_hidden_layers": layers, "layer_types": [FULL] * layers, "num_kv_shared_layers": 0}
    streams = {"altup_num_inputs": 4, "laurel_rank": 16, "activation_sparsity_pattern": [0.0] * layers}
    return NUMBERS | WIDTHS | of_layers | streams | {"model_type": "gemma3n_text", **more}


def test_the_parameters_are_those_of_the_built_model() -> None:
    built = model(numbers(4, num_kv_shared_layers=2))
    shape = shape_of(built.config.to_dict())
    assert built.num_parameters() == shape.parameters() == shape_of(numbers(4, num_kv_shared_layers=2)).parameters()
    assert trained(shape, Workload(0, 8, 1, 8))[0] == shape.parameters()


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_update_takes_what_the_simulation_says(method: str, checkpointing: bool) -> None:
    adapter = Adapter(16) if method == "lora" else None
    workload = Workload(0, 640, 2, 1280, adapter=adapter, checkpointing=checkpointing, optimizer="adamw_torch_fused")
    parts = update(shape_of(numbers(4)), workload)
    simulated = simulate(numbers(4), method, checkpointing, rows=2, length=640)
    assert sum(parts.values()) - parts["context"] == pytest.approx(simulated, rel=0.05)
