"""Rollouts that fit into memory: generation by halves, log-probabilities by micro-batches, and the time of each."""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model

from grpo import losses
from grpo.config.options import Engine, Update
from grpo.data.images import View, unexpanded
from grpo.generation.vllm_engine import PolicyEngine, compute_type
from grpo.trainer import engine_check, episodes, thumbnails
from grpo.trainer.batch import FIELDS, Batch, can_move, check, images_of, lengths, loss_mask, pick, take
from grpo.trainer.checkpoint import CheckpointTrainer
from grpo.trainer.image_tokens import as_tensors, by_prompt, can_split, end_before
from grpo.trainer.memory_readings import MemoryReadings
from grpo.trainer.microbatch import Microbatch, half, pack
from grpo.trainer.placement import check_one_device, train_in_float32
from grpo.trainer.prefix_sharing import can_share, real_tokens, score
from grpo.trainer.reward_model import MicrobatchedRewardModel
from grpo.trainer.token_budget import TokenBudget
from grpo.trainer.zero_variance import zero_variance
from grpo.utils.diagnosis import sampling_filters
from grpo.utils.errors import DoesNotFit, GenerationError
from grpo.utils.oom import is_out_of_memory
from grpo.utils.patching import patched

log = logging.getLogger(__name__)
SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


class RolloutTrainer(CheckpointTrainer):
    """TRL's trainer with generation and scoring that shrink until they fit; `ExactGRPOTrainer` adds the update."""

    accelerator: Any
    entropy_coef: float
    _metrics: Any
    reward_funcs: list[Any]
    _current_train_step_time: float
    _entropy_window_stats: torch.Tensor | None

    def __init__(
        self,
        *args: Any,
        update: Update | None = None,
        engine: Engine | None = None,
        view: View | None = None,
        most_images: int | None = None,
        **kwargs: Any,
    ) -> None:
        engine = engine or Engine(lora="merged")  # as TRL does
        shares = engine.share_weights is True
        connection = partial(PolicyEngine, lora=engine.lora, shares=shares, most_images=most_images)
        with patched("trl.trainer.grpo_trainer:VLLMGeneration", connection):
            super().__init__(*args, **kwargs)
        self._own_loss = losses.find(self.loss_type)
        if reason := losses.why_not(self.args):
            raise ValueError(f"train.{reason}")
        self.reward_funcs = [
            MicrobatchedRewardModel(function, self) if isinstance(function, torch.nn.Module) else function
            for function in self.reward_funcs
        ]
        self.view, self._opened = view, dict[str, Any]()  # the images of the rollouts at hand
        check_one_device(self.model)
        if self.args.fp16 or getattr(self.model, "is_quantized", False):
            train_in_float32(self.model)
        self.update = update or Update()
        forbidden = Path(self.args.output_dir) / "out_of_memory.json"
        self.budget = TokenBudget(self.update.max_tokens_per_microbatch, self.accelerator.device, forbidden)
        self._hidden_size = self.model.config.get_text_config().hidden_size
        self._can_share = self.update.share_prompts and can_share(self.model)
        self._part: Microbatch | None = None  # that goes through the policy right now
        self.sharded = self.accelerator.distributed_type.value in SHARDED
        if self.accelerator.is_fsdp2:  # else generation does not wait for the processes whose completions are longer
            (self.model.get_base_model() if is_peft_model(self.model) else self.model)._is_fsdp_managed_module = True
        self._prompts_at_once: int | None = None
        self._oom_retries = 0
        self.memory = MemoryReadings(on_gpu=self.accelerator.device.type == "cuda")
        if self.use_vllm:
            self.memory.asleep = self.budget.asleep = self.vllm_generation.asleep
        self.keeps_columns = False
        """Whether `completions/` gets the columns of the data, and small images, as well."""
        images = Path(self.args.output_dir) / "completions" / "images"
        self._thumbnails = thumbnails.Thumbnails(images, self.accelerator.num_processes)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._logps: torch.Tensor | None = None  # of the last micro-batch, (rows, completion length)
        self._rewards = torch.empty(0)  # of the rollouts at hand, (completions of all processes, rewards)
        self._script_generates = self.rollout_func is not None
        self._next_engine_check: float = 0
        self._rolled_out = False  # whether the rollouts of the step at hand are there

    def _survives(self, error: RuntimeError) -> bool:
        """Return whether to retry after an exception; with sharded weights the other processes already wait."""
        return is_out_of_memory(error) and self.update.on_oom == "retry" and not self.sharded

    @contextmanager
    def _clock(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self.model.training:
            self._wait()
            self._seconds[phase] += time.perf_counter() - started

    def _wait(self) -> None:
        """Wait for the GPU, whose work would otherwise be counted in the phase that needs its results."""
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        self._rolled_out = False
        with self._clock("rollout"):
            inputs = super()._prepare_inputs(generation_batch)
        self._rolled_out = True
        self._opened.clear()
        return inputs

    def _generate(self, prompts: list) -> Any:
        with self._clock("generate"), self.memory.of("generate"):
            return super()._generate(prompts)

    def _rollouts(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list, Any]:
        """Return rows with their images and what `rollout_func` adds, their prompts, and what `_generate` returns."""
        rows = self._shown(rows)
        prompts = episodes.begin(self, rows)
        found = self._generate(prompts)
        for name, values in found[5].items():
            for index, row in enumerate(rows):
                if not isinstance(values, list) or index < len(values):
                    row[name] = values[index] if isinstance(values, list) else values
        return rows, prompts, found

    def _shown(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return rows with their images as the policy sees them."""
        if not self.view:
            return rows
        with self._clock("data"):
            return self.view.shown(rows, self._opened)

    @contextmanager
    def _without_metrics(self) -> Iterator[None]:
        """Keep what is generated inside out of TRL's metrics."""
        metrics, seen = self._metrics, self.state.num_input_tokens_seen
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        try:
            yield
        finally:
            self._metrics, self.state.num_input_tokens_seen = metrics, seen

    def _generate_and_score_completions(self, inputs: Any) -> Batch:
        """Make the advantages of equal rewards exactly zero, and add the step at which the rollouts were made.

        The step is that of training: an evaluation in between makes rollouts too.
        """
        inputs = self._shown(inputs)
        batch = super()._generate_and_score_completions(inputs)
        check(batch)
        self._finish_advantages(batch, len(inputs))
        if self.use_vllm and self.model.training and batch.get("sampling_per_token_logps") is not None:
            self._check_engine(batch)
        ratio = batch.get("importance_sampling_ratio")
        if ratio is not None and self.vllm_importance_sampling_mode.endswith("_mask"):
            masked, total = self.accelerator.gather(engine_check.masked(ratio, loss_mask(batch))).sum(0).tolist()
            mode = "train" if self.model.training else "eval"
            self._metrics[mode]["sampling/masked_share"].append(masked / max(1, total))
        for values in self._logs["extra"].values():  # a column that begins after other rows were logged
            values.extendleft([None] * (len(self._logs["prompt"]) - len(values)))
        return batch | {"generated_at": torch.tensor(self.state.global_step)}

    def _finish_advantages(self, batch: Batch, count: int) -> None:
        """Make the advantages of equal rewards exactly zero, and those of others as the loss wants; in the log, too.

        Args:
            count: completions of this process.
        """
        factors = torch.ones_like(self._rewards[:, 0])
        if factor := getattr(self._own_loss, "advantage_factor", None):
            rewards = (self._rewards * self.reward_weights.to(factors.device)).nansum(1)
            rewards[self._rewards.isnan().all(1)] = torch.nan
            factors = factor(rewards.view(-1, self._group_size).nanmean(1)).repeat_interleave(self._group_size)
        factors[self._zero_variance()] = 0.0
        batch["advantages"] = batch["advantages"] * factors[self.accelerator.process_index * count :][:count]
        logged = self._logs["advantages"]  # as many of the newest as a generation has; an evaluation may have more
        for behind, by in enumerate(factors.flip(0)[: len(logged)].tolist(), 1):
            logged[-behind] *= by

    @property
    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    def _zero_variance(self) -> torch.Tensor:
        """Return which completions of all processes are in groups with equal rewards, as TRL adds these up."""
        weights = self.reward_weights.to(self._rewards.device)
        rewards = self._rewards * weights
        if self.multi_objective_aggregation == "sum_then_normalize":
            rewards = rewards.nansum(1).masked_fill(rewards.isnan().all(1), torch.nan).unsqueeze(1)
        return zero_variance(rewards, self._group_size)

    def _check_engine(self, batch: Batch) -> None:
        """Compare the engine's log-probabilities of some rollouts with the policy's, now and then.

        Not where sampling filters change the engine's alone. What a script's `rollout_func` returns is its own affair:
        a difference is worth a warning.

        Raises:
            GenerationError: the engine has other weights than the policy.
        """
        if self.state.global_step < self._next_engine_check or sampling_filters(self.args):
            return
        self._next_engine_check = self.state.global_step + engine_check.EVERY
        count = len(batch["prompt_ids"])
        some = pick(batch, range(0, count, -(-count // engine_check.COMPLETIONS)))
        ids, mask = (torch.cat((some[f"prompt_{kind}"], some[f"completion_{kind}"]), 1) for kind in ("ids", "mask"))
        self.model.eval()  # the engine has no dropout
        try:
            with torch.no_grad():
                policy, _, _ = self._get_per_token_logps_and_entropies(
                    self.model, ids, mask, some["completion_ids"].size(1), batch_size=1, **images_of(some)
                )
        finally:
            self.model.train()
        found = engine_check.difference(policy, some["sampling_per_token_logps"], loss_mask(some))
        dtype = compute_type(self.accelerator, self.model)
        allowed = engine_check.tolerance(dtype, self.accelerator.device.type)
        written = self.vllm_generation.changed_weights()
        (differs,) = self._any(not found <= allowed or bool(written))
        verdict = {"engine/logp_difference": found, "engine/tolerance": allowed, "engine/is_policy": float(not differs)}
        if differs and self._script_generates:
            self._next_engine_check = math.inf
            log.warning("rollout_func: %s", engine_check.not_the_policy(found, allowed, dtype, written))
        elif differs:
            self.log(verdict)
            raise GenerationError(engine_check.not_the_policy(found, allowed, dtype, written))
        for name, value in verdict.items():
            self._metrics["train"][name].append(value)

    def _any(self, *flags: bool) -> list[bool]:
        """Return which of these is true on any process."""
        if self.accelerator.num_processes == 1:
            return list(flags)
        mine = torch.tensor(flags, dtype=torch.int, device=self.accelerator.device)
        return [bool(count) for count in self.accelerator.reduce(mine, "sum").tolist()]

    def _of_all(self, number: int) -> list[int]:
        """Return the number of each process."""
        return self.accelerator.gather(torch.tensor([number], device=self.accelerator.device)).tolist()

    def _calculate_rewards(self, inputs: list, prompts: list, *args: Any) -> torch.Tensor:
        """Score the completions, (completions, rewards), and skip a completion on which a reward failed.

        TRL adds up the rewards that are not NaN, so that a failed one would count as 0.
        """
        if self.keeps_columns:
            self._keep_columns(inputs)
        with self._clock("reward"):
            rewards = super()._calculate_rewards(inputs, prompts, *args)
        isolated = [getattr(function, "isolated", None) for function in self.reward_funcs]
        failed = torch.zeros(len(prompts), dtype=torch.bool, device=self.accelerator.device)
        for reward in isolated:
            failed[reward.faulted if reward else []] = True
        rewards[self.accelerator.gather(failed)] = torch.nan
        self._rewards = rewards
        self._complete_columns(len(prompts))
        thumbnails.strip_images(inputs, prompts)
        return rewards

    def _complete_columns(self, count: int) -> None:
        """Log None for so many completions in columns that these did not log, as a table has all or none of a row."""
        for column in self._logs["extra"].keys() - self._pending_extra_logs.keys():
            self._log_completion_extra(column, [None] * count)

    def _keep_columns(self, inputs: list) -> None:
        """Log the columns of the data with the completions, so that these can be scored again later."""
        taken = {"prompt", "images", "step", "completion", "completion_ids", "advantage", *self.reward_func_names}
        taken.add(thumbnails.COLUMN)
        for column in (name for name in inputs[0] if name not in taken):
            values = [row[column] for row in inputs]
            if all(isinstance(value, str | int | float | list | None) for value in values):
                self._log_completion_extra(column, values)
        if self.log_completions and "images" in inputs[0]:
            progress = min(1.0, (self.state.global_step + 1) / max(1, self.state.max_steps))
            files = [self._thumbnails.keep(row["images"], progress) for row in inputs]
            self._log_completion_extra(thumbnails.COLUMN, files)

    def _tokenize_prompts(self, prompts: list) -> tuple[list, list | None, Batch]:
        """Tokenize prompts; a colocated vLLM gets those with images as text, and expands the images itself."""
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        images = images and [row or [] for row in images]  # processors refuse None, which TRL has for no image
        if images and self.use_vllm and self.vllm_mode == "colocate":
            options = {"chat_template": self.chat_template, **self.chat_template_kwargs}
            given = unexpanded(self.processing_class, prompts, self.tools or (), **options)
            self.vllm_generation.give_images(prompt_ids, given)
        return prompt_ids, images, as_tensors(fields)

    def _generate_single_turn(
        self, prompt_ids: list, images: list | None, multimodal_fields: Batch, num_generations: int, **options: Any
    ) -> tuple[list, list | None]:
        """Complete prompts; after an OOM in two halves, and from then on no more of them at once."""
        count = len(prompt_ids)
        if self.use_vllm or count <= (self._prompts_at_once or count):
            checkpointing = self.model.is_gradient_checkpointing
            try:
                found = super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, **options)
                token = getattr(self.processing_class, "image_token_id", None)
                return found if token is None else end_before(token, self._tokenizer.eos_token_id, *found)
            except RuntimeError as error:
                if self.use_vllm or not self._survives(error):
                    raise
                if (
                    count == 1
                    or options.get("has_tool_images")
                    or not can_split(multimodal_fields, images, prompt_ids, self.processing_class)
                ):
                    raise DoesNotFit(
                        f"{count} completions do not fit into memory while they are generated: lower "
                        "max_completion_length or per_device_train_batch_size, or use a smaller or quantized model"
                    ) from error
            if checkpointing:  # TRL switches it off for generation, and an exception keeps it off
                self.model.gradient_checkpointing_enable(self.args.gradient_checkpointing_kwargs)
            self._oom_retries += 1
            self._prompts_at_once = count - half(count, num_generations)
            self.budget.release()
            log.warning("out of memory in generation: %d prompts at once from now on", self._prompts_at_once)
        middle = half(count, num_generations)
        fields = by_prompt(multimodal_fields, images, prompt_ids, self.processing_class)
        completions = []
        for rows in (range(middle), range(middle, count)):
            part = pick(fields, rows)
            part = {key: value for key, value in part.items() if FIELDS[key].of != "row"}
            part_images = [images[row] for row in rows] if images else None
            part_ids = [prompt_ids[row] for row in rows]
            completions += self._generate_single_turn(part_ids, part_images, part, num_generations, **options)[0]
        return completions, None

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **fields: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Score completions, (rows, logits_to_keep); without a gradient in micro-batches under the token budget."""
        if self._part is not None and self._part.shared:
            with self.accelerator.autocast():
                result = (*score(model, input_ids, attention_mask, logits_to_keep), None)
        elif self._part is not None or torch.is_grad_enabled() or compute_aux_loss or self.sharded:
            options = {"compute_entropy": compute_entropy, "compute_aux_loss": compute_aux_loss}
            compute = super()._get_per_token_logps_and_entropies
            result = compute(model, input_ids, attention_mask, logits_to_keep, batch_size, **options, **fields)
        else:
            prompt = input_ids.size(1) - logits_to_keep
            batch = {key: value for key, value in fields.items() if value is not None} | {
                "prompt_ids": input_ids[:, :prompt],
                "prompt_mask": attention_mask[:, :prompt],
                "completion_ids": input_ids[:, prompt:],
                "completion_mask": attention_mask[:, prompt:],
            }
            with self._clock("logprobs"), self.memory.of("logprobs"):
                return *self._score_all(model, batch, compute_entropy), None
        self._logps = result[0].detach()
        return result

    def _score_all(self, model: Any, batch: Batch, compute_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Score all sequences that have a completion; zero elsewhere, as in TRL. Starts again after an OOM."""
        _, completions = lengths(batch)
        rows = [row for row, length in enumerate(completions) if length]
        logps = torch.zeros(batch["completion_ids"].shape, device=batch["completion_ids"].device)
        entropies = torch.zeros_like(logps) if compute_entropy else None
        alone = False
        while True:
            parts = self._divide(batch, rows, self.budget.tokens)
            try:
                for part in parts:
                    inputs = take(batch, part, self.pad_to_multiple_of)
                    width = inputs["completion_ids"].size(1)
                    ids, mask = (
                        torch.cat((inputs.pop(f"prompt_{kind}"), inputs.pop(f"completion_{kind}")), dim=1)
                        for kind in ("ids", "mask")
                    )
                    with self._at(part):
                        found = self._get_per_token_logps_and_entropies(
                            model, ids, mask, width, compute_entropy=compute_entropy, **inputs
                        )
                    logps[list(part.rows), :width] = found[0]
                    if entropies is not None:
                        entropies[list(part.rows), :width] = found[1]
                return logps, entropies
            except RuntimeError as error:
                if not self._survives(error):
                    raise
                if alone and len(part.rows) == 1:
                    raise DoesNotFit(too_long(part)) from error
            alone = len(part.rows) == 1
            self._oom_retries += 1
            self.budget.halve(part.tokens)

    def _divide(
        self, batch: Batch, rows: Sequence[int], budget: int, share: Sequence[float] | None = None
    ) -> list[Microbatch]:
        """Divide sequences of a batch into micro-batches; see `grpo.trainer.microbatch.pack`."""
        prompts = None
        if self._can_share and can_move(batch):
            prompts = real_tokens(batch["prompt_ids"], batch["prompt_mask"])
        return pack(*lengths(batch), budget, rows, share, prompts, self._hidden_size)

    @contextmanager
    def _at(self, part: Microbatch) -> Iterator[None]:
        """Score this micro-batch inside the context."""
        self._part = part
        try:
            yield
        finally:
            self._part = None


def too_long(part: Microbatch | None) -> str:
    """Return advice for a sequence that does not fit alone, on this process or, with None, on another."""
    lengths = f"of {part.prompt_length} prompt and {part.completion_length} completion tokens" if part else "elsewhere"
    return (
        f"a single sequence {lengths} does not fit into memory: lower max_completion_length, use "
        "gradient_checkpointing=True, LoRA or QLoRA, or a smaller model"
    )
