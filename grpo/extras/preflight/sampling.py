"""Completions of training problems by the policy of a run: its engine, tools, limits and rewards, as in its first step.

It builds the trainer of the run and calls its rollouts like dynamic sampling, so that the samples equal the data of the
run's first steps.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import track
from transformers import set_seed

from grpo.cli import output_in
from grpo.config.batch import completions, keep_batch, processes
from grpo.config.facts import generator_of
from grpo.config.mixture import mixture_of, single_tasks
from grpo.config.resolve import Resolved
from grpo.data.rewards import running_rewards, usable_columns
from grpo.data.task import Problems, reward_columns
from grpo.evaluation.model import fingerprint
from grpo.extras.preflight import problems as about_problems
from grpo.extras.preflight.first_step import FirstStep, read_step, try_first_step, write_step
from grpo.extras.preflight.samples import Sample, Sampled, append, read
from grpo.generation.vllm.start import EngineStart
from grpo.model import policy
from grpo.model.thinking import template_of
from grpo.run.session import find_model, options_of_rewards, problems_of
from grpo.run.trainer import make_trainer
from grpo.rundir.files import ERRORS_FILE
from grpo.tools.running import running_tools
from grpo.trainer import ExactGRPOTrainer, trl
from grpo.trainer.rollout.completion import Completion
from grpo.trainer.rollout.mixed_order import order_of
from grpo.utils.device import kind_of_device
from grpo.utils.distributed import log_name
from grpo.utils.errors import ConfigError, RunError
from grpo.view.images import COLUMN
from rewards.isolation.reward import Reward, RewardError
from rewards.text import text_of

FILE = "samples.jsonl"
DECIDE = ("model", "peft", "task", "reward")
"""Groups of the configuration that decide completions and rewards."""
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs", "seed", "use_vllm"),
    *("max_completion_length", "max_tool_calling_iterations", "chat_template_kwargs"),
)
"""Keys of `train` that do."""


@dataclass
class Result:
    """The samples, and the facts about problems and policy."""

    problems: list[Sampled]
    facts: dict[str, Any]
    """See `grpo.extras.preflight.problems.facts`; and `faults`, a message for each reward that has failed."""
    first_step: FirstStep


def for_sampling(config: DictConfig) -> DictConfig:
    """Return the configuration of a single process that samples the batch of all processes of a run.

    The batch keeps its size; nothing is divided over processes, saved for the page of a run, or overlapped with an
    update.
    """
    count = processes(config)
    config = config.copy()
    train = config.train
    config.launch.processes = config.launch.nodes = 1
    config.plan.processes = None
    keep_batch(train, count, 1)
    train.fsdp = train.fsdp_config = train.deepspeed = None
    config.engine.staleness = 0
    config["update"].compile = False
    slices = (train.generation_batch_size or 0) // train.per_device_train_batch_size or train.steps_per_generation
    train.gradient_accumulation_steps = slices or train.gradient_accumulation_steps  # a step takes a whole generation
    train.num_iterations = 1
    train.log_completions, train.report_to = False, "none"
    train.save_strategy = train.eval_strategy = "no"
    train.load_best_model_at_end, train.max_steps = False, 2
    return config


def sample(settings: Resolved, folder: Path, console: Console, untried: str = "") -> Result:
    """Sample the problems that are not in the file of `folder` yet, and try the first step; return all of it.

    Args:
        settings: of `for_sampling`.
        untried: the reason why the first step cannot be tried; empty if it can.

    Raises:
        ConfigError: the input is wrong, an engine is not there, or a reward has failed on every completion.
        RunError: a reward has failed and `on_error` is `raise`.
    """
    options, name = settings.config.preflight, settings.model.model_name_or_path
    find_model(settings)
    with output_in(folder / log_name()), running_tools(settings.task, folder) as tools:
        processing_class = policy.load_processing_class(settings.model, template=template_of(settings.config))
        problems = problems_of(settings, processing_class, tools, console)
        if problems.stream:
            batch = completions(settings.train, None) // settings.train.num_generations
            first = problems.stream.beginning(max(options.problems, batch))
            problems = replace(problems, train=first, stream=None)
        if min(len(problems.train), options.problems) < 2:
            raise ConfigError(f"task: {len(problems.train)} problem to train on; a forecast compares at least 2")
        facts = about_problems.facts(settings, name, problems, processing_class)
        keys = keys_of(settings, problems, options)
        known = read(folder / FILE)
        missing = [problem for problem, key in keys.items() if key not in known]
        if len(missing) < len(keys):
            console.print(f"{len(keys) - len(missing)} of {len(keys)} problems were sampled before")
        first_step = FirstStep([], reason=untried) if untried else read_step(folder, settings.config)
        if missing or first_step is None:
            rewarded = options_of_rewards(settings, problems)
            columns = usable_columns(settings.task, rewarded, reward_columns(problems.train), problems.columns)
            with running_rewards(rewarded, columns, folder, folder / ERRORS_FILE) as rewards:
                with EngineStart(console) if generator_of(settings.train) == "colocated" else nullcontext():
                    trainer = make_trainer(settings, folder, problems, processing_class, rewards, tools)
                tasks = single_tasks(settings.task).items()
                graders = {name: rewards.get(task.eval.reward) for name, task in tasks}
                with errors_in_one_line(folder):
                    for batch in batches(trainer, missing, options.samples, console):
                        append(folder / FILE, sampled(trainer, batch, options.samples, graders, keys, missing[0]))
                    if first_step is None:
                        first_step = try_first_step(trainer)
                        write_step(folder, settings.config, first_step)
            known = read(folder / FILE)
    facts |= {"faults": faults_in(folder / ERRORS_FILE)}
    return Result([known[key] for key in keys.values()], facts, first_step)


def faults_in(file: Path) -> dict[str, str]:
    """Return the message of the newest fault of each reward."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {row["reward"]: row["message"] for row in rows}


@contextmanager
def errors_in_one_line(folder: Path) -> Iterator[None]:
    """Turn failures and interrupts during sampling into a RunError that states which samples are kept."""
    try:
        yield
    except (RewardError, KeyboardInterrupt) as error:
        saved = f"{len(read(folder / FILE))} problems are kept; the same command continues"
        if isinstance(error, RewardError):
            raise RunError(f"{error}; {saved}", status=2) from error
        raise RunError(f"interrupted: {saved}", status=130) from error


def keys_of(settings: Resolved, problems: Problems, options: DictConfig) -> dict[int, str]:
    """Return a fingerprint for each problem that is to be sampled, in the order in which the run would take them."""
    train = settings.train
    mixture = mixture_of(settings.task, train, settings.reward)
    shuffle = train.shuffle_dataset and not settings.task.dataset.get("streaming")  # which has an order of its own
    order = order_of(problems.train, mixture, train.seed, shuffle, prioritize=False)
    chosen = order.take(min(options.problems, len(problems.train)))
    config: Any = OmegaConf.to_container(settings.config, resolve=True)
    files = [Path(reward.fn.rpartition(":")[0]) for reward in settings.reward.values()]
    decisive = [
        fingerprint(settings.config, settings.model.model_name_or_path, settings.engine.backend, on_gpu(train)),
        [config[group] for group in DECIDE],
        [config["train"][name] for name in SAMPLING],
        [(str(file), file.stat().st_mtime_ns) for file in files if file.is_file()],
        options.samples,
    ]
    origin = json.dumps(decisive, default=str)
    texts = problems.train.with_format(None).select_columns(["prompt", "answer"])
    rows = {problem: json.dumps(texts[problem], default=str) for problem in chosen}
    return {
        problem: hashlib.sha256(f"{origin}{problem}{row}".encode()).hexdigest()[:24] for problem, row in rows.items()
    }


def batches(trainer: ExactGRPOTrainer, missing: Sequence[int], samples: int, console: Console) -> Iterator[list[int]]:
    """Yield batches of problems, with about as many completions as the run generates at once.

    There are at least two batches, because the time of the first batch includes the warm-up.
    """
    size = max(1, min(trainer.args.generation_batch_size // samples, -(-len(missing) // 2)))
    starts = range(0, len(missing), size)
    for start in track(starts, "sampling", console=console, transient=True, disable=not console.is_terminal):
        yield list(missing[start : start + size])


def sampled(
    trainer: ExactGRPOTrainer,
    batch: list[int],
    samples: int,
    graders: Mapping[str, Reward | None],
    keys: dict[int, str],
    first: int,
) -> list[Sampled]:
    """Generate and score completions of some problems.

    Args:
        graders: decide correctness by task, as in an evaluation; None without a grader.
        keys: keys of the problems.
        first: the first problem of the call.
    """
    trainer.model.train()
    set_seed(trainer.args.seed + 1 + batch[0])  # the same completions, whether the file has others already or not
    trainer.clock.reset()
    with trainer.accelerator.autocast():
        groups = trainer.rollouts.sample_groups(trainer, batch, samples)
    faults = {func.isolated.name: func.isolated.faulted for func in trainer.reward_funcs if hasattr(func, "isolated")}
    seconds = trainer.clock.take()
    part = {phase: seconds[phase] / len(batch) for phase in ("generate", "reward")}
    answers = [completion for group in groups for completion in group]
    correct = graded_by_task(trainer, graders, answers)
    samples_of = [
        as_sample(trainer, completion, correct[row], [name for name, rows in faults.items() if row in rows])
        for row, completion in enumerate(answers)
    ]
    return [
        Sampled(
            keys[problem],
            problem,
            trainer.train_dataset[problem]["prompt"],
            str(trainer.train_dataset[problem]["answer"]),
            samples_of[number * samples :][:samples],
            part,
            first in batch,
            len(answers[number * samples].prompt_ids),
        )
        for number, problem in enumerate(batch)
    ]


def as_sample(trainer: ExactGRPOTrainer, completion: Completion, correct: bool | None, failed: list[str]) -> Sample:
    """Return a completion as the file keeps it."""
    ended = completion.ids[-1] in trl.end_tokens(trainer)
    rewards = dict(zip(trainer.reward_func_names, completion.rewards, strict=True))
    by_name = {name: None if value is None or value != value else float(value) for name, value in rewards.items()}
    return Sample(text_of(completion.messages), len(completion.ids), ended, by_name, correct, failed)


def graded_by_task(
    trainer: ExactGRPOTrainer, graders: Mapping[str, Reward | None], answers: Sequence[Completion]
) -> list[bool | None]:
    """Return whether each completion is correct by the grader of its task; the single task of a run has no name."""
    by_row: dict[int, bool | None] = {}
    tasks = [trainer.train_dataset[answer.problem].get("task") for answer in answers]
    for name, grader in graders.items():
        rows = [row for row, task in enumerate(tasks) if name in ("", task)]
        if rows:
            by_row |= dict(zip(rows, graded(trainer, grader, [answers[row] for row in rows]), strict=True))
    return [by_row[row] for row in range(len(answers))]


def graded(trainer: ExactGRPOTrainer, grader: Reward | None, answers: Sequence[Completion]) -> list[bool | None]:
    """Return whether each completion is correct: by the run's reward of that name, or else by the grader.

    Correctness is unknown for a completion on which another reward has failed.
    """
    if grader is None:
        return [None] * len(answers)
    if grader.name in trainer.reward_func_names:
        place = trainer.reward_func_names.index(grader.name)
        return [
            None if completion.rewards[place] != completion.rewards[place] else completion.rewards[place] == 1
            for completion in answers
        ]
    rows = [trainer.train_dataset[completion.problem] for completion in answers]
    names = [name for name in rows[0] if name not in ("prompt", "completion", COLUMN)]
    columns = {name: [row[name] for row in rows] for name in names}
    prompts, answered = [completion.prompt for completion in answers], [completion.messages for completion in answers]
    scores = grader.score(
        prompts=prompts, completions=answered, completion_ids=[completion.ids for completion in answers], **columns
    )
    return [score == 1 for score in scores]


def on_gpu(train: DictConfig) -> bool:
    """Return whether the policy computes on a GPU here."""
    return kind_of_device() != "cpu" and not train.use_cpu
