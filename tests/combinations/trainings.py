"""Trainings of a row of features: by `ExactGRPOTrainer`, and by stock TRL on the same rollouts."""

import atexit
import functools
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOTrainer

from grpo.builtin.tasks.calculator import calculator
from grpo.config.schema import ROOT
from grpo.generation.backend import Backend
from grpo.generation.kept_tokens import KeptLogprob
from grpo.model.image_features import keep_image_features
from grpo.model.vision import detach_frozen_tower, freeze, parts
from grpo.options import Engine, Mixture, Rollout, Update
from grpo.trainer import ExactGRPOTrainer
from grpo.trainer.placement import gather_with_layers, keep_differentiable, prepare_for_fsdp, train_in_float32
from grpo.trainer.processes import own_part
from grpo.trainer.rollout.completion import Completion
from grpo.trainer.rollout.image_tokens import as_tensors
from grpo.utils.patching import patched
from grpo.view.stream import NUMBER, Stream
from tests.combinations.array import Row
from tests.combinations.features import FEATURES
from tests.combinations.kept_tokens import correct_over_kept
from tests.combinations.rewards import REWARDS, of_various
from tests.derived_losses import AS_TRL, StockBestOfTwo
from tests.stock_trl import compare_engine_at, make
from tests.vision_policies import DELTA_NET, make_policy, make_processor

STEPS = 3
LENGTH = 24
FAMILY = {"images, LLaVA-Next": "llava_next", "images, Qwen3.5": "qwen3_5"}
PROBLEMS = 32
BASE = ROOT / "grpo" / "builtin" / "tiny_calculator"
TEXT: dict[str, Any] = {
    "hidden_size": 64,  # quantized, a multiple of 64 on a CPU
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}<tool_response>{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ 'IMAGE' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{% for call in message['tool_calls'] or [] %}"
    "<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "{{ {'tool': '</tool_response>\\n', 'assistant': eos_token}.get(message['role'], '\\n') }}{% endfor %}"
)


class Game:
    """A number is to be guessed."""

    def reset(self, number: int, **columns: Any) -> str:
        self.number, self.guesses = number, 0
        return " Ben has 5."

    def calculator(self, expression: int) -> str:
        """Guess the number, under names that the vocabulary has.

        Args:
            expression: From 0 to 9
        """
        self.guesses += 1
        return "now" if expression == self.number else "more"


def seed_of(*values: Any) -> int:
    return int(hashlib.sha256(repr(values).encode()).hexdigest()[:8], 16)


def turn(tokenizer: Any, seed: int, calls: bool, repeats: bool) -> list[int]:
    """A call of a tool, if there are any, or any tokens."""
    generator = torch.Generator().manual_seed(seed)
    kind, number = (int(torch.randint(0, 10, (), generator=generator)) for _ in range(2))
    if calls and kind < 5:
        call = {"name": "calculator", "arguments": {"expression": number}}
        return tokenizer(f"<tool_call>{json.dumps(call)}</tool_call>")["input_ids"] + [tokenizer.eos_token_id]
    length = 1 + int(torch.rand(1, generator=generator) ** 3 * LENGTH)
    tokens = torch.randint(7, len(AutoTokenizer.from_pretrained(BASE)), (length,), generator=generator).tolist()
    if repeats and kind == 8:
        tokens = tokens[:1] * length
    return [*tokens[:-1], tokenizer.eos_token_id] if kind % 3 else tokens


def with_logps(tokens: list[int], seed: int, row: Row) -> list[float]:
    """The log-probabilities of an engine, over all tokens, or over six of them."""
    generator = torch.Generator().manual_seed(seed)
    if row["engine"] != "vLLM, top-k":
        # otherwise the weights of a loss, or those of a mask, are all zero
        likely = {"vespo": -7.5, "maxrl": -6, "sapo": -8}.get(row["loss"], -5)
        if row["loss"] == "vespo" and row["policy"] in FAMILY:  # whose tokens are likelier
            likely = -5
        return (torch.randn(len(tokens), generator=generator) / 4 + likely).tolist()
    others = torch.randint(7, 80, (len(tokens), 5), generator=generator).tolist()
    drawn = (torch.randn(len(tokens), generator=generator) / 4 - 1.5).tolist()
    return [KeptLogprob(value, {token, *more}) for value, token, more in zip(drawn, tokens, others, strict=True)]


def drawn(trainer: Any, row: Row) -> Any:
    """In the place of generation: turns that depend on step, prompt and row alone."""
    calls, repeats = row["tools"] != "none", row["degenerate"] == "skipped"

    def single_turn(
        prompts: list, images: Any, fields: Any, num_generations: int, **how: Any
    ) -> tuple[list, list | None]:
        step = (trainer.state.global_step, trainer.model.training)
        seeds = [seed_of(*step, prompt, row % num_generations) for row, prompt in enumerate(prompts)]
        completions = [turn(trainer._tokenizer, seed, calls, repeats) for seed in seeds]
        if row["engine"] == "transformers":
            return completions, None
        of_each = zip(completions, seeds, strict=True)
        return completions, [with_logps(ids, seed, row) for ids, seed in of_each]

    return single_turn


@functools.cache
def saved(kind: str) -> str:
    """The folder of a random policy: its attention is full, or sees 8 tokens in a layer; with experts, a state, images.

    Made before there are several processes: afterwards only the first would save its weights.
    """
    folder = tempfile.mkdtemp(prefix="policy-")
    atexit.register(shutil.rmtree, folder)
    torch.manual_seed(0)
    if family := FAMILY.get(kind):
        make_policy(family, make_processor(family, base="tiny_calculator")).save_pretrained(folder)
        return folder
    vocabulary = {"vocab_size": len(AutoTokenizer.from_pretrained(BASE)), **TEXT}
    config: Any = LlamaConfig(**vocabulary)
    if kind == "experts":  # in the second layer; PEFT adapts their stacked matrices and their router
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
        config = Qwen3MoeConfig(**vocabulary, head_dim=16, **experts, router_aux_loss_coef=0.1)
    if kind == "mixed attention":
        layers = ["full_attention", "sliding_attention"]
        config = Qwen3Config(**vocabulary, head_dim=16, layer_types=layers, use_sliding_window=True, sliding_window=8)
    if kind == "gated DeltaNet":
        config = Qwen3_5TextConfig(**vocabulary, **DELTA_NET)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def policy(row: Row) -> dict[str, Any]:
    """The arguments of a trainer for policy, processor, and how its weights are trained."""
    family = FAMILY.get(row["policy"])
    options: dict[str, Any] = {}
    torch.manual_seed(0)
    if family:
        processor = make_processor(family, base="tiny_calculator")
        image = "<image>" if family == "llava_next" else "<|vision_start|><|image_pad|><|vision_end|>"
        processor.save_pretrained = lambda *args, **options: None  # a Qwen's fails without a processor of videos
        processor.chat_template = TEMPLATE.replace("IMAGE", image)
        model = AutoModelForImageTextToText.from_pretrained(saved(row["policy"]))  # TRL loads a reference by its name
        if row["weights"] == "frozen tower":
            freeze(model, ["vision"])
            detach_frozen_tower(model)
        options |= {"model": model, "processing_class": processor}
    else:
        options |= {
            "model": saved(row["policy"]),
            "processing_class": AutoTokenizer.from_pretrained(BASE),
        }
    if row["weights"] in ("LoRA", "QLoRA"):
        towers = parts(options["model"]).values() if family else ()
        without = "|".join(f"{name}.*" for names in towers for name in names) or None
        linear = {"target_modules": "all-linear", "exclude_modules": without}
        options["peft_config"] = LoraConfig(r=4, init_lora_weights=False, **linear)
    if row["weights"] == "QLoRA":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    return options


def data(row: Row) -> Dataset:
    """Problems, as conversations, with images of several sizes where the policy sees any."""
    rows = []
    for number in range(PROBLEMS):
        content = f"Mia has {number} apples. How many apples does she have now?"
        problem: dict[str, Any] = {"prompt": [{"role": "user", "content": content}], "number": number}
        problem["task"] = "second" if number % 4 else "first"
        if row["policy"] in FAMILY:
            sizes = [(20, 40), (40, 20), (30, 30)][number % 3 :][: 1 + (number % 4 == 1)]
            problem["images"] = [Image.new("RGB", size, (7 * number, 99, 0)) for size in sizes]
        rows.append(problem)
    return Dataset.from_list(rows)


class Scripted(Backend):
    """In the place of vLLM, or of a server of it; `drawn` makes its completions and their log-probabilities."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        of_server = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        self.vllm_client = SimpleNamespace(get_server_info=lambda: of_server)

    def sync_weights(self) -> None:
        pass

    def greedy(self) -> AbstractContextManager[None]:
        return nullcontext()


def options_of(row: Row, folder: Path) -> dict[str, Any]:
    """The options of `make` that both trainers have."""
    options: dict[str, Any] = {
        "max_steps": STEPS,
        "rollout_func": None,
        "max_completion_length": 2 * LENGTH,
        "max_tool_calling_iterations": 1,
        "per_device_eval_batch_size": 4,
        "train_dataset": data(row),
        "eval_dataset": data(row).select(range(2)),
        "reward_funcs": REWARDS[row["rewards"]],
        "epsilon": 0.05,
    }
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # not all weights of a tower are used
        options |= {
            "use_cpu": not os.environ.get("DS_ACCELERATOR"),
            "ddp_find_unused_parameters": row["policy"] in FAMILY,
        }
    for feature, value in row.items():
        options |= FEATURES[feature][value]
    if row["engine"] != "transformers":
        options["use_vllm"] = True
    if row["tools"] != "none":
        options |= {"tools": [calculator]} if row["tools"] == "tools" else {"environment_factory": Game}
    return options | policy(row)


def streamed(problems: Dataset) -> dict[str, Any]:
    """Options for a trainer that reads problems in buffers of five while it trains."""
    stream = Stream(problems.to_iterable_dataset(), lambda rows, first: (rows, {"rows": len(rows)}), 5, None, "rows")
    return {"stream": stream, "train_dataset": Dataset.from_dict({NUMBER: range(PROBLEMS)})}


def ours(row: Row, folder: Path, **more: Any) -> Any:
    """Our trainer with the features of a row."""
    options = options_of(row, folder)
    options |= AS_TRL.get(row["loss"], (None, {}, {}))[2]
    if row["data"] == "a stream":
        options |= streamed(options["train_dataset"])
    problems, best = row["problems"], row["advantages"] == "of the best of two"
    options["rollout"] = Rollout(problems == "dynamic sampling", prioritize="prioritized" in problems)
    options["rollout"].pass_at_k = 2 if best else None
    options["rollout"].max_repetition = 0.5 if row["degenerate"] == "skipped" else None
    if problems.startswith("a mixture"):
        graders: dict[str, str | None] = {"first": REWARDS[row["rewards"]][-1].__name__, "second": None}
        limits = {"first": 2 * LENGTH, "second": 2 * LENGTH}
        options["mixture"] = Mixture({"first": 1, "second": 2}, limits, graders)
    if row["engine"] != "transformers":
        staleness = 2 * (row["engine"] == "a server, two steps ahead")
        options["engine"] = Engine(lora="merged", staleness=staleness, backend=f"{__name__}.Scripted")
    update = Update(
        max_tokens_per_microbatch=200,
        share_prompts=row["prompts"] == "shared",
        activations_on_host=row["checkpointing"] == "on, inputs offloaded",
        mlp_tile=16 if row["feed-forward"] == "in tiles" else None,
        compile=row["layers"] == "compiled",
    )
    trainer = make(ExactGRPOTrainer, folder, update=update, log_tokens=True, **options | more)
    trainer._generate_single_turn = drawn(trainer, row)
    if row["engine"] != "transformers":
        compare_engine_at(trainer, math.inf)  # these are log-probabilities of no policy
    if not trainer.sharded:
        keep_image_features(trainer.model, most=4)
    return trainer


def stock(row: Row, folder: Path, trainer: Any, kept: Sequence[Sequence[Completion]], **more: Any) -> Any:
    """Stock TRL with the features of a row; it replays what dynamic sampling has kept."""
    kind, as_trl, _ = AS_TRL.get(row["loss"], (GRPOTrainer, {}, {}))
    options = options_of(row, folder / "stock") | as_trl | more
    if row["advantages"] == "of the best of two":
        kind = StockBestOfTwo  # MaxRL's is refused
    if row["degenerate"] == "skipped":
        options["reward_funcs"] = list(map(of_various, options["reward_funcs"]))
    return built(kind, row, folder, trainer, kept, options)


def built(
    kind: type[GRPOTrainer],
    row: Row,
    folder: Path,
    trainer: Any,
    kept: Sequence[Sequence[Completion]],
    options: dict[str, Any],
) -> Any:
    """A trainer of TRL's with these options, which takes its rollouts from the same place as ours."""
    if kept:
        for name in ("tools", "environment_factory"):
            options.pop(name, None)
        options |= replayed(row, trainer, kept)
    with patched("trl.trainer.grpo_trainer:VLLMGeneration", Scripted):
        other = make(kind, folder / "stock", **options)
    if row["policy"] in FAMILY:  # TRL's loop of tool calls fails of lists, which some processors give
        tokenize = other._tokenize_prompts
        other._tokenize_prompts = lambda prompts: (*(found := tokenize(prompts))[:2], as_tensors(found[2]))
    if row["weights"] == "QLoRA":
        keep_differentiable(other.model)
        train_in_float32(other.model)  # as ours does; TRL's adapters are in bfloat16
    if other.accelerator.is_fsdp2:
        prepare_for_fsdp(other.model)
    if is_deepspeed_zero3_enabled():
        for model in filter(None, (other.model, other.ref_model)):
            gather_with_layers(model)
    if not kept:
        other._generate_single_turn = drawn(other, row)
    if row["engine"] == "vLLM, top-k":
        correct_over_kept(other)
    return other


def replayed(row: Row, trainer: Any, kept: Sequence[Sequence[Completion]]) -> dict[str, Any]:
    """Options for a trainer whose rollouts and rewards are those that were kept, in the same order."""
    problems = [one.problem for generation in kept for one in generation[:: trainer.num_generations]]
    current: list[Completion] = []
    generations: Iterator[Sequence[Completion]] = iter(kept)

    def replay(prompts: list, other: Any) -> dict[str, Any]:
        current[:] = own_part(other.accelerator, next(generations) if other.model.training else kept[0])[: len(prompts)]
        found = {"prompt_ids": [one.prompt_ids for one in current], "completion_ids": [one.ids for one in current]}
        if not other.model.training:
            found["prompt_ids"] = other._tokenize_prompts(prompts)[0]
        masks = {"env_mask": [one.mask for one in current]} if current[0].mask else {}
        return found | masks | {"logprobs": [one.logps for one in current] if current[0].logps else None}

    def reward(index: int) -> Any:
        def repeated(completion_ids: list, **columns: Any) -> list[float | None]:
            values = [one.rewards[index] for one in current]
            return [None if math.isnan(value) else value for value in values]

        return repeated

    rewards = [reward(index) for index in range(len(kept[0][0].rewards))]
    chosen = data(row).select(problem % PROBLEMS for problem in problems)
    if row["tools"] == "environment":  # whose `reset` has said so
        told = [
            [{**message, "content": message["content"] + " Ben has 5."} for message in prompt]
            for prompt in chosen["prompt"]
        ]
        chosen = chosen.remove_columns("prompt").add_column("prompt", told)
    return {"rollout_func": replay, "train_dataset": chosen, "shuffle_dataset": False, "reward_funcs": rewards}
