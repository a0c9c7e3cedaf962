"""TRL's `GRPOTrainer` with the same gradient for less work, and without dying of an out-of-memory error.

The rollouts of an optimizer step are kept until all are there. The completions that can change the gradient are then
sorted by length into micro-batches, each goes through TRL's own loss, and the losses are weighted so that their sum is
TRL's.
"""

import logging
import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler
from trl import GRPOTrainer

from grpo import losses
from grpo.generation.backend import Backend, backend_class
from grpo.options import Engine, Mixture, Rollout, Update
from grpo.trainer import trl
from grpo.trainer.batch import Batch, by_row
from grpo.trainer.context import Context
from grpo.trainer.measurements import MemoryReadings, StepClock
from grpo.trainer.microbatch import Microbatch
from grpo.trainer.packing import Packing
from grpo.trainer.placement import gathered_with_its_norm, loads_without_state, prepare, sent_by_rank_0
from grpo.trainer.refusals import check_options
from grpo.trainer.resume import EpochSampler, Resume, load_weights
from grpo.trainer.rollout import per_token
from grpo.trainer.rollout.columns import keep_writable
from grpo.trainer.rollout.from_trainer import rollouts_of
from grpo.trainer.rollout.image_tokens import check_sees, without_image_tokens
from grpo.trainer.rollout.once_per_group import once_per_group
from grpo.trainer.rollout.reward_model import MicrobatchedRewardModel
from grpo.trainer.shared_prompts.trial import SharedPrompts
from grpo.trainer.step import UNDIVIDED, step, undivided_step
from grpo.trainer.token_budget import TokenBudget
from grpo.trainer.update.activation_offload import ActivationOffload
from grpo.trainer.update.from_trainer import compiled_layers_of, step_update_of
from grpo.trainer.update.gradient_offload import OffloadedGradients
from grpo.trainer.update.guard import NonFiniteGuard
from grpo.trainer.update.loss import own_loss
from grpo.trainer.update.streams import step_on_default_stream
from grpo.trainer.update.token_values import TokenValues, Watcher
from grpo.trainer.update.traits import traits_of
from grpo.utils.oom import is_out_of_memory
from grpo.utils.patching import patched, replaced

log = logging.getLogger(__name__)
SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


class ExactGRPOTrainer(GRPOTrainer):
    """A drop-in for `trl.GRPOTrainer`: the same constructor with more arguments.

    `grpo.trainer.step` is a step: rollouts (`Rollouts`), then the gradient of all of them (`StepUpdate`). transformers
    clips it and steps the optimizer; `Resume` has what a checkpoint needs of both. The 18 methods that are overridden,
    each with the reason, and what would make it unnecessary:

    - `train`: an exception leaves nothing of its step to the next call; until transformers' loop resets itself.
    - `training_step`: a step's gradient is computed from all of its completions; until TRL does so.
    - `compute_loss`: a loss of `grpo.losses`, activations offloaded to CPU, the guard of the gradient; until TRL takes
      a loss as an argument.
    - `_get_per_token_logps_and_entropies`: micro-batches under the token budget, shared prompts; until TRL packs.
    - `create_optimizer`, `_clip_grad_norm`, `_get_grad_norm`: gradients offloaded to CPU, and gradients that are not
      finite; until transformers has a hook between clipping and stepping.
    - `_generate_and_score_completions`, `_generate_single_turn`, `_tokenize_prompts`: see `Rollouts`; until TRL divides
      the first into generating, scoring and advantages.
    - `_get_tool_suffix_ids`: tokens of images in the texts of tools; until TRL tokenizes these as text.
    - `_get_train_sampler`, `_run_epoch`: a resumed epoch has its own order, and a run that is over does not begin
      again; until transformers stores the sampler.
    - `log`: steps repeated and skipped, peak memory, columns that Arrow can write; until callbacks can add to a log.
    - `_save_checkpoint`, `_save`, `_load_from_checkpoint`, `_load_optimizer_and_scheduler`: see `Resume`; tied and
      renamed weights; until transformers saves a trainer's own state.

    Losses that cannot be divided exactly are computed TRL's way, `per_device_train_batch_size` completions at once:
    `top_entropy_quantile` below 1, the routers' loss of a sharded policy, a `loss_type` that is neither in `LOSS_MEANS`
    nor in `grpo.losses`, and optimizers that step during the backward pass (LOMO, layerwise GaLore and APOLLO).

    Args:
        update: the `update` group of the configuration; its defaults if None.
        engine: the `engine` group of the configuration; adapters are merged, as TRL does, if None.
        rollout: the `rollout` group of the configuration; its defaults if None.
        mixture: the tasks that the column `task` of the data names; None for a single task.
        context: the trainer's surroundings in a run of `grpo.train`.

    Raises:
        ValueError: two of these features do not work together, or not with these arguments of TRL.
    """

    _metrics: Any
    reward_funcs: list[Any]
    eos_token_ids: list[int]
    processing_class: Any

    def __init__(
        self,
        *args: Any,
        update: Update | None = None,
        engine: Engine | None = None,
        rollout: Rollout | None = None,
        mixture: Mixture | None = None,
        context: Context | None = None,
        **kwargs: Any,
    ) -> None:
        engine, rollout, context = engine or Engine(lora="merged"), rollout or Rollout(), context or Context()
        with patched("trl.trainer.grpo_trainer:VLLMGeneration", partial(self._connect, engine, context.most_images)):
            super().__init__(*args, **kwargs)
        self.processing_class = once_per_group(self.processing_class)
        if self.use_vllm:  # TRL counts what ends otherwise as truncated
            stops = (self.args.generation_kwargs or {}).get("stop_token_ids") or ()
            self.eos_token_ids = [*self.eos_token_ids, *stops]
        self.update = update or Update()
        self.problems = context.stream or self.train_dataset
        self.sharded = self.accelerator.distributed_type.value in SHARDED
        self.own_loss = losses.find(self.loss_type)
        check_options(self, engine, rollout, mixture)
        prepare(self)
        device, folder = self.accelerator.device, Path(self.args.output_dir)
        self.clock, self.memory = StepClock(device), context.memory or MemoryReadings(on_gpu=device.type != "cpu")
        self.activations = ActivationOffload(device) if self.update.activations_on_host else None
        self.budget = TokenBudget(self.update.max_tokens_per_microbatch, device, folder / "out_of_memory.json")
        if self.use_vllm:
            self.memory.asleep = self.budget.asleep = self.vllm_generation.asleep
        stock, size = super()._get_per_token_logps_and_entropies, self.model.config.get_text_config().hidden_size
        shared_prompts = SharedPrompts(
            lambda: self.model, stock, self.accelerator, self.update.share_prompts, self.sharded
        )
        traits = traits_of(self)
        if not traits.divisible:
            log.warning("the update is TRL's, without shared prompts and skipped completions: %s", UNDIVIDED)
        self.packing = Packing(size, shared_prompts, self.pad_to_multiple_of, traits.divisible)
        self.compiled = compiled_layers_of(self, traits)
        self.guard = NonFiniteGuard(folder / "skipped_rows.jsonl", self._tokenizer, self.update.max_skipped_steps)
        self.rollouts = rollouts_of(self, engine, rollout, mixture, context)
        image_token = getattr(self.processing_class, "image_token_id", None)
        values = TokenValues(folder / "completions", self._tokenizer, image_token)
        self.watchers: list[Watcher] = [values] if context.log_tokens else []
        self.step_update = step_update_of(self, traits)
        self.resume = Resume(self.rollouts, self.step_update, context.stream)
        models = (self.budget, self.memory, self.accelerator, self.sharded, self.survives)
        self.reward_funcs = [
            MicrobatchedRewardModel(function, *models) if isinstance(function, torch.nn.Module) else function
            for function in self.reward_funcs
        ]
        self._epoch_sampler: EpochSampler | None = None
        self.slices: list[Batch] = []  # of the rollouts of the step at hand
        self.rolled_out = False  # whether these are there
        self.part: Microbatch | None = None  # that goes through the policy right now
        self._scores: tuple[torch.Tensor, ...] = ()  # log-probabilities and entropies of the last micro-batch

    def _connect(self, engine: Engine, most_images: int | None, *args: Any, **options: Any) -> Backend:
        """Return the engine, in the place of TRL's."""
        options |= {"corrected": self.vllm_importance_sampling_correction, "quantization": engine.quantization}
        options |= {"lora": engine.lora, "shares": engine.share_weights is True, "staleness": engine.staleness}
        options["drafts"] = engine.drafts
        return backend_class(engine.backend)(*args, most_images=most_images, seed=self.args.seed, **options)

    @property
    def stop_reason(self) -> str | None:
        """Reason for ending the training early, if it ended early."""
        return self.guard.stop_reason

    def survives(self, error: BaseException) -> bool:
        """Return whether to retry after an exception; with sharded weights the other processes already wait."""
        return is_out_of_memory(error) and self.update.on_oom == "retry" and not self.sharded

    def note(self, metrics: dict[str, float]) -> None:
        """Add metrics to TRL's."""
        for name, value in metrics.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)

    # A step: rollouts, gradient, clipping

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does. An exception leaves nothing of its step for the next call."""
        self.slices, self.part, self.rolled_out = [], None, False
        self.guard.reset()
        self.clock.reset()
        self.rollouts.discard()
        trl.forget_logged(self)
        try:
            with (
                self.rollouts.source.ahead(self),
                gathered_with_its_norm() if self.is_fsdp_enabled else nullcontext(),
                sent_by_rank_0() if self.is_fsdp_enabled else nullcontext(),
            ):
                return super().train(*args, **kwargs)
        except BaseException:
            self._step, self._buffered_inputs = 0, None  # TRL's: the next step begins with rollouts of its own
            raise

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Keep a slice of the rollouts; with the last one of the optimizer step, compute its gradient."""
        if self.is_deepspeed_enabled:  # it steps within the backward pass, and checks gradients in half precision alone
            self.deepspeed.optimizer.check_grad_overflow = True
        with self.clock.of("step"), patched("trl.trainer.grpo_trainer:split_pixel_values_by_grid", by_row):
            if self.step_update.traits.divisible:
                loss = step(self, model, inputs)
            else:
                loss = undivided_step(self, super().training_step, model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self.note({f"time/{phase}": seconds for phase, seconds in self.clock.take().items()})
        return loss

    def compute_loss(self, model: Any, inputs: Batch, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return TRL's loss, or one of `grpo.losses`; its batch is kept until the gradient is known to be finite."""
        with self.activations.of(model) if self.activations else nullcontext():
            if self.own_loss:
                loss = own_loss(self, self.own_loss, model, inputs)
            else:
                loss = super().compute_loss(model, inputs, *args, **kwargs)
        if torch.is_grad_enabled() and self._scores:
            self.guard.note(inputs, loss, self._scores[0])
            for watcher in self.watchers if self.part is None or self.part.weight else ():
                watcher.note(self, inputs, loss.detach(), *self._scores)
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> per_token.Scores:
        """Score completions, (rows, length); see `grpo.trainer.rollout.per_token`."""
        scores = per_token.score(self, self.part, super()._get_per_token_logps_and_entropies, *args, **options)
        self._scores = tuple(values.detach() for values in scores[:2] if values is not None)
        return scores

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
        self.rolled_out = False
        if self.packing.divisible and not self.sharded:  # after a pass, FSDP2 has the weights of the root in one piece
            self.packing.shared_prompts.decide()
        rollouts = self.rollouts.make(self, inputs, super()._generate_and_score_completions)
        self.rolled_out = True
        return rollouts

    def _generate_single_turn(
        self, prompt_ids: list, images: list | None, multimodal_fields: Batch, num_generations: int, **options: Any
    ) -> tuple[list, list | None]:
        arguments = (prompt_ids, images, multimodal_fields, num_generations)
        return self.rollouts.completer.complete(self, *arguments, super()._generate_single_turn, **options)

    def _tokenize_prompts(self, prompts: list) -> tuple[list, list | None, Batch]:
        return self.rollouts.completer.tokenize(self, prompts, super()._tokenize_prompts)

    def _get_tool_suffix_ids(self, tool_messages: list) -> list[int]:
        check_sees(self.processing_class, tool_messages)
        messages = without_image_tokens(tool_messages, self.processing_class) if self._is_vlm else tool_messages
        return super()._get_tool_suffix_ids(messages)

    # The data, the log and checkpoints

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        self._epoch_sampler = EpochSampler.like(super()._get_train_sampler(dataset))
        return self._epoch_sampler

    def _run_epoch(self, *args: Any, epoch: int, **options: Any) -> None:
        """Train an epoch, unless all steps have been done before."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        if self._epoch_sampler:
            self._epoch_sampler.set_epoch(epoch)
        self.resume.begin_epoch(self)
        super()._run_epoch(*args, epoch=epoch, **options)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, with the steps repeated and skipped and the peak of memory since the last log."""
        if self.model.training and "loss" in logs:
            logs |= {"update/oom_retries": self.budget.retries, "update/steps_skipped": self.guard.skipped}
            logs |= self.memory.since_log()
            self.budget.retries = self.guard.skipped = 0
            for watcher in self.watchers:
                watcher.write(self)
        keep_writable(self._logs["extra"])
        super().log(logs, start_time)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save as transformers does, with what a run needs to continue bit for bit."""
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        with self.resume.sealed(self, folder):
            super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Save as TRL does, and a tied weight, of which gathering a sharded policy makes two, once."""
        tied = getattr(self.accelerator.unwrap_model(self.model), "all_tied_weights_keys", None) or {}
        if state_dict:
            state_dict = {name: weight for name, weight in state_dict.items() if name not in tied}
        super()._save(output_dir, state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load = partial(super()._load_from_checkpoint, resume_from_checkpoint, model)
        load_weights(self, Path(resume_from_checkpoint), load)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # several processes on CPUs have one numbered device each, which `torch.load` does not know
        device = torch.device("cpu") if self.args.device.type == "cpu" else self.args.device
        with replaced(self.args, "_setup_devices", device), loads_without_state():
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint:
            self.resume.load(self, Path(checkpoint), device)
