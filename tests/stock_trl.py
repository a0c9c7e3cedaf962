"""Stock TRL and ours on the same fixed rollouts: what both compute, step by step."""

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo.config.schema import ROOT
from grpo.options import Update
from grpo.trainer import ExactGRPOTrainer
from grpo.trainer.context import Context
from grpo.trainer.rollout.async_rollouts import AsyncRollouts
from grpo.trainer.rollout.completion import Completion
from grpo.trainer.rollout.dynamic_sampling import DynamicSampling
from grpo.trainer.rollout.engine_check import EngineCheck
from grpo.trainer.shared_prompts.states import state_layers
from grpo.utils.attention import policy_of
from grpo.utils.diagnosis import sampling_filters
from grpo.utils.patching import replaced

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
VOCABULARY = 87
LONGEST = 24


@functools.cache
def tiny_llama(vocabulary: int = VOCABULARY) -> str:
    """A folder with a random policy of 35,000 parameters whose gradients are neither tiny nor all alike."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    folder = tempfile.mkdtemp(prefix="tiny-llama-")
    atexit.register(shutil.rmtree, folder)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@functools.cache
def tiny_mixture(family: str = "mixtral") -> str:
    """A folder with a random mixture of four experts, whose routers' loss weighs as much as the policy's."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4}
    sizes |= {"num_experts_per_tok": 2, "vocab_size": VOCABULARY, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **sizes, router_aux_loss_coef=0.5, initializer_range=0.3)
    folder = tempfile.mkdtemp(prefix="tiny-mixture-")
    atexit.register(shutil.rmtree, folder)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def rollouts(
    prompts: list[str], trainer: Any, length: Callable[[torch.Generator], int] | None = None
) -> dict[str, Any]:
    """Completions that depend on nothing but the process and the number of generations so far."""
    trainer.generations = getattr(trainer, "generations", -1) + 1
    generator = torch.Generator().manual_seed(1000 * trainer.accelerator.process_index + trainer.generations)
    completions = []
    for _ in prompts:
        tokens = torch.randint(3, VOCABULARY, ((length or any_length)(generator),), generator=generator).tolist()
        if tokens[-1] % 3:
            tokens[-1] = trainer._tokenizer.eos_token_id  # two thirds end, the others were cut off
        completions.append(tokens)
    tokenizer = trainer._tokenizer
    return {"prompt_ids": tokenizer(prompts)["input_ids"], "completion_ids": completions, "logprobs": None}


def any_length(generator: torch.Generator) -> int:
    """Few long completions and many short ones."""
    return 1 + int(torch.rand(1, generator=generator) ** 3 * LONGEST)


def reward(prompts: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Anything, but equal within the groups of every second prompt."""
    return [0.5 if len(prompt) % 2 else (sum(ids) % 7) / 3 for prompt, ids in zip(prompts, completion_ids, strict=True)]


KL_FOUR_SLICES: dict[str, Any] = {
    "loss_type": "grpo",
    "beta": 0.04,
    "num_iterations": 2,
    "max_steps": 4,
    "gradient_accumulation_steps": 4,
    "per_device_train_batch_size": 4,
}
"""A KL penalty, two iterations, and the completions of a process in four slices."""


def idle_second(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """All completions of the second process are equal."""
    return [1.0 if os.environ["RANK"] == "1" else (sum(ids) % 7) / 3 for ids in completion_ids]


def long_first(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """The first process has long completions, the second short ones."""
    longest = LONGEST if os.environ["RANK"] == "0" else 2
    return rollouts(prompts, trainer, lambda generator: longest)


class ScriptedEngine:
    """In the place of vLLM: the fixed completions, with log-probabilities that are the policy's but for rounding.

    Args:
        trainer: gets it as its engine, instead of a `rollout_func`.
        shift: nats that are added to each log-probability.
        noise: standard deviation of the rounding, nats.
        length: of a completion.
    """

    def __init__(
        self,
        trainer: Any,
        shift: float = 0.0,
        noise: float = 0.0,
        length: Callable[[torch.Generator], int] | None = None,
    ) -> None:
        self.trainer, self.shift, self.noise, self.length = trainer, shift, noise, length
        if isinstance(trainer, ExactGRPOTrainer):
            of_script, filtered = trainer.rollout_func is not None, bool(sampling_filters(trainer.args))
            check = EngineCheck("float32", "cpu", of_script, filtered)
            trainer.rollouts.stages = [*trainer.rollouts.stages, check]
        trainer.rollout_func, trainer.use_vllm, trainer.vllm_mode = None, True, "colocate"
        trainer.vllm_generation, trainer._last_loaded_step = self, -1

    def sync_weights(self) -> None:
        """Take the policy as it is."""

    def changed_weights(self) -> list[str]:
        """Return that nothing has written to shared weights."""
        return []

    def metrics(self) -> dict[str, float]:
        """Return nothing about its generations."""
        return {}

    def generate(self, prompts: list[list[int]], *args: Any, **options: Any) -> tuple:
        """Return the completions, and the log-probability of each of their tokens, as TRL's connection to vLLM does."""
        completions = rollouts([""] * len(prompts), self.trainer, self.length)["completion_ids"]
        model, logps = self.trainer.accelerator.unwrap_model(self.trainer.model), []
        model.eval()
        with torch.no_grad():
            for prompt, completion in zip(prompts, completions, strict=True):
                logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
                scored = logits.log_softmax(-1)[torch.arange(len(completion)), torch.tensor(completion)]
                rounding = torch.randn(len(completion), generator=torch.Generator().manual_seed(sum(completion)))
                logps.append([[value] for value in (scored + self.shift + self.noise * rounding).tolist()])
        model.train()
        return prompts, completions, logps, None


class Record(TrainerCallback):
    """The weights before each step, the gradients before the optimizer takes them, and what was logged."""

    def __init__(self, start_from: Sequence[dict[str, torch.Tensor]] = ()) -> None:
        """Record; begin each step with these weights, so that rounding in one step is not the next one's error."""
        self.start_from = start_from
        self.weights: list[dict[str, torch.Tensor]] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.logs: list[dict[str, Any]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.start_from:
            weights, named = self.start_from[len(self.weights)], model.named_parameters()
            trained = {name: weights[name] for name, weight in named if weight.requires_grad}
            model.load_state_dict(trained, strict=False)  # frozen weights may be quantized
        self.weights.append({name: weight.clone() for name, weight in model.state_dict().items()})

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        named = model.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.logs.append(dict(logs))


def make(trainer_class: type[GRPOTrainer], directory: Path, **options: Any) -> GRPOTrainer:
    """A trainer on the fixed rollouts; `options` are fields of GRPOConfig or arguments of the trainer."""
    known = {field.name for field in fields(GRPOConfig)}
    arguments = {name: options.pop(name) for name in list(options) if name not in known and name != "length"}
    length = options.pop("length", any_length)
    settings: dict[str, Any] = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": LONGEST,
        "learning_rate": 3e-3,
        # AdamW moves a weight whose gradient is zero but for rounding as far as any other; this is above the rounding
        "adam_epsilon": 1e-4,
        "max_grad_norm": 0.0,
        "max_steps": 2,
        "beta": 0.0,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **options,
    }
    words = ["Mia has 3 apples .", "How many ?", "Tom had 1 2 pens and lost 4 .", "1", "2 plus 2", "a b c d e f g h"]
    required: dict[str, Any] = {
        "model": tiny_llama(),
        "reward_funcs": reward,
        "args": GRPOConfig(**settings),
        "train_dataset": Dataset.from_dict({"prompt": [f"{word} {i}" for i in range(8) for word in words]}),
        "processing_class": AutoTokenizer.from_pretrained(ROOT / "grpo" / "builtin" / "tiny"),
        "rollout_func": lambda prompts, trainer: rollouts(prompts, trainer, length),
    }
    names = {field.name for field in fields(Context)} & arguments.keys()
    if names:
        arguments["context"] = Context(**{name: arguments.pop(name) for name in names})
    return trainer_class(**{**required, **arguments})


ROUNDING = 2**-20
"""Nats: the last bit of a float32 log-probability of 8 to 16 nats, as TRL's head computes it. A loss is rounded by
less: it is a mean of terms that change by an advantage per nat, which is about 1."""

SMALL = Update(max_tokens_per_microbatch=100, share_prompts=False)
"""Several micro-batches per step."""


def ours(directory: Path, update: Update = SMALL, **options: Any) -> ExactGRPOTrainer:
    """Our trainer on the fixed rollouts; `options` as in `make`."""
    trainer = make(ExactGRPOTrainer, directory, update=update, **options)
    assert isinstance(trainer, ExactGRPOTrainer)
    return trainer


def doubled(trainer: Any) -> Any:
    """Let a trainer compute in float64, so that a bound holds on all processors and with any number of threads.

    They add in different orders. In float32 that moves a log-probability by some 1e-6, and a loss of several iterations
    by its sum with ratios and with exp(KL). What stays float32 is softmax and norms of transformers, and TRL's head;
    rotary embeddings do not: their angles grow with the padding before a sequence, and so does the rounding. Nor do
    layers that keep a state, and the routers of experts.
    """
    for model in (trainer.model, trainer.ref_model):
        if model is not None:
            model.double()
            policy_of(model).config._experts_implementation = "eager"  # the kernel of all experts takes no float64
            rotary = [module for module in model.modules() if hasattr(module, "inv_freq")]
            routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
            for module in (*rotary, *routers, *state_layers(model)):
                module.forward = without_float32(module.forward)
    return trainer


def without_float32(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of transformers that computes in float64 what it would compute in float32."""

    @functools.wraps(forward)
    def doubled(*args: Any, **options: Any) -> Any:
        with (
            replaced(torch.Tensor, "float", torch.Tensor.double),
            replaced(torch, "float32", torch.float64),
            replaced(torch, "float", torch.float64),
        ):
            return forward(*args, **options)

    return doubled


def train(trainer: GRPOTrainer, start_from: Sequence[dict[str, torch.Tensor]] = ()) -> Record:
    """Train and return what happened; `start_from` are weights to begin each step with."""
    record = Record(start_from)
    trainer.add_callback(record)
    trainer.train()
    return record


def relative_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The norm of the difference over the norm, of all tensors together."""
    assert ours.keys() == theirs.keys()
    difference = sum(float((ours[name].double() - theirs[name].double()).pow(2).sum()) for name in theirs)
    size = sum(float(theirs[name].double().pow(2).sum()) for name in theirs)
    return (difference / size) ** 0.5 if size else difference**0.5


def note_kept(trainer: ExactGRPOTrainer) -> list[list[Completion]]:
    """Return a list to which a trainer that chooses problems adds the completions that it keeps of each generation."""
    if not isinstance(chooses := trainer.rollouts.source, DynamicSampling | AsyncRollouts):
        return []
    generations, fill = list[list[Completion]](), chooses.fill

    def note(*args: Any) -> Any:
        completions, metrics = fill(*args)
        generations.append(completions)
        return completions, metrics

    chooses.__dict__["fill"] = note
    return generations


def compare_engine_at(trainer: ExactGRPOTrainer, step: float) -> None:
    """Have the engine's log-probabilities next compared with the policy's at this step."""
    for stage in trainer.rollouts.stages:
        if isinstance(stage, EngineCheck):
            stage.next = step


def generated_at_once(trainer: ExactGRPOTrainer, noted: Sequence[Sequence[Completion]]) -> dict[str, Any]:
    """Return options of `make` for a trainer whose rollouts are those that were kept, in the same order."""
    rows = [completion for generation in noted for completion in generation]
    problems = [trainer.train_dataset[row.problem]["prompt"] for row in rows[:: trainer.num_generations]]
    generations = iter(noted)

    def replay(prompts: list[str], trainer: Any) -> dict[str, Any]:
        batch = next(generations)[trainer.accelerator.process_index * len(prompts) :][: len(prompts)]
        ids = {
            "prompt_ids": [completion.prompt_ids for completion in batch],
            "completion_ids": [completion.ids for completion in batch],
        }
        masks = {"env_mask": [completion.mask for completion in batch]} if batch[0].mask else {}
        return {**ids, **masks, "logprobs": None}

    data = Dataset.from_dict({"prompt": problems})
    return {"rollout_func": replay, "train_dataset": data, "shuffle_dataset": False}
