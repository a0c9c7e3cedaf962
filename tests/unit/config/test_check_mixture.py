"""A wrong mixture of tasks ends with a one-line error before anything is loaded."""

from collections.abc import Callable

import pytest
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from grpo.config.check import check
from grpo.config.messages import explain
from grpo.config.mixture import mixture_of, single_tasks
from grpo.config.tools import TASKSET
from grpo.planning.from_config import workload_of
from grpo.rundir.history import name_of
from grpo.utils.errors import ConfigError

Compose = Callable[..., DictConfig]
TWO = ["task=mixture", "+task@task.tasks.words=arithmetic", "+task@task.tasks.sums=sums"]
CALLS = [TWO[0], TWO[1], "task.tasks.words.task.conversational=true", "+task@task.tasks.calls=calculator"]


def test_a_mixture_is_planned_by_its_longest_task(composed: Compose) -> None:
    config = composed(*TWO, "task.tasks.sums.task.max_prompt_length=99", "task.tasks.sums.weight=2")
    check(config)
    workload = workload_of(config, "cpu")
    assert (workload.prompt, workload.completion, config.task.eval.size) == (99, 24, 400)
    mixture = mixture_of(config.task, config.train, config.reward)
    assert mixture is not None
    assert mixture.weights == {"words": 1, "sums": 2}
    assert mixture.limits == {"words": 24, "sums": 4}
    assert mixture.graders == {"words": "correctness", "sums": "correctness"}
    assert name_of(config.task) == "grpo.builtin.tasks.arithmetic.rows + grpo.builtin.tasks.sums.rows"
    assert list(single_tasks(composed().task)) == [""]


def test_the_limit_of_the_run_is_also_that_of_each_task(composed: Compose) -> None:
    config = composed(*TWO, "train.max_completion_length=10")
    mixture = mixture_of(config.task, config.train, config.reward)
    assert mixture is not None
    assert mixture.limits == {"words": 10, "sums": 4}


def test_one_task_and_no_evaluation_are_possible(composed: Compose) -> None:
    check(composed(*TWO[:2]))
    check(composed(*TWO, "task.eval.size=0"))
    check(composed("+experiment=mixture"))


def test_one_of_two_tasks_may_have_tools(composed: Compose) -> None:
    config = composed(*CALLS)
    check(config)
    assert list(config.task.tools) == ["grpo.builtin.tasks.calculator.calculator"]
    assert (config.train.max_tool_calling_iterations, config.train.max_completion_length) == (3, 64)


def test_a_resolved_mixture_can_be_read_again(composed: Compose) -> None:
    config = composed(*TWO)
    again = OmegaConf.create(OmegaConf.to_yaml(config))
    assert again.task.max_prompt_length == 64
    assert list(single_tasks(again.task)) == ["words", "sums"]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["task=mixture"], "there is no task in it"),
        (TWO[1:], "need task=mixture"),
        ([*TWO, "task.tasks.sums.weight=-1"], r"sums\.weight=-1: a number from 0"),
        ([*TWO, "task.tasks.sums.weight=inf"], r"sums\.weight=inf: a number from 0"),
        ([*TWO, "task.tasks.sums.weight=0", "task.tasks.words.weight=0"], "words, sums are all 0"),
        ([*TWO, "task.prompt=x"], r"task\.prompt=x: each task of a mixture has its own"),
        (
            [*TWO, "+task.tasks.sums.task.thinking=true"],
            r"sums\.task\.thinking=True: all tasks of a run have task\.thin",
        ),
        ([*TWO, "task.max_prompt_length=9"], r"max_prompt_length=9: each task of a mixture has its own"),
        ([*TWO, "task.eval.size=7"], r"eval\.size=7: each task"),
        ([*TWO, "task.few_shot.completion=x"], r"few_shot\.completion=x: each task"),
        ([*TWO, "+task@task.tasks.shapes=shapes"], r"shapes\.task\.images=image: a mixture takes text alone"),
        ([*TWO, "task.tasks.sums.task.conversational=true"], r"sums\.task\.conversational=True: False in"),
        ([*TWO, "+task@task.tasks.calls=calculator"], r"calls\.task\.conversational=True: False in"),
        ([*CALLS, "task.tasks.calls.train.max_completion_length=20"], "=20: all turns with tools have one limit"),
        ([*CALLS, "train.max_tool_calling_iterations=5"], "iterations=3: all turns with tools have one limit"),
        ([*TWO, "task.tasks.sums.rewards=[corectness]"], "no reward corectness in this run; did you mean corr"),
        ([*TWO, "task.tasks.sums.task.dataset.streaming=true"], "a mixture reads its data whole"),
        ([*TWO, f"task.tasks.sums.task.dataset.generator={TASKSET}"], "taskset of verifiers is a task alone"),
        ([*TWO, "task.tasks.sums.task.environment_id=x"], r"sums\.task\.environment_id=x: there is no task\.tasks"),
        ([*TWO, "task.tasks.sums.rewards=[]"], "needs at least one reward"),
        (
            [*TWO, "+reward@reward=brevity", *(f"task.tasks.{one}.rewards=[correctness]" for one in ("words", "sums"))],
            r"reward\.brevity: no task names it",
        ),
        ([*TWO, "task.tasks.sums.train.max_completion_length=0"], "max_completion_length=0: at least 1"),
        ([*TWO, "task.tasks.sums.task.eval.reward=corect"], r"sums\.task\.eval\.reward=corect: neither"),
    ],
)
def test_a_wrong_mixture_is_one_line(composed: Compose, overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        check(composed(*overrides))
    assert "\n" not in str(error.value)


def test_a_task_that_chooses_its_rewards_is_named(composed: Compose) -> None:
    with pytest.raises(HydraException) as error:
        composed(*TWO, "+task@task.tasks.puzzles=reasoning_gym")
    assert explain(error.value).startswith(
        "+task@task.tasks.puzzles=reasoning_gym: conf/task/reasoning_gym.yaml chooses"
    )
