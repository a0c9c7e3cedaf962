"""TRL's `GRPOTrainer` with the same gradient for less work, and without dying of an out-of-memory error.

The rollouts of an optimizer step are kept until all are there. The completions that can change the gradient are then
sorted by length into micro-batches, each goes through TRL's own loss, and the losses are weighted so that their sum is
TRL's.
"""

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils import is_peft_model
from torch.utils.data import Sampler
from trl import GRPOTrainer

from grpo import losses
from grpo.config.options import LOSS_MEANS, Engine, Rollout, Update
from grpo.data.images import View, unexpanded
from grpo.generation.vllm_engine import PolicyEngine, compute_type
from grpo.trainer import resume
from grpo.trainer.batch import Batch, as_batch, as_sequences, check, images_of, loss_mask
from grpo.trainer.clock import StepClock
from grpo.trainer.memory_readings import MemoryReadings
from grpo.trainer.microbatch import Microbatch
from grpo.trainer.packing import Packing
from grpo.trainer.placement import check_one_device, train_in_float32
from grpo.trainer.prefix_sharing import score
from grpo.trainer.processes import LocalAccelerator, own_part
from grpo.trainer.rollout import advantages, engine_check, episodes, rounds, thumbnails
from grpo.trainer.rollout.columns import kept_columns
from grpo.trainer.rollout.dynamic_sampling import Completion, DynamicSampling
from grpo.trainer.rollout.engine_check import EngineCheck
from grpo.trainer.rollout.extra_columns import keep_writable
from grpo.trainer.rollout.image_tokens import as_tensors, end_before
from grpo.trainer.rollout.overlap import Overlap
from grpo.trainer.rollout.problem_order import ProblemOrder
from grpo.trainer.rollout.prompts_at_once import PromptsAtOnce
from grpo.trainer.rollout.reward_model import MicrobatchedRewardModel
from grpo.trainer.rollout.scoring import score_all
from grpo.trainer.rollout.tool_calls import Counts, ToolCalls, is_answered, loggable
from grpo.trainer.token_budget import TokenBudget
from grpo.trainer.update import own_loss
from grpo.trainer.update.gradient_offload import OffloadedGradients
from grpo.trainer.update.guard import NonFiniteGuard
from grpo.trainer.update.step import StepMicrobatch
from grpo.trainer.update.step_update import LossTraits, Metrics, StepUpdate
from grpo.trainer.update.streams import step_on_default_stream
from grpo.utils.diagnosis import why_not_stale
from grpo.utils.errors import DoesNotFit
from grpo.utils.oom import is_out_of_memory
from grpo.utils.patching import patched, replaced

log = logging.getLogger(__name__)
SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
T = TypeVar("T")


class ExactGRPOTrainer(GRPOTrainer):
    """A drop-in for `trl.GRPOTrainer`: the same constructor with more arguments.

    A step goes through `training_step`: `_generate_and_score_completions` makes the rollouts and their advantages,
    `StepUpdate.gradient` the gradient, transformers clips it and steps the optimizer. Methods of TRL and transformers
    that are overridden, and why, are listed in docs/architecture.md.

    Losses that cannot be divided exactly are computed TRL's way, `per_device_train_batch_size` completions at once:
    `top_entropy_quantile` below 1, the auxiliary loss of a router, a `loss_type` that is neither in `LOSS_MEANS` nor in
    `grpo.losses`, and optimizers that step during the backward pass (LOMO, layerwise GaLore and APOLLO).

    Args:
        update: the `update` group of the configuration; its defaults if None.
        engine: the `engine` group of the configuration; adapters are merged, as TRL does, if None.
        rollout: the `rollout` group of the configuration; its defaults if None.
        view: opens the images of each generation, once each; None where the data has them open.
        most_images: images of a prompt at most, for an engine of vLLM; None if it is not known.
        memory: gets the readings; new ones if None.
        keep_columns: whether `completions/` gets the columns of the data, and small images, as well.
        tool_counts: returns calls and errors of this process so far, by tool.
        correct: name of the reward that is 1 for a correct completion, and 0 for others; the first if None.

    Raises:
        ValueError: two of these features do not work together, or not with these arguments of TRL.
    """

    _metrics: Any
    _pending_extra_logs: Any
    _current_train_step_time: float
    reward_funcs: list[Any]

    def __init__(
        self,
        *args: Any,
        update: Update | None = None,
        engine: Engine | None = None,
        rollout: Rollout | None = None,
        view: View | None = None,
        most_images: int | None = None,
        memory: MemoryReadings | None = None,
        keep_columns: bool = False,
        tool_counts: Counts = lambda: (Counter(), Counter()),
        correct: str | None = None,
        **kwargs: Any,
    ) -> None:
        engine, rollout = engine or Engine(lora="merged"), rollout or Rollout()
        shares = engine.share_weights is True
        connection = partial(PolicyEngine, lora=engine.lora, shares=shares, most_images=most_images)
        with patched("trl.trainer.grpo_trainer:VLLMGeneration", connection):
            super().__init__(*args, **kwargs)
        self.update, self.view, self.keep_columns = update or Update(), view, keep_columns
        self.sharded = self.accelerator.distributed_type.value in SHARDED
        self.own_loss = losses.find(self.loss_type)
        if reason := losses.why_not(self.args):
            raise ValueError(f"train.{reason}")
        check_one_device(self.model)
        if self.args.fp16 or getattr(self.model, "is_quantized", False):
            train_in_float32(self.model)
        if self.accelerator.is_fsdp2:  # else generation does not wait for the processes whose completions are longer
            (self.model.get_base_model() if is_peft_model(self.model) else self.model)._is_fsdp_managed_module = True
        self._prepare_rollouts(engine, rollout, tool_counts, correct)
        self._prepare_update(memory or MemoryReadings(on_gpu=self.accelerator.device.type == "cuda"))
        self._epoch_sampler: resume.EpochSampler | None = None
        self.unlogged: tuple[float, int] | None = None
        """Of a checkpoint between two logs: the sum of the losses since the last log, and its step."""

    def _prepare_rollouts(self, engine: Engine, rollout: Rollout, tool_counts: Counts, correct: str | None) -> None:
        self.overlap = Overlap() if engine.staleness > 0 else None
        if self.overlap and (reason := why_not_stale(self.args)):
            raise ValueError(f"engine.staleness=1: {reason}")
        self.sampling: DynamicSampling | None = None
        if rollout.dynamic_sampling or rollout.prioritize:
            if self.overlap:
                raise ValueError("engine.staleness=1: works without rollout.dynamic_sampling and rollout.prioritize")
            if self._multi_environment:
                raise ValueError("rollout.dynamic_sampling and rollout.prioritize: work with one environment only")
            order = ProblemOrder(len(self.train_dataset), self.args.seed, self.shuffle_dataset, rollout.prioritize)
            weights = dict(zip(self.reward_func_names, self.reward_weights.tolist(), strict=True))
            correct = correct or self.reward_func_names[0]
            self.sampling = DynamicSampling(rollout, order, self.accelerator.num_processes, weights, correct)
        self.tool_calls: ToolCalls | None = None
        if self.tools:
            own = episodes.BY_TRL if self.environment_factories else ()
            self.tool_calls = ToolCalls(tool_counts, [*(tool.__name__ for tool in self.tools), *own])
        dtype, device = compute_type(self.accelerator, self.model), self.accelerator.device.type
        self.engine_check = EngineCheck(dtype, device, of_script=self.rollout_func is not None)
        self.prompts_at_once = PromptsAtOnce(self.processing_class)
        images = Path(self.args.output_dir) / "completions" / "images"
        self._thumbnails = thumbnails.Thumbnails(images, self.accelerator.num_processes)
        self._opened = dict[str, Any]()  # images of the rollouts at hand
        self._rewards = torch.empty(0)  # of the rollouts at hand, (completions of all processes, rewards)
        self._kept: list[Completion] | None = None  # of all processes, while TRL continues with them
        self._rolled_out = False  # whether the rollouts of the step at hand are there

    def _prepare_update(self, memory: MemoryReadings) -> None:
        mean = self.own_loss.MEAN if self.own_loss else LOSS_MEANS.get(self.loss_type)
        by_sequence = self.importance_sampling_level == "sequence"
        traits = LossTraits(mean, by_sequence, self._entropy_bonus_enabled, penalty=self.beta != 0.0)
        one_pass = self.top_entropy_quantile < 1.0 or self.aux_loss_enabled or mean is None
        steps_in_backward = "lomo" in self.args.optim or self.args.optim.endswith("_layerwise")
        self._divisible = not (one_pass or steps_in_backward or self.args.n_gpu > 1)
        unfit = self.accelerator.num_processes > 1 or self.args.fp16 or "schedule_free" in str(self.args.optim)
        if self.update.gradients_on_host and unfit:
            raise ValueError(
                "update.gradients_on_host works with one process, in bfloat16 or float32, and not with schedule_free "
                "optimizers: shard the gradients of several processes with FSDP or ZeRO"
            )
        folder = Path(self.args.output_dir)
        limit, device = self.update.max_tokens_per_microbatch, self.accelerator.device
        self.budget = TokenBudget(limit, device, folder / "out_of_memory.json")
        self.memory, self.clock = memory, StepClock(device)
        if self.use_vllm:
            self.memory.asleep = self.budget.asleep = self.vllm_generation.asleep
        self.packing = Packing.of(self.model, self.update.share_prompts, self.pad_to_multiple_of)
        self.guard = NonFiniteGuard(folder / "skipped_rows.jsonl", self._tokenizer, self.update.max_skipped_steps)
        self.step_update = StepUpdate(
            self.update,
            traits,
            self._loss_of,
            accelerator=self.accelerator,
            budget=self.budget,
            packing=self.packing,
            memory=self.memory,
            guard=self.guard,
            longest=self.max_completion_length,
            sharded=self.sharded,
            survives=self._survives,
        )
        self.reward_funcs = [
            MicrobatchedRewardModel(function, self.budget, memory, self.accelerator, self.sharded, self._survives)
            if isinstance(function, torch.nn.Module)
            else function
            for function in self.reward_funcs
        ]
        self._slices: list[Batch] = []  # of the rollouts of the step at hand
        self._part: Microbatch | None = None  # that goes through the policy right now
        self._logps: torch.Tensor | None = None  # of the last micro-batch, (rows, completion length)

    @property
    def stop_reason(self) -> str | None:
        """Reason for ending the training early, if it ended early."""
        return self.guard.stop_reason

    def _survives(self, error: BaseException) -> bool:
        """Return whether to retry after an exception; with sharded weights the other processes already wait."""
        return is_out_of_memory(error) and self.update.on_oom == "retry" and not self.sharded

    # A step: rollouts, gradient, clipping

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does. An exception leaves nothing of its step for the next call."""
        self._slices, self._part, self._rolled_out = [], None, False
        self.guard.reset()
        self.clock.reset()
        if self.overlap:
            self.overlap.reset()
            self.vllm_generation.forget_begun()
        try:
            return super().train(*args, **kwargs)
        except BaseException:
            self._step, self._buffered_inputs = 0, None  # TRL's: the next step begins with rollouts of its own
            raise

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Keep a slice of the rollouts; with the last one of the optimizer step, compute its gradient."""
        if self.is_deepspeed_enabled:  # it steps within the backward pass, and checks gradients in half precision alone
            self.deepspeed.optimizer.check_grad_overflow = True
        with self.clock.of("step"):
            if self._divisible:
                loss = self._divided_step(model, inputs)
            else:
                loss = self._undivided_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self._note({f"time/{phase}": seconds for phase, seconds in self.clock.take().items()})
        return loss

    def _divided_step(self, model: Any, inputs: Any) -> torch.Tensor:
        started = time.perf_counter()
        model.train()
        if callable(getattr(self.optimizer, "train", None)):  # schedule-free optimizers
            self.optimizer.train()
        rollouts = dict(self._prepare_inputs(inputs))  # generated, scored, with their advantages
        if rollouts.pop("generated_at") == self.state.global_step:
            # the old policy is still the policy: its importance weight is 1, and not 1 but for the rounding between
            # two micro-batches, which in bfloat16 exceeds the clip range of GSPO
            rollouts.pop("old_per_token_logps", None)
        self._slices.append(rollouts)
        loss = torch.zeros((), device=self.accelerator.device)
        if self.accelerator.sync_gradients:
            slices, self._slices = self._slices, []
            entropies = partial(setattr, self, "_entropy_window_stats", self._entropy_window_stats)
            with self.memory.of("update"):
                grow = self.state.global_step > 0
                loss, metrics = self.step_update.gradient(model, slices, restart=entropies, grow=grow)
                self.clock.wait()
            self._note(metrics)
        if self.args.torch_empty_cache_steps and self.state.global_step % self.args.torch_empty_cache_steps == 0:
            self.budget.release()
        self._step += 1
        self._current_train_step_time += time.perf_counter() - started
        if self.accelerator.sync_gradients:
            self._note({"step_time": self._current_train_step_time})
            self._current_train_step_time = 0.0
        return loss

    def _undivided_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """Compute a step as TRL does."""
        try:
            with self.memory.of("update"):
                return super().training_step(model, inputs, num_items_in_batch)
        except RuntimeError as error:
            if not (self._rolled_out and self._survives(error)):
                raise
            raise DoesNotFit(
                "the update does not fit into memory, and its loss cannot be divided (top_entropy_quantile below 1, a "
                "router's auxiliary loss, an unknown loss_type, LOMO, layerwise optimizers): lower "
                "per_device_train_batch_size and raise "
                "gradient_accumulation_steps, or do without"
            ) from error

    def _note(self, metrics: dict[str, float]) -> None:
        """Add metrics to TRL's."""
        for name, value in metrics.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)

    def _loss_of(self, model: Any, inputs: Batch, microbatch: StepMicrobatch, alone: bool) -> tuple[Any, Metrics]:
        """Return the loss of a micro-batch, and what TRL logs of it; see `grpo.trainer.update.step_update.Loss`.

        The entropy bonus is a mean over tokens whatever the policy loss is a mean of, but both get the micro-batch's
        weight.
        """
        with ExitStack() as within:
            metrics: Metrics = defaultdict(list)
            within.enter_context(replaced(self, "_metrics", {"train": metrics}))
            within.enter_context(replaced(self, "_part", microbatch.part))
            if alone:
                within.enter_context(replaced(self, "accelerator", LocalAccelerator(self.accelerator)))
                weight, coefficient = microbatch.part.weight, self.entropy_coef * microbatch.token_share
                within.enter_context(replaced(self, "entropy_coef", coefficient / weight if weight else 0.0))
            within.enter_context(self.compute_loss_context_manager())
            return self.compute_loss(model, inputs), metrics

    def compute_loss(self, model: Any, inputs: Batch, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return TRL's loss, or one of `grpo.losses`; its batch is kept until the gradient is known to be finite."""
        if self.own_loss:
            loss = own_loss.compute_loss(self, self.own_loss, model, inputs)
        else:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        if torch.is_grad_enabled() and self._logps is not None:
            self.guard.note(inputs, loss, self._logps)
        return loss

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
        if self._part is None and not (torch.is_grad_enabled() or compute_aux_loss or self.sharded):
            batch = {key: value for key, value in fields.items() if value is not None}
            batch |= as_batch(input_ids, attention_mask, logits_to_keep)

            def forward(inputs: Batch, part: Microbatch) -> Any:
                with replaced(self, "_part", part):
                    return self._get_per_token_logps_and_entropies(
                        model, *as_sequences(inputs), compute_entropy=compute_entropy, **images_of(inputs)
                    )

            with self.clock.of("logprobs", self.model.training), self.memory.of("logprobs"):
                return *score_all(forward, batch, compute_entropy, self.packing, self.budget, self._survives), None
        if self._part is not None and self._part.shared:
            with self.accelerator.autocast():
                result = (*score(model, input_ids, attention_mask, logits_to_keep), None)
        else:
            options = {"compute_entropy": compute_entropy, "compute_aux_loss": compute_aux_loss}
            compute = super()._get_per_token_logps_and_entropies
            result = compute(model, input_ids, attention_mask, logits_to_keep, batch_size, **options, **fields)
        self._logps = result[0].detach()
        return result

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create the optimizer; with `update.gradients_on_host` its gradients are offloaded to CPU."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.accelerator.device.type == "cuda" and type(optimizer).__module__.startswith("bitsandbytes"):
            step_on_default_stream(optimizer)
        if self.update.gradients_on_host and self.step_update.offloaded is None:
            self.step_update.offloaded = OffloadedGradients(self.model, optimizer)
        return optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        if offloaded := self.step_update.offloaded:
            return offloaded.clip(self.args.max_grad_norm)
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the norm; if it is not finite, drop all gradients, so that the optimizer's step changes nothing."""
        if grad_norm is None and (offloaded := self.step_update.offloaded):
            grad_norm = offloaded.clip(math.inf)
        grad_norm = super()._get_grad_norm(model, grad_norm)
        # in float16 a loss scale that is still to be found overflows too, and is halved each time
        searching = self.accelerator.scaler is not None and self.accelerator.scaler.get_scale() > 1
        if not self.guard.passes(grad_norm, self.state.global_step + 1, searching):
            self.step_update.drop_gradients(model)
            if self.stop_reason:
                self.control.should_training_stop = self.control.should_save = True
        return grad_norm

    # Rollouts: completions, rewards, advantages

    def _generate_and_score_completions(self, inputs: Any) -> Batch:
        """Return rollouts with their advantages, and the step at which they were made.

        The step is that of training: an evaluation in between makes rollouts too.
        """
        self._rolled_out = False
        with self.clock.of("rollout", self.model.training):
            if self.sampling and self.model.training:
                batch = self._sampled(len(inputs), self.sampling)
            else:
                batch = super()._generate_and_score_completions(self.shown(inputs))
            check(batch)
            group = self.num_generations if self.model.training else self.num_generations_eval
            advantages.finish(self, batch, self._rewards, group, len(inputs))
            if self.use_vllm and self.model.training:
                self._note(self.engine_check.compare(self, batch))
            ratio = batch.get("importance_sampling_ratio")
            if ratio is not None and self.vllm_importance_sampling_mode.endswith("_mask"):
                fraction = engine_check.masked_fraction(self.accelerator, ratio, loss_mask(batch))
                self._note({"sampling/masked_share": fraction})
            for values in self._logs["extra"].values():  # a column that begins after other rows were logged
                values.extendleft([None] * (len(self._logs["prompt"]) - len(values)))
            if self.tool_calls and self.model.training:
                self._note(self.tool_calls.metrics(self.accelerator))
        self._opened.clear()
        self._rolled_out = True
        return batch | {"generated_at": torch.tensor(self.state.global_step)}

    def _sampled(self, count: int, sampling: DynamicSampling) -> Batch:
        """Return as many rollouts, those of groups with different rewards first, as if generated at once."""
        wanted = count * sampling.processes // self.num_generations
        self._kept, metrics = sampling.fill(wanted, partial(rounds.score_groups, self))
        self._note(metrics)
        if self.has_taken_all:  # these are the last rollouts
            every = self.args.steps_per_generation * self.num_iterations
            self.state.max_steps = self.state.global_step + max(1, every // self.args.gradient_accumulation_steps)
        mine = own_part(self.accelerator, self._kept)
        rows = [self.train_dataset[one.problem] | {"prompt": one.prompt} for one in mine]
        try:  # the episodes of environments are over
            with replaced(self, "environment_factories", None), replaced(self, "environments", None):
                return super()._generate_and_score_completions(self.shown(rows))
        finally:
            self._kept = None

    @property
    def has_taken_all(self) -> bool:
        """Whether all problems of all epochs have been taken, where no number of steps was asked for."""
        if self.args.max_steps > 0 or not self.sampling:
            return False
        return self.sampling.order.taken >= self.args.num_train_epochs * self.sampling.order.count

    def answers(self, rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Return the likeliest conversation that follows each row's prompt; see `episodes.answers`."""
        return episodes.answers(self, rows)

    def shown(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return rows with their images as the policy sees them."""
        if not self.view:
            return rows
        with self.clock.of("data", self.model.training):
            return self.view.shown(rows, self._opened)

    def _generate(self, prompts: list) -> Any:
        if self._kept is not None:
            found = rounds.as_generated(self, self._kept)
        else:
            with self.clock.of("generate", self.model.training), self.memory.of("generate"):
                found = super()._generate(prompts)
        if self.tools and self.model.training:
            unanswered = torch.tensor([not is_answered(messages) for messages in found[3]], dtype=torch.float)
            fraction = self.accelerator.gather(unanswered.to(self.accelerator.device)).mean().item()
            self._note({"tools/unanswered": fraction})
        if self.overlap and self.model.training:
            self._note({"sampling/staleness": float(self.overlap.begun)})
            end = min(self.state.max_steps, self.engine_check.next)
            rows = self.overlap.next_rows(self.state.global_step, end)
            self.overlap.begun = rows is not None
            if rows:
                ids, _, _ = self._tokenize_prompts([row["prompt"] for row in rows])
                self.vllm_generation.begin(ids, self.num_generations)
        return found

    def _generate_single_turn(
        self, prompt_ids: list, images: list | None, multimodal_fields: Batch, num_generations: int, **options: Any
    ) -> tuple[list, list | None]:
        """Complete prompts; after an OOM of transformers' generate, fewer at once."""

        def generate(ids: list, shown: list | None, fields: Batch) -> tuple[list, list | None]:
            return super(ExactGRPOTrainer, self)._generate_single_turn(ids, shown, fields, num_generations, **options)

        checkpointing = self.model.is_gradient_checkpointing

        def retry(limit: int) -> None:
            if checkpointing:  # TRL switches it off for generation, and an exception keeps it off
                self.model.gradient_checkpointing_enable(self.args.gradient_checkpointing_kwargs)
            self.budget.retry()
            log.warning("out of memory in generation: %d prompts at once from now on", limit)

        if self.use_vllm:
            found = generate(prompt_ids, images, multimodal_fields)
        else:
            given = (generate, prompt_ids, images, multimodal_fields, num_generations, retry, self._survives)
            found = (self.prompts_at_once.generate(*given), None)
        token = getattr(self.processing_class, "image_token_id", None)
        return found if token is None else end_before(token, self._tokenizer.eos_token_id, *found)

    def _tokenize_prompts(self, prompts: list) -> tuple[list, list | None, Batch]:
        """Tokenize prompts; a colocated vLLM gets those with images as text, and expands the images itself."""
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        images = images and [row or [] for row in images]  # processors refuse None, which TRL has for no image
        if images and self.use_vllm and self.vllm_mode == "colocate":
            options = {"chat_template": self.chat_template, **self.chat_template_kwargs}
            given = unexpanded(self.processing_class, prompts, self.tools or (), **options)
            self.vllm_generation.give_images(prompt_ids, given)
        return prompt_ids, images, as_tensors(fields)

    def _calculate_rewards(self, inputs: list, prompts: list, completions: list, *args: Any) -> torch.Tensor:
        """Score the completions, (completions, rewards), and skip a completion on which a reward failed."""
        if self._kept is None:
            self._rewards = self._score(inputs, prompts, completions, *args)
        else:
            self._rewards = torch.tensor([one.rewards for one in self._kept], device=self.accelerator.device)
            mine = own_part(self.accelerator, self._kept)
            for column in dict.fromkeys(column for one in self._kept for column in one.columns):
                self._log_completion_extra(column, [one.columns.get(column) for one in mine])
        for column in self._logs["extra"].keys() - self._pending_extra_logs.keys():
            self._log_completion_extra(column, [None] * len(prompts))  # as a table has all or none of a row
        thumbnails.strip_images(inputs, prompts)
        if self.tools:
            completions[:] = [[loggable(message) for message in messages] for messages in completions]
        return self._rewards

    def _score(self, inputs: list, prompts: list, *args: Any) -> torch.Tensor:
        """Score completions as TRL does. It adds up the rewards that are not NaN: a failed one would count as 0."""
        if self.keep_columns:
            progress = min(1.0, (self.state.global_step + 1) / max(1, self.state.max_steps))
            pictures = self._thumbnails if self.log_completions else None
            for column, values in kept_columns(inputs, self.reward_func_names, pictures, progress).items():
                self._log_completion_extra(column, values)
        with self.clock.of("reward", self.model.training):
            rewards = super()._calculate_rewards(inputs, prompts, *args)
        failed = torch.zeros(len(prompts), dtype=torch.bool, device=self.accelerator.device)
        for function in self.reward_funcs:
            isolated = getattr(function, "isolated", None)
            failed[isolated.faulted if isolated else []] = True
        rewards[self.accelerator.gather(failed)] = torch.nan
        return rewards

    # The data, the log and checkpoints

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | int | None]:
        """Return the batches of a step; where rollouts overlap with the update, draw those of the next one, too."""
        if not self.overlap:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = self.overlap.take(epoch_iterator, num_batches)
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        stock = super()._get_train_sampler(dataset)
        names = ("data_source", "mini_repeat_count", "batch_size", "repeat_count", "shuffle", "seed")
        self._epoch_sampler = resume.EpochSampler(**{name: getattr(stock, name) for name in names})
        return self._epoch_sampler

    def _run_epoch(self, *args: Any, epoch: int, **options: Any) -> None:
        """Train an epoch, unless all steps have been done before."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        if self._epoch_sampler:
            self._epoch_sampler.set_epoch(epoch)
        if self.unlogged:
            loss, self._globalstep_last_logged = self.unlogged
            self._tr_loss += loss
            self.unlogged = None
        super()._run_epoch(*args, epoch=epoch, **options)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, with the steps repeated and skipped and the peak of memory since the last log."""
        if self.model.training and "loss" in logs:
            logs |= {"update/oom_retries": self.budget.retries, "update/steps_skipped": self.guard.skipped}
            logs |= self.memory.since_log()
            self.budget.retries = self.guard.skipped = 0
        keep_writable(self._logs["extra"])
        super().log(logs, start_time)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save as transformers does, with what a run needs to continue bit for bit."""
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        with resume.sealed(self, folder):
            super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Save as TRL does, and a tied weight, of which gathering a sharded policy makes two, once."""
        tied = getattr(self.accelerator.unwrap_model(self.model), "all_tied_weights_keys", None) or {}
        if state_dict:
            state_dict = {name: weight for name, weight in state_dict.items() if name not in tied}
        super()._save(output_dir, state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load = partial(super()._load_from_checkpoint, resume_from_checkpoint, model)
        resume.load_weights(self, Path(resume_from_checkpoint), load)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # several processes on CPUs have one numbered device each, which `torch.load` does not know
        device = torch.device("cpu") if self.args.device.type == "cpu" else self.args.device
        with replaced(self.args, "_setup_devices", device):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint and (file := resume.state_file(self, Path(checkpoint))).exists():
            resume.load_state_dict(self, torch.load(file, map_location=device, weights_only=True))
