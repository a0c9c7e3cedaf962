"""From a composed configuration to the model's shape and the workload."""

import functools
import json
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from grpo.config.batch import completions_per_process, node_range, processes
from grpo.config.facts import generator_of
from grpo.config.library import DEFAULT_OPTIMIZER
from grpo.config.schema import PARTS, REWARD_MODEL, ROOT
from grpo.config.transport import transport_of
from grpo.planning.hub_config import shape_of
from grpo.planning.shape import Shape
from grpo.planning.sharding import sharding_of
from grpo.planning.workload import Adapter, Images, Sharding, Workload
from grpo.utils.distributed import local_world_size
from grpo.utils.errors import ConfigError
from grpo.utils.limits import UNMEASURED

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@functools.cache
def shipped_models() -> dict[str, tuple[str, Shape]]:
    """Return name on the hub and shape of each choice of `conf/model`, except built-in policies."""
    files = sorted((ROOT / "conf" / "model").glob("*.yaml"))
    choices = {file.stem: OmegaConf.load(file) for file in files if not file.stem.startswith("tiny")}
    return {stem: (choice.model_name_or_path, shape_of(choice.shape)) for stem, choice in choices.items()}


@functools.cache
def shapes_of_choices() -> tuple[Shape, ...]:
    """Return the shape of each choice of `conf/model`."""
    built_in = (OmegaConf.load(file).model.shape for file in (ROOT / "conf" / "model").glob("tiny*.yaml"))
    return (*map(shape_of, built_in), *(shape for _, shape in shipped_models().values()))


def find_shape(model: DictConfig) -> Shape:
    """Return the model's shape: from its folder, `conf/model`, `model.shape`, or the hub's `config.json`.

    Raises:
        ConfigError: none of these has the shape, or a number in it is wrong.
    """
    name = model.model_name_or_path
    shipped = dict(shipped_models().values())
    file = Path(name) / "config.json"
    try:
        if file.is_file():
            return shape_of(json.loads(file.read_text()))
        if name in shipped:
            return shipped[name]
        if model.shape and (configured := shape_of(model.shape)) not in shapes_of_choices():
            # else the shape belongs to the choice that the name replaces, and so may the number of parameters
            stale = configured.given_parameters in [shape.given_parameters for shape in shapes_of_choices()]
            return replace(configured, given_parameters=0) if stale else configured
    except ValueError as error:
        raise ConfigError(f"model.shape of {name}: {error}") from error
    return from_hub(name, model.model_revision)


def from_hub(name: str, revision: str) -> Shape:
    """Return the shape of a model on the hub, from the cache if it is there.

    Raises:
        ConfigError: the model's `config.json` cannot be read.
    """
    if name.startswith(("/", ".")):
        raise ConfigError(f"model.model_name_or_path={name}: there is no such folder")

    import huggingface_hub as hub  # takes a quarter of a second, which most plans do not need

    try:
        cached = hub.try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(cached, str):
            return shape_of(json.loads(Path(cached).read_text()))
        url, headers = hub.hf_hub_url(name, "config.json", revision=revision), hub.utils.build_hf_headers()
        answer = hub.get_session().get(url, headers=headers, follow_redirects=True, timeout=10)
        answer.raise_for_status()
        return shape_of(answer.json())
    except ValueError as error:
        raise ConfigError(f"model.model_name_or_path={name}: its config.json: {error}") from error
    except Exception as error:  # whatever network, hub and cache can raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        raise ConfigError(
            f"model.model_name_or_path={name}: neither a folder nor a model whose config.json can be read from the hub "
            f"({reason}); check its name and the network, name a folder that holds the model, or give its "
            "+model.shape.hidden_size=… and the other numbers, as in conf/model"
        ) from error


def workload_of(config: DictConfig, device: str, family: str | None = None) -> Workload:
    """Return the workload of a configuration, for a single process on a `cuda` or `cpu` device.

    Args:
        family: `model_type` of the policy; None if unknown.

    Raises:
        ConfigError: a number that determines memory is missing or not positive.
    """
    check_numbers(config)
    train, peft = config.train, config.peft
    sharding = sharding_of(config)
    half = train.bf16 or train.fp16 or train.bf16 is None
    size = 2 if sharding.float32 else BYTES.get(config.model.dtype, 2)  # FSDP2 and DeepSpeed compute with copies
    quantization = (peft.get("quantization") or {}) if peft else {}
    quantized = 4 if quantization.get("load_in_4bit") else 8 if quantization.get("load_in_8bit") else 0
    optimizer = str(train.optim or DEFAULT_OPTIMIZER)
    if train.resume_from_checkpoint or device == "cpu":  # bitsandbytes loads onto the GPU, and pages there alone
        optimizer = optimizer.removeprefix("paged_")
    tokens = config["update"].max_tokens_per_microbatch
    generator = generator_of(train)
    images = bool(config.task.images)
    shared = config["update"].share_prompts and not (images and sharding.library)  # see `SharedPrompts`
    per_generation = completions_per_process(config.train, processes(config))
    per_step = min(per_generation, train.per_device_train_batch_size * train.gradient_accumulation_steps)
    return Workload(
        prompt=config.task.max_prompt_length,
        completion=train.max_completion_length,
        sequences=per_generation,
        tokens=UNMEASURED if tokens == "auto" else tokens,
        completions_per_prompt=train.num_generations,
        shares_keys=config.model.attn_implementation in (None, "sdpa") and sharding.weight_shards == 1,
        completions_per_sequence=train.num_generations if shared else 1,
        images=Images(per_generation, per_step, images_opened(config), config.task.max_pixels) if images else None,
        freeze=tuple(config.model.freeze) if images else PARTS,
        weight_bytes=size,
        compute_bytes=2 if half else size,
        quantized=quantized,
        double_quantized=bool(quantization.get("bnb_4bit_use_double_quant")),
        adapter=replace(adapter_of(peft), size=adapter_bytes(sharding)) if peft else None,
        optimizer=optimizer,
        checkpointing=train.gradient_checkpointing,
        activations_on_host=config["update"].activations_on_host,
        mlp_tile=config["update"].mlp_tile or 0,
        masks="flash" not in str(config.model.attn_implementation),
        reference=bool(train.beta) and not peft,
        reward_models=reward_models_of(config),
        gradients_on_host=config["update"].gradients_on_host,
        vllm_fraction=(train.vllm_gpu_memory_utilization or 0.0) if generator == "colocated" else 0.0,
        on_server=generator == "server",
        sends_adapter=bool(train.use_vllm) and transport_of(config, family).adapter,
        vllm_sleeps=train.vllm_enable_sleep_mode,
        vllm_fp8=bool(config.engine.quantization),
        vllm_shards=train.vllm_tensor_parallel_size,
        sampling_filter=bool(train.top_k) or train.top_p < 1 or train.min_p is not None,
        device=device,
        processes=min(processes(config), local_world_size() or -(-processes(config) // node_range(config)[0])),
        sharding=sharding,
    )


def check_numbers(config: DictConfig) -> None:
    """Check the numbers that determine memory.

    Raises:
        ConfigError: one of them is missing or not positive, or the type of the weights is unknown.
    """
    for key, value in {
        "task.max_prompt_length": config.task.max_prompt_length,
        "train.max_completion_length": config.train.max_completion_length,
        "plan.processes": processes(config),
        "train.vllm_tensor_parallel_size": config.train.vllm_tensor_parallel_size,
    }.items():
        if not value or value < 1:
            raise ConfigError(f"{key}={value}: the plan needs a positive number")
    if config.model.dtype not in (*BYTES, "auto"):
        raise ConfigError(f"model.dtype={config.model.dtype}: possible: auto, {', '.join(BYTES)}")


def images_opened(config: DictConfig) -> int:
    """Return how many images of prompts a process has open at once: each of a generation, in all of its rounds."""
    rounds = config.rollout.max_rounds if config.rollout.dynamic_sampling else 1
    return rounds * -(-completions_per_process(config.train, processes(config)) // config.train.num_generations)


def reward_models_of(config: DictConfig) -> tuple[tuple[Shape, int], ...]:
    """Return shape, and bytes per number, of each reward model.

    Raises:
        ConfigError: its shape cannot be found, or its type is unknown.
    """
    models = []
    for name, reward in config.reward.items():
        if reward.fn != REWARD_MODEL:
            continue
        options = {"revision": "main", "dtype": "bfloat16", **reward.kwargs}
        if options["dtype"] not in BYTES:
            raise ConfigError(f"reward.{name}.kwargs.dtype={options['dtype']}: possible: {', '.join(BYTES)}")
        model = {"model_name_or_path": options["model_name_or_path"], "model_revision": options["revision"]}
        try:
            shape = find_shape(OmegaConf.create({**model, "shape": {}}))
        except ConfigError as error:
            raise ConfigError(f"reward.{name}.kwargs: {error}") from error
        models.append((shape, BYTES[options["dtype"]]))
    return tuple(models)


def adapter_of(peft: DictConfig) -> Adapter:
    """Return the adapter that the options of `peft.LoraConfig` describe.

    Raises:
        ConfigError: the rank is not positive.
    """
    modules = peft.get("target_modules")
    parameters = tuple(peft.get("target_parameters") or ())
    names = tuple(modules) if isinstance(modules, ListConfig) else None  # a pattern may mean any
    if modules is None and parameters:
        names = ()
    rank = peft.get("r", 8)
    if not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"peft.r={rank}: a positive number is needed")
    variant = bool(peft.get("use_dora") or peft.get("alora_invocation_tokens"))
    dropout = bool(peft.get("lora_dropout"))
    return Adapter(rank, names, parameters, bool(peft.get("vision")), dropout=dropout, casts=variant)


def adapter_bytes(sharding: Sharding) -> int:
    """Return bytes per parameter of an adapter: float32, also on a quantized base, but bfloat16 under ZeRO-3."""
    return 2 if sharding.is_zero3 else 4
