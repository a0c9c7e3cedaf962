"""Tasksets of verifiers: rows and rewards as verifiers has them, tools with a state, and what is refused."""

import asyncio
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig

from grpo.config.schema import ROOT
from grpo.extras.environments.taskset import MODULE, asked, with_taskset
from grpo.tools.processes import Source
from grpo.tools.running import environment_of
from grpo.trainer import ExactGRPOTrainer
from grpo.trainer.rollout.episodes import rollouts
from grpo.utils.errors import ConfigError
from rewards.isolation.reward import Reward
from tests.unit.trainer.rollout.test_tool_calls import TOKENIZER, with_tools

vf = pytest.importorskip("verifiers.v1")
pytestmark = pytest.mark.slow  # verifiers comes with `make extras`
EXAMPLES = ROOT / "examples" / "environments"
REVERSE, PROBLEMS = str(EXAMPLES / "reverse_text.py"), str(EXAMPLES / "word_problems.py")
TASKSET = """
import verifiers.v1 as vf

__all__ = ["Own"]


class OwnTask(vf.Task[vf.TaskData]):
    {task}

    @vf.reward
    async def one(self, trace) -> float:
        return 1.0


class Own(vf.Taskset[OwnTask]):
    def load(self):
        yield OwnTask(vf.TaskData({data}), self.config.task)
{more}
"""


def taskset(folder: Path, task: str = "pass", data: str = "prompt='a'", more: str = "") -> str:
    file = folder / "own_taskset.py"
    file.write_text(TASKSET.format(task=task, data=data, more=more))
    return str(file)


def test_rows_are_the_tasks_and_splits_share_none() -> None:
    found = asked(REVERSE, {"examples": 1}, 0, 3)
    assert (found["rewards"], found["tools"]) == ({"similarity": 1.0, "exact": 0.0}, False)
    assert [message["role"] for message in found["rows"][0]["prompt"]] == ["user", "assistant", "user"]
    assert asked(REVERSE, {"examples": 1}, 2, 1)["rows"] == found["rows"][2:]


def test_rewards_are_those_of_verifiers_own_scoring() -> None:
    from grpo.extras.environments import verifiers

    arguments = {"environment_id": PROBLEMS, "environment_args": {}}
    loaded = verifiers.load_taskset(**arguments)
    (row,) = verifiers.rows(loaded, 0, 1)
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "1+1"}}}
    answer = verifiers.task_of(loaded, row["verifiers_task"]).data.answer
    said = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculator", "content": "2"},
    ]
    for last, calls in ((f"#### {answer}", 1), ("no", 3), ("", 0)):
        completion = [*said, {"role": "assistant", "content": last}]
        task = verifiers.task_of(loaded, row["verifiers_task"])
        trace = verifiers.trace_of(task, [*row["prompt"], *completion], len(row["prompt"]))
        trace.state.calls = calls
        asyncio.run(task.score(trace))
        theirs = {name: reward.score for name, reward in trace.rewards.items()} | trace.metrics
        given = {"prompts": [row["prompt"]], "completions": [completion], "verifiers_task": [row["verifiers_task"]]}
        episode = SimpleNamespace(state=trace.state.model_dump_json())
        for name, value in theirs.items():
            scored = verifiers.reward_of_state(name, **arguments, **given, environments=[episode])
            assert asyncio.run(scored) == [value]
    assert theirs == {"solved": 0.0, "calls": 0.0}


def test_a_conversation_is_a_trace_as_verifiers_records_it() -> None:
    from grpo.extras.environments import verifiers

    calls = [{"function": {"name": name, "arguments": {"x": 1}}} for name in ("a", "b")]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "shown"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "name": name, "content": name} for name in ("a", "b")),
        {"role": "assistant", "content": "end"},
    ]
    task = vf.Task(vf.TaskData(prompt="u"))
    trace = verifiers.trace_of(task, messages, sampled_from=3)
    assert (trace.num_turns, trace.last_reply, trace.num_branches) == (2, "end", 1)
    assert [message.role for message in trace.messages] == [message["role"] for message in messages]
    first, second = trace.assistant_messages[0].tool_calls
    assert [message.tool_call_id for message in trace.tool_messages] == [first.id, second.id]
    assert first.arguments == '{"x": 1}'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"task": "NEEDS_CONTAINER = True"}, "OwnTask needs a container"),
        ({"data": "prompt='a', image='python'"}, "task 0 needs a container"),
        ({"data": ""}, "task 0 needs a user who opens the conversation"),
        (
            {"task": "@vf.stop\n    async def enough(self, trace: vf.Trace) -> bool: ..."},
            "OwnTask.enough ends episodes",
        ),
        ({"task": "async def setup(self, trace, runtime): ..."}, "OwnTask.setup needs a runtime"),
        ({"task": "@vf.reward\n    async def ran(self, trace, runtime): ..."}, "OwnTask.ran needs a runtime"),
        ({"more": "\nclass Two(vf.Env): ...\n\n__all__ += ['Two']"}, "has an Env of its own"),
        ({"more": "\nraise RuntimeError('broken')"}, "RuntimeError: broken"),
        ({"more": "\nimport os; os._exit(3)"}, "its process ended while it was imported"),
        ({"more": "\nimport no_such_package"}, "No module named 'no_such_package'"),
        ({"data": "prompt=[vf.UserMessage(content=[])]"}, "task 0 has images or tool calls in its prompt"),
    ],
)
def test_what_a_run_cannot_have_is_one_line(tmp_path: Path, content: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        asked(taskset(tmp_path, **content), {}, 0, 1)
    assert "\n" not in str(caught.value)


def test_a_missing_or_misconfigured_taskset_is_one_line(tmp_path: Path) -> None:
    for name, arguments, says in [
        ("no-such-environment", {}, "no module no_such_environment is installed"),
        (str(tmp_path / "none.py"), {}, "there is no file"),
        (REVERSE, {"lenght": 3}, "lenght"),
        (REVERSE, {"task": {"judges": [{"id": "reference", "api_key_var": "NO_SUCH_KEY"}]}}, "API key .* NO_SUCH_KEY"),
    ]:
        with pytest.raises(ConfigError, match=says) as caught:
            asked(name, arguments)
        assert "\n" not in str(caught.value)


def test_a_reward_of_garbage_costs_its_completions_only(tmp_path: Path) -> None:
    returns = "{'5': 5.0, 'x': 'many', '': None}[trace.last_reply]"
    task = f"@vf.reward\n    async def odd(self, trace):\n        return {returns}"
    name = taskset(tmp_path, task)
    row = asked(name, {}, 0, 1)["rows"][0]
    kwargs = {"name": "odd", "environment_id": name, "environment_args": {}}
    with closing(Reward(f"{MODULE}.reward", "odd", kwargs, output=subprocess.DEVNULL)) as reward:
        said = [[{"role": "assistant", "content": text}] for text in ("5", "x", "", "y")]
        earned = reward.score(prompts=[row["prompt"]] * 4, completions=said, verifiers_task=[row["verifiers_task"]] * 4)
    assert earned == [5.0, None, None, None]
    assert reward.errors.total() == 3


def test_the_configuration_gets_rewards_and_tools(composed: Callable[..., DictConfig]) -> None:
    line = ["task=verifiers", f"task.environment_id={PROBLEMS}", "+reward.solved.weight=2", "task.eval.size=8"]
    config, overrides = with_taskset(composed(*line), line)
    assert {name: reward.weight for name, reward in config.reward.items()} == {"solved": 2, "calls": 0}
    assert config.task.environment == f"{MODULE}.environment"
    assert overrides[-1] == f"task.environment={MODULE}.environment"
    assert config.task.eval.size == 0, "an evaluation has no state for these rewards"
    config, overrides = with_taskset(composed("task=verifiers", f"task.environment_id={REVERSE}"), [])
    assert (config.task.environment, config.task.eval.reward, overrides) == (None, "similarity", [])
    with pytest.raises(ConfigError, match=r"task\.environment_id: the installed taskset"):
        with_taskset(composed("task=verifiers"), [])


def test_ten_turns_train_on_the_ids_that_were_sampled(tmp_path: Path) -> None:
    row = asked(PROBLEMS, {}, 0, 1)["rows"][0]
    source = Source([f"{MODULE}.environment"], True, 20.0, subprocess.DEVNULL, ((PROBLEMS,), {}))
    with closing(source):
        kind = environment_of(source)
        trainer = with_tools(
            ExactGRPOTrainer,
            tmp_path,
            environment_factory=kind,
            max_tool_calling_iterations=10,
            max_completion_length=2000,
        )
        sampled: list[list[list[int]]] = []

        def single_turn(prompt_ids: list, *rest: Any, **how: Any) -> tuple[list, None]:
            text = '<tool_call>{"name": "calculator", "arguments": {"expression": "%d + 1"}}</tool_call>'
            turn = [TOKENIZER(text % (len(sampled) + number))["input_ids"] for number, _ in enumerate(prompt_ids)]
            whole, parts = TOKENIZER.convert_tokens_to_ids("Ġ{"), TOKENIZER.convert_tokens_to_ids(["Ġ", "{"])
            odd = [[part for one in ids for part in (parts if one == whole else [one])] for ids in turn]
            odd = [[*ids, TOKENIZER.eos_token_id] for ids in odd]  # which the tokenizer would write with fewer tokens
            sampled.append([list(ids) for ids in odd])
            return odd, None

        trainer._generate_single_turn = single_turn
        rows = [{**row, "environment": None} for _ in range(2)]
        _, _, (_, completion_ids, tool_mask, completions, *_) = rollouts(trainer, rows)
        states = [environment._state()["state"] for environment in trainer.environments]
    assert len(sampled) == 11
    for number in range(2):
        mine = [token for token, own in zip(completion_ids[number], tool_mask[number], strict=True) if own]
        assert mine == [token for turn in sampled for token in turn[number]]
        assert TOKENIZER(TOKENIZER.decode(mine), add_special_tokens=False)["input_ids"] != mine
        results = [message["content"] for message in completions[number] if message["role"] == "tool"]
        assert results[:10] == [str(turn + number + 1) for turn in range(10)]
        assert '"calls":10' in states[number]
