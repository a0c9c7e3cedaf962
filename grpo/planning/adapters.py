"""Number of LoRA's parameters, and the copies of experts that PEFT makes to add them."""

from grpo.config.messages import meant
from grpo.config.transport import STACKED
from grpo.planning.mamba2 import Mamba2
from grpo.planning.shape import Shape
from grpo.planning.workload import Adapter, Workload

OF_EXPERTS = ("gate_up_proj", "down_proj")
"""Parameters of the experts of a layer, and their biases begin like them."""
FEED_FORWARD = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
GATE_UP = ({"gate_proj", "up_proj"}, {"w1", "w3"})
DOWN = ({"down_proj"}, {"w2"})


def why_no_parameters(shape: Shape, adapter: Adapter | None) -> str | None:
    """Return which of an adapter's parameters a policy has not, or is misspelled; None if none is known to be."""
    for name in adapter.parameters if adapter else ():
        if "experts" in name and not shape.mixtures:
            return f"peft.target_parameters: {name}: the model has no experts"
        matrix = name.rpartition(".")[2]
        if not matrix.startswith(OF_EXPERTS) and (other := meant(matrix, OF_EXPERTS)):
            return f"peft.target_parameters: {name}: no parameter of experts{other}"
    return None


def adapter_parameters(shape: Shape, adapter: Adapter) -> int:
    """Number of LoRA parameters: rank x (inputs + outputs) per module (2106.09685, section 4), and per expert.

    With `all-linear` PEFT also adapts the router of a mixture whose experts it adapts.
    """
    modules = [*shape.linears().items()]
    if adapter.vision and shape.vision:
        modules += [*shape.vision.linears().items(), *shape.vision.projector_linears().items()]
    dense = sum(
        adapter.rank * (inputs + outputs) * count
        for name, (inputs, outputs, count) in modules
        if adapts(shape, adapter, name)
    )
    experts = sum(rank * (inputs + outputs) for rank, inputs, outputs in stacks(shape, adapter)) * shape.num_experts
    with_router = adapter.modules is None and shape.model_type in STACKED
    router = adapter.rank * (shape.hidden_size + shape.num_experts) if with_router else 0
    return round(dense) + (experts + router) * shape.mixtures


def adapts(shape: Shape, adapter: Adapter, name: str) -> bool:
    """Return whether linear modules of a name have adapters.

    Those have none whose name PEFT takes for an expert's, or whose weights Mamba's kernels read by themselves.
    """
    taken = shape.model_type in STACKED and name in FEED_FORWARD
    return adapter.adapts(name) and not taken and not (name == "out_proj" and isinstance(shape.recurrent, Mamba2))


def stacks(shape: Shape, adapter: Adapter) -> list[tuple[int, int, int]]:
    """Return rank, inputs and outputs of the adapted matrices of an expert, as transformers stacks them.

    Gate and up projection are one matrix. Where PEFT finds it by the names of both, it has twice the rank
    (peft/utils/transformers_weight_conversion.py).
    """
    hidden, width, rank = shape.hidden_size, shape.moe_intermediate_size, adapter.rank

    def named(matrices: tuple[set[str], ...]) -> bool:
        known = shape.model_type in STACKED
        return known and (adapter.modules is None or any(names <= {*adapter.modules} for names in matrices))

    def targeted(name: str) -> bool:
        return any(parameter.rpartition(".")[2] == name for parameter in adapter.parameters)

    adapted = []
    if named(GATE_UP) or targeted("gate_up_proj"):
        adapted.append((rank * (2 if named(GATE_UP) else 1), hidden, 2 * width))
    if named(DOWN) or targeted("down_proj"):
        adapted.append((rank, width, hidden))
    return adapted if shape.mixtures else []


def adapted_experts(shape: Shape, workload: Workload) -> float:
    """Bytes of a layer's experts with their adapters added, which PEFT keeps for the backward pass."""
    if workload.adapter is None:
        return 0.0
    matrices = sum(inputs * outputs for _, inputs, outputs in stacks(shape, workload.adapter))
    return float(workload.compute_bytes * shape.num_experts * matrices)
