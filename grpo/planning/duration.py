"""How long a step and a run take: floating-point operations, bytes that are moved, and the start of each layer.

The estimate is for completions of half the limit on average, of which the longest reaches it. Rewards are not in it.
"""

import math
import timeit
from dataclasses import dataclass, replace
from functools import cache

from omegaconf import DictConfig, OmegaConf

from grpo.config.batch import completions, processes
from grpo.config.facts import generator_of, sharding_strategy
from grpo.config.mixture import generated
from grpo.planning.activations import tiled
from grpo.planning.fit import AT_ONCE, Plan
from grpo.planning.from_config import find_shape, workload_of
from grpo.planning.memory import kv_cache
from grpo.planning.persistent import trained, weights
from grpo.planning.shape import Shape
from grpo.planning.workload import Workload
from grpo.utils.spoken import spoken

REACHED = {"cuda": 0.4, "mps": 0.4, "Ampere": 0.55, "cpu": 0.5}
"""The fraction of a device's operations per second that training and prompts reach: by published steps on A100 (Ampere)
and H100 (benchmarks/published.json); other GPUs as H100."""
LAYER = {"cuda": 1e-3, "mps": 5e-4, "cpu": 4e-4}
"""Seconds per layer and forward pass of transformers for Python and the start of kernels."""
ENGINE_LAYER = {"cuda": 5e-5, "cpu": 2e-4}
"""The same for vLLM, which records them as CUDA graphs."""
COMPILING = 60.0
"""Seconds in which PyTorch compiles the decoder layers, once: on two CPU cores 10 to 40; no GPU has been seen."""
MEAN_LENGTH = 0.5
"""Mean length of a completion, as a fraction of the limit."""
OFF_BY = {"cuda": 3.0, "mps": 3.0, "cpu": 2.0}
"""The factor by which an estimate may be off; on a CPU the demo and SmolLM2 stay within it, on A100 and H100 published
updates do. Generation on a GPU has been compared with one run (docs/memory.md)."""


@dataclass(frozen=True)
class Speed:
    """Operations and bytes per second of a device."""

    operations: float
    """Floating-point operations that training and prompts reach."""
    bandwidth: float
    """Bytes read from its memory."""


@dataclass
class Duration:
    """Expected time of a run, in seconds."""

    phases: dict[str, float]
    """Time per step by phase."""
    steps: int | None
    """Number of steps; None if it follows from data that planning does not load."""
    evaluation: float
    """Both evaluations."""
    off_by: float
    """The factor by which all of it may be off."""
    compared: bool
    """Whether such estimates have been compared with runs on the kind of device."""
    hourly_price: float | None = None
    overlaps: bool = False
    """Whether a server generates during the other phases."""
    compiles: bool = False
    """Whether the decoder layers are compiled before the first update."""

    @property
    def run(self) -> float | None:
        """All steps, the evaluations, and the compiling; None without the number of steps."""
        return self.steps * self.step + self.evaluation + COMPILING * self.compiles if self.steps else None

    @property
    def step(self) -> float:
        """Time per step."""
        generation = self.phases["generation"] if self.overlaps else 0.0
        return max(generation, sum(self.phases.values()) - generation)

    def as_dict(self) -> dict[str, object]:
        """Return the content of `plan.json` about time and cost; ranges are lowest and highest."""
        content: dict[str, object] = {
            "step_s": self.step,
            "step_s_range": self.range(self.step),
            "phases_s": self.phases,
            "steps": self.steps,
            "evaluation_s": self.evaluation,
            "compiling_s": COMPILING * self.compiles,
            "compared": self.compared,
        }
        if self.run:
            content |= {"run_s": self.run, "run_s_range": self.range(self.run)}
            if self.hourly_price:
                content |= {"cost": self.cost(self.run), "cost_range": [self.cost(end) for end in self.range(self.run)]}
        return content

    def range(self, seconds: float) -> list[float]:
        """Return the lowest and the highest time that is expected."""
        return [seconds / self.off_by, seconds * self.off_by]

    def cost(self, seconds: float) -> float:
        """Return the price of so many seconds."""
        return seconds / 3600 * (self.hourly_price or 0.0)

    def __str__(self) -> str:
        """Return the estimate as a line."""
        longest = max(self.phases, key=lambda phase: self.phases[phase])
        low, high = (spoken(end) for end in self.range(self.step))
        overlaps = ", generation during the rest" * self.overlaps
        share = f"{longest} {self.phases[longest] / self.step:.0%}{overlaps}"
        text = f"about {spoken(self.step)} per step ({low} to {high}; {share})"
        if self.run and self.steps:
            low, high = (spoken(end) for end in self.range(self.run))
            text += f"; {self.steps} step{'s' * (self.steps > 1)} in {spoken(self.steps * self.step)}"
            text += f", both evaluations in {spoken(self.evaluation)}" if self.evaluation else ""
            text += f", compiling in {spoken(COMPILING)}" if self.compiles else ""
            text += f", in total {spoken(self.run)} ({low} to {high})"
            if self.hourly_price:
                cheap, dear = (f"{self.cost(end):.2f}" for end in self.range(self.run))
                text += f", cost {self.cost(self.run):.2f} ({cheap} to {dear})"
        else:
            text += "; train.max_steps gives the time and the cost of the run"
        if self.compared:
            return text + "; at the speed of this machine right now"
        return text + "; generation compared with one run on one GPU"


def expected_duration(config: DictConfig, plan: Plan, lengths: tuple[float, float] | None = None) -> Duration | None:
    """Return the expected time of a planned run; None for a GPU without a speed in its profile.

    Args:
        lengths: mean tokens of prompts and of completions, where they are known; else they follow from the limits.
    """
    device = "cpu" if plan.unified else "mps" if config.gpu and config.gpu.vendor == "apple" else "cuda"
    speed = speed_of_cpu() if plan.unified else speed_of_gpu(config)
    if speed is None:
        return None
    config = config.copy()
    for key, value in plan.settings.items():
        if "." in key:
            OmegaConf.update(config, key, value)
    shape = find_shape(config.model)
    workload = workload_of(config, device, shape.model_type)
    if lengths:
        prompt, completion = lengths[0], lengths[1] / MEAN_LENGTH
        workload = replace(
            workload, prompt=math.ceil(prompt), completion=min(workload.completion, math.ceil(completion))
        )
    at_once = plan.settings.get(AT_ONCE, workload.sequences)
    phases = step_phases(config.train, shape, workload, speed, at_once)
    batch = max(1, min(config.task.eval.size, config.train.per_device_eval_batch_size or at_once))
    batches = math.ceil(config.task.eval.size / batch)
    asked_once = replace(workload, completions_per_prompt=1)
    evaluation = 2 * batches * generation(shape, asked_once, speed, batch, bool(config.train.use_vllm), batch)
    steps, price, overlaps = number_of_steps(config), config.plan.hourly_price, bool(config.engine.staleness)
    compiles = config["update"].compile
    if compiles == "auto":  # where it pays: a compiled layer starts half of the kernels
        updates = steps * phases["update"] if steps else math.inf
        compiles = device == "cuda" and not sharding_strategy(config.train) and updates > 2 * COMPILING
    return Duration(phases, steps, evaluation, OFF_BY[device], device == "cpu", price, overlaps, compiles)


def step_phases(train: DictConfig, shape: Shape, workload: Workload, speed: Speed, at_once: int) -> dict[str, float]:
    """Return seconds per step by phase, on a device that generates this many completions at once."""
    count = train.per_device_train_batch_size * train.gradient_accumulation_steps
    rows = workload.sequences  # of one generation
    generations = count / (rows * train.num_iterations)
    length = MEAN_LENGTH * workload.completion
    prompts = count / workload.completions_per_sequence
    tokens = prompts * workload.prompt + count * length
    layers = shape.num_hidden_layers * LAYER[workload.device]
    passes = -(-tokens // workload.microbatch)
    forward = tokens * operations(shape, workload.prompt + length) / speed.operations
    forward += passes * (layers + unpacked(shape, workload) / speed.bandwidth)
    backward = float((1 if workload.adapter else 2) + workload.checkpointing)
    if tiled(shape, workload, workload.microbatch) < workload.microbatch:  # each tile is computed again
        mlp = 6.0 * shape.hidden_size * shape.active_width * shape.num_hidden_layers
        backward += mlp / operations(shape, workload.prompt + length)
    parameters, size = trained(shape, workload)
    optimizer = 8 * parameters * size / speed.bandwidth  # weight, gradient and two moments, read and written
    by_engine = bool(train.use_vllm)
    generate = generation(shape, workload, speed, rows, by_engine, at_once)
    phases = {"generation": generations * generate, "update": (1 + backward) * forward + optimizer}
    scored = by_engine and train.vllm_importance_sampling_correction
    if scored or train.num_iterations > 1:
        phases["log-probabilities"] = forward / train.num_iterations
    if generator_of(train) == "colocated":
        phases["weights to vLLM"] = generations * 2 * weights(shape, workload) / speed.bandwidth
    return phases


def generation(shape: Shape, workload: Workload, speed: Speed, rows: int, by_engine: bool, at_once: int) -> float:
    """Return the seconds of a generation: the distinct prompts, then token by token.

    With transformers, ended completions leave, so that on average a fraction `MEAN_LENGTH` of them is computed; if not
    all are generated at once, waiting completions join. For vLLM the estimate assumes a constant number to the end.
    """
    device = workload.device
    layers = shape.num_hidden_layers * (ENGINE_LAYER if by_engine else LAYER)[device]
    length = workload.completion if by_engine else MEAN_LENGTH * workload.completion
    tokens = rows * length
    steps = max(workload.completion, tokens / at_once)
    token = operations(shape, workload.sequence) / speed.operations
    cache = kv_cache(shape, replace(workload, sequences=1)) / 2  # which fills
    read = weights(shape, workload) + (0.0 if by_engine else unpacked(shape, workload))
    moved = (steps * read + tokens * cache) / speed.bandwidth
    prompts = -(-rows // (1 if by_engine else workload.completions_per_prompt))
    return prompts * workload.prompt * token + steps * layers + max(tokens * token, moved)


def unpacked(shape: Shape, workload: Workload) -> float:
    """Return the bytes of quantized weights that a pass writes, dequantized, and reads again."""
    count = sum(inputs * outputs * number for inputs, outputs, number in shape.all_linears())
    return 2.0 * workload.compute_bytes * count if workload.quantized else 0.0


def operations(shape: Shape, length: float) -> float:
    """Return the floating-point operations of a token's forward pass: two per weight it meets, and attention.

    Attention takes 4 x query width per token of the sequence and layer, half of it under a causal mask (2001.08361,
    table 1), gated DeltaNet the products of its rule.
    """
    linear = sum(inputs * outputs * count for inputs, outputs, count in shape.linears().values())
    experts = 3 * shape.num_experts_per_tok * shape.moe_intermediate_size * shape.hidden_size * shape.mixtures
    attention = 2 * shape.query_width * length * shape.attention_layers
    attention += shape.recurrent.operations() if shape.recurrent else 0
    return 2.0 * (linear + experts + shape.embeddings) + attention


def number_of_steps(config: DictConfig) -> int | None:
    """Return the optimizer steps of a run; None if they depend on data that is not loaded."""
    train, size = config.train, generated(config.task)
    if train.max_steps > 0:
        return train.max_steps
    if size is None:
        return None
    problems_per_step = completions(train, processes(config)) / train.num_generations
    return int(train.num_train_epochs * size * train.num_iterations / problems_per_step)


def speed_of_gpu(config: DictConfig) -> Speed | None:
    """Return the speed of a profile's GPU; None if the profile has no numbers."""
    gpu = config.gpu
    if not (gpu and gpu.get("tflops") and gpu.get("bandwidth_gb_s")):
        return None
    reached = REACHED.get(gpu.architecture, REACHED["cuda"])
    return Speed(reached * gpu.tflops * 1e12, gpu.bandwidth_gb_s * 1e9)


@cache
def speed_of_cpu() -> Speed:
    """Measure the speed of this machine, in a third of a second."""
    import numpy as np  # which no plan for a GPU needs

    size = 768
    matrix = np.ones((size, size), dtype=np.float32)
    data = np.ones(2**24, dtype=np.float32)  # more than caches hold
    matrix @ matrix
    computing = min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=20))
    moving = min(timeit.repeat(lambda: data.sum(), number=1, repeat=20))
    return Speed(REACHED["cpu"] * 2 * size**3 / computing, data.nbytes / moving)
