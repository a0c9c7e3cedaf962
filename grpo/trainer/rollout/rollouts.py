"""From the problems of a step to scored completions."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from threading import Lock
from typing import Any

import torch

from grpo.data.images import View, unexpanded
from grpo.data.stream import NUMBER, Stream
from grpo.generation.at_once import AtOnce
from grpo.trainer.batch import Batch, loss_mask
from grpo.trainer.measurements import MemoryReadings, StepClock
from grpo.trainer.processes import own_part
from grpo.trainer.rollout import by_transformers, engine_check, episodes
from grpo.trainer.rollout.alone import own_values
from grpo.trainer.rollout.assemble import assemble
from grpo.trainer.rollout.columns import compares, kept_columns, unique, with_groups
from grpo.trainer.rollout.degenerate import Degenerate
from grpo.trainer.rollout.dynamic_sampling import DynamicSampling, generation_metrics, own_tokens
from grpo.trainer.rollout.engine_check import EngineCheck
from grpo.trainer.rollout.filtered import Filtered
from grpo.trainer.rollout.image_tokens import as_tensors, end_before
from grpo.trainer.rollout.in_flight import InFlight
from grpo.trainer.rollout.sampling import Completion, Group, Row, groups_of, rows_of, sample
from grpo.trainer.rollout.thumbnails import Thumbnails, strip_images
from grpo.trainer.rollout.tool_calls import ToolCalls, is_answered, loggable, parsed
from grpo.utils.diagnosis import sampling_filters
from grpo.utils.modes import without_dropout
from grpo.utils.patching import patched, replaced

log = logging.getLogger(__name__)


@dataclass
class Rollouts:
    """Makes the rollouts of a step.

    `make` samples completions (`sample`, `generate`, `tokenize`, `complete`, `score`, in this order), and has TRL
    assemble a batch of them (`assemble`). The trainer comes as an argument, with `stock`, TRL's method of the same
    purpose.
    """

    clock: StepClock
    memory: MemoryReadings
    engine_check: EngineCheck
    at_once: AtOnce
    thumbnails: Thumbnails
    keep_columns: bool = False
    """Whether the columns of the data, and small images, are logged with completions."""
    sampling: DynamicSampling | None = None
    """None to take the problems that the data loader gives."""
    in_flight: InFlight | None = None
    """None to generate when completions are needed."""
    tool_calls: ToolCalls | None = None
    stream: Stream | None = None
    """Problems of which the data loader gives the numbers; None where it gives the problems."""
    view: View | None = None
    """Opens the images of each generation; None where the data has them open."""
    filtered: Filtered | None = None
    """Where the policy is scored over what sampling filters have kept."""
    pass_at_k: int | None = None
    """Number of completions of which the best counts; None where each counts."""
    degenerate: Degenerate | None = None
    """None where no completion is skipped for what it is."""
    numbered: bool = False
    """Whether completions get a `completion_id`, in the batch and in the table."""
    limits: dict[str, int] = field(default_factory=dict)
    """Tokens of the longest completion by task of a mixture."""
    scoring: Lock = field(default_factory=Lock)
    """Reward functions are called by one thread at a time."""
    _limits: list[int] = field(default_factory=list, init=False)
    """Limit on each completion of the rollouts at hand, tokens; none where all have TRL's."""
    _begun: dict[tuple[int, ...], int] = field(default_factory=dict, init=False)
    """The same by the tokens of the prompt."""
    _numbered: int = field(default=0, init=False)
    """Completions of all processes that have a `completion_id`."""
    _opened: dict[str, Any] = field(default_factory=dict, init=False)
    """The images of the rollouts at hand."""

    def make(self, trainer: Any, rows: list[Row], stock: Callable[[list[Row]], Batch]) -> Batch:
        """Return rollouts with their advantages, and the step at which they were made: sample, then assemble.

        The step is that of training: an evaluation in between makes rollouts too.

        Args:
            trainer: an `ExactGRPOTrainer`.
            rows: of the data loader; where problems are chosen, only their number counts.
            stock: TRL's `_generate_and_score_completions`.
        """
        training = trainer.model.training
        with self.clock.of("rollout", training):
            if self.stream and training:
                self.stream.release(self._first(rows))
            if self.sampling and training:
                completions = self._chosen(trainer, len(rows))
                local = own_part(trainer.accelerator, completions)
                rows = self.shown(trainer, [trainer.problems[completion.problem] for completion in local])
            else:
                completions, rows, _ = sample(trainer, self.read(trainer, rows), range(len(rows)))
            numbers = self._number(trainer, len(rows)) if self.numbered and training else {}
            batch = assemble(trainer, rows, completions, stock) | numbers
            self._compare(trainer, batch, training)
            for values in trainer._logs["extra"].values():  # a column that begins after other rows were logged
                values.extendleft([None] * (len(trainer._logs["prompt"]) - len(values)))
            if self.tool_calls and training:
                unanswered = mean(not is_answered(completion.messages) for completion in completions)
                trainer.note(self.tool_calls.metrics(trainer.accelerator) | {"tools/unanswered": unanswered})
        self._opened.clear()
        return batch | {"generated_at": torch.tensor(trainer.state.global_step)}

    def _first(self, rows: list[Row]) -> int:
        """Return the number of the first problem of a stream that is still needed."""
        if self.in_flight and self.in_flight.first is not None:
            return self.in_flight.first
        return self.sampling.order.taken if self.sampling else rows[0][NUMBER]

    def _compare(self, trainer: Any, batch: Batch, training: bool) -> None:
        """Note how the rollouts were sampled: skipped completions, filters, policy and engine."""
        if self.degenerate and training:
            trainer.note(self.degenerate.take_metrics(trainer.accelerator))
        if self.filtered:
            trainer.note(self.filtered.over_all(trainer, batch))
        if trainer.use_vllm and training:
            is_fresh = not self.in_flight or self.in_flight.is_fresh
            if is_fresh and (self.filtered or not sampling_filters(trainer.args)):
                trainer.note(self.engine_check.compare(trainer, batch))
            trainer.vllm_generation.checked = False  # of the policy after the update
        ratio = batch.get("importance_sampling_ratio")
        if ratio is not None and trainer.vllm_importance_sampling_mode.endswith("_mask"):
            fraction = engine_check.masked_fraction(trainer.accelerator, ratio, loss_mask(batch))
            trainer.note({"sampling/masked_share": fraction})

    def _chosen(self, trainer: Any, count: int) -> list[Completion]:
        """Return the completions of a step, of all processes; groups with different rewards first."""
        assert self.sampling
        wanted = count * trainer.accelerator.num_processes // trainer.num_generations
        if self.in_flight:
            with self.clock.of("generate"), self.memory.of("generate"):
                completions, metrics = self.in_flight.fill(trainer, wanted)
        else:
            completions, metrics = self.sampling.fill(wanted, partial(self._round, trainer))
        ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        trainer.note(metrics | generation_metrics(completions, ends, tools=bool(trainer.tools)))
        lengths = (len(completion.prompt_ids) + own_tokens(completion) for completion in completions)
        trainer.state.num_input_tokens_seen += sum(lengths)
        trainer._metrics["train"]["num_tokens"] = [trainer.state.num_input_tokens_seen]
        if self.has_taken_all(trainer.args):  # these are the last rollouts
            every = trainer.args.steps_per_generation * trainer.num_iterations
            more = max(1, every // trainer.args.gradient_accumulation_steps)
            trainer.state.max_steps = trainer.state.global_step + more
        return completions

    def _round(self, trainer: Any, number: int) -> list[tuple[Group, bool]]:
        """Return the scored groups of the next problems, each with whether its rewards are equal."""
        assert self.sampling
        problems = self.sampling.order.take(number)
        return groups_of(trainer, problems, rows_of(trainer, problems, trainer.num_generations))

    def _number(self, trainer: Any, count: int) -> Batch:
        """Return and log the `completion_id` of this process's completions."""
        processes, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
        numbers = list(range(self._numbered + count * rank, self._numbered + count * (rank + 1)))
        self._numbered += count * processes
        trainer._log_completion_extra("completion_id", numbers)
        return {"completion_id": torch.tensor(numbers)}

    def sample_groups(self, trainer: Any, problems: list[int], size: int) -> list[Group]:
        """Return the scored groups of some problems, of `size` completions each, as a round of dynamic sampling is."""
        try:
            with replaced(trainer, "num_generations", size), self.clock.of("rollout"):
                rows = rows_of(trainer, problems, size)
                return [group for group, _ in groups_of(trainer, problems, rows)]
        finally:
            self._opened.clear()
            if self.tool_calls:
                self.tool_calls.reset()

    def has_taken_all(self, args: Any) -> bool:
        """Return whether all problems of all epochs have been taken, where no number of steps was asked for."""
        if args.max_steps > 0 or not self.sampling or (self.in_flight and self.in_flight.pending):
            return False
        return self.sampling.order.taken >= args.num_train_epochs * self.sampling.order.count

    def read(self, trainer: Any, rows: list[Row]) -> list[Row]:
        """Return the rows of a batch of the data loader; those of a stream stand behind their numbers."""
        if not (self.stream and trainer.model.training):
            return rows
        with self.clock.of("data"):
            return [self.stream[row[NUMBER]] for row in rows]

    def shown(self, trainer: Any, rows: list[Row]) -> list[Row]:
        """Return rows with their images as the policy sees them."""
        self._limits = [self.limits[row["task"]] for row in rows] if self.limits else []
        if not self.view:
            return rows
        with self.clock.of("data", trainer.model.training):
            return self.view.shown(rows, self._opened)

    def tokenize(self, trainer: Any, prompts: list, stock: Callable[[list], Any]) -> tuple[list, list | None, Batch]:
        """Tokenize prompts; a backend that expands images itself gets those with images as text."""
        prompt_ids, images, fields = stock(prompts)
        limits = self._limits or [trainer.max_completion_length] * len(prompts)
        self._begun = dict(zip(map(tuple, prompt_ids), limits, strict=True))
        images = images and [row or [] for row in images]  # processors refuse None, which TRL has for no image
        if images and trainer.use_vllm and trainer.vllm_generation.expands_images:
            options = {"chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
            given = unexpanded(trainer.processing_class, prompts, trainer.tools or (), **options)
            trainer.vllm_generation.give_images(prompt_ids, given)
        return prompt_ids, images, as_tensors(fields)

    def generate(self, trainer: Any, prompts: list) -> Any:
        """Return completions as TRL's `_generate`."""
        training = trainer.model.training
        text = bool(trainer.tools) and not trainer._is_vlm  # an image would be needed with its tokens
        turns = self.at_once.several_turns() if text else nullcontext()
        parsing = patched("trl.trainer.grpo_trainer:parse_response", parsed)
        with self.clock.of("generate", training), self.memory.of("generate"), turns, parsing:
            generated = trainer._generate(prompts)
        self._limits, self._begun = [], {}  # an evaluation may tokenize other prompts next
        if self.degenerate and training:
            self.degenerate.find(*generated[1:3])
        return generated

    def complete(
        self,
        trainer: Any,
        prompts: list,
        images: list | None,
        fields: Batch,
        group: int,
        stock: Callable[..., tuple[list, list | None]],
        has_tool_images: bool = False,
    ) -> tuple[list, list | None]:
        """Complete prompts as TRL's `_generate_single_turn`; with transformers' generate each prompt is read once."""

        def retry(limit: int) -> None:
            trainer.budget.retry()
            log.warning("out of memory in generation: %d completions at once from now on", limit)

        given = (prompts, images, fields, group, has_tool_images)
        limits = [self._left(prompt, trainer.max_completion_length) for prompt in prompts]
        longest = max([1, *limits])
        if trainer.use_vllm:
            engine = trainer.vllm_generation
            shorter = hasattr(engine, "max_completion_length") and longest < engine.max_completion_length
            with replaced(engine, "max_completion_length", longest) if shorter else nullcontext():
                found = stock(*given)
        else:
            with without_dropout(trainer.model):
                if trainer.use_transformers_continuous_batching:
                    found = stock(*given)
                else:
                    found = (by_transformers.complete(trainer, self.at_once, *given, longest, retry), None)
        found = within(limits, *found)
        token = getattr(trainer.processing_class, "image_token_id", None)
        return found if token is None else end_before(token, trainer._tokenizer.eos_token_id, *found)

    def _left(self, prompt: list[int], longest: int) -> int:
        """Return the tokens that a completion may still have: in a later turn, with tools, those of before count."""
        for length in sorted(set(map(len, self._begun)), reverse=True):
            if (begun := tuple(prompt[:length])) in self._begun and length <= len(prompt):
                return max(0, self._begun[begun] - (len(prompt) - length))
        return longest

    def score(self, trainer: Any, rows: list[Row], prompts: list, completions: list, ids: list) -> torch.Tensor:
        """Return the rewards of completions, (completions of all processes, rewards), as TRL's `_calculate_rewards`.

        TRL adds up the rewards that are not NaN: a failed one would count as 0, so that its completion has none here.
        Neither has a degenerate completion. Prompts lose their images, and tool calls become text, in place: tables and
        checkpoints keep both.
        """
        if self.keep_columns:
            self._keep_columns(trainer, rows, ids)
        training = trainer.model.training
        if any(map(compares, trainer.reward_funcs)):
            rows = with_groups(rows, trainer.num_generations if training else trainer.num_generations_eval)
        pending, trainer._pending_extra_logs = trainer._pending_extra_logs, defaultdict(list)
        failed = torch.zeros(len(prompts), dtype=torch.bool, device=trainer.accelerator.device)
        with self.scoring:  # rollouts in flight are scored one batch at a time
            with self.clock.of("reward", training):
                rewards = trainer._calculate_rewards(rows, prompts, completions, ids)
            for function in trainer.reward_funcs:
                isolated = getattr(function, "isolated", None)
                failed[isolated.faulted if isolated else []] = True
        logged, trainer._pending_extra_logs = trainer._pending_extra_logs, pending
        pending |= unique(logged, {*pending, *trainer.reward_func_names}, len(prompts))
        if self.degenerate and training:
            failed |= torch.tensor(self.degenerate.skipped, device=failed.device)
        rewards[trainer.accelerator.gather(failed)] = torch.nan
        strip_images(rows, prompts)
        if trainer.tools:
            completions[:] = [[loggable(message) for message in messages] for messages in completions]
        return rewards

    def _keep_columns(self, trainer: Any, rows: list[Row], ids: list) -> None:
        """Log the columns of the data, and of completions whether they were truncated and their tokens."""
        progress = min(1.0, (trainer.state.global_step + 1) / max(1, trainer.state.max_steps))
        pictures = self.thumbnails if trainer.log_completions else None
        ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        truncated = [not tokens or tokens[-1] not in ends for tokens in ids]
        columns = {"tokens": list(map(len, ids)), "truncated": truncated}
        for column, values in (columns | kept_columns(rows, trainer.reward_func_names, pictures, progress)).items():
            trainer._log_completion_extra(column, values)

    def answers(self, trainer: Any, rows: list[Row]) -> list[list[Row]]:
        """Return the likeliest conversation that follows each row's prompt; see `episodes.answers`."""
        return episodes.answers(trainer, rows)

    @contextmanager
    def ahead(self, trainer: Any) -> Iterator[None]:
        """While inside, rollouts may be in flight; none are before and afterwards."""
        if not self.in_flight:
            yield
            return
        self.in_flight.reset()
        with own_values():
            try:
                yield
            finally:
                self.in_flight.stop(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next steps depend on."""
        order = self.sampling.order.state_dict() if self.sampling else None
        in_flight = self.in_flight.state_dict() if self.in_flight else None
        return {"completions_at_once": self.at_once.limit, "order": order, "in_flight": in_flight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what `state_dict` has returned."""
        limits = (self.at_once.limit, state.get("completions_at_once"))
        self.at_once.limit = min((limit for limit in limits if limit), default=None)
        if self.sampling and state["order"]:
            self.sampling.order.load_state_dict(state["order"])
        if self.in_flight and state.get("in_flight"):
            self.in_flight.load_state_dict(state["in_flight"])


def within(limits: list[int], ids: list, logps: list | None) -> tuple[list, list | None]:
    """Return completions, and the log-probabilities of their tokens, truncated to as many tokens as each may have."""
    cut = [[values[:limit] for values, limit in zip(all_of, limits, strict=True)] for all_of in (ids, logps) if all_of]
    return cut[0], cut[1] if logps else None
