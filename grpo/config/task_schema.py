"""The schema of `task`: data, prompt, images, tools, reference answer and held-out problems."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """The reference answer of a row of the data."""

    column: str | None = "answer"
    """Column of the answer; None for data whose rewards use other columns, such as tests."""
    pattern: str | None = None
    """Regular expression whose first group is the final answer; None takes the whole column."""


@dataclass
class FewShot:
    """Examples before the question, in the form of `task.prompt`."""

    examples: list[dict[str, Any]] = field(default_factory=list)
    """Rows with the columns that `task.prompt` and `completion` name."""
    completion: str = "{answer}"
    """Template of an example's answer; in a plain prompt with the white space around it."""


@dataclass
class Evaluation:
    """The held-out problems."""

    split: str = "test"
    """A split of the data set, slices included: `test`, `train[:200]`."""
    size: int = 200
    """Number of problems, from the start of the split; 0 switches the evaluation off."""
    reward: str = "correctness"
    """The grader: the reward that gives 1 to a correct completion, from `conf/reward` or from this run."""
    difficulty: str | None = None
    """A column with the difficulty of a problem; accuracies are then reported per value of it too."""


@dataclass
class SingleTask:
    """The problems: data, prompt and reference answer."""

    dataset: dict[str, Any] = field(default_factory=lambda: {"streaming": False})
    """Arguments of `datasets.load_dataset`; or `generator`, the dotted path of a function that returns the rows. With
    `streaming` the rows are read while the run trains."""
    buffer_size: int = 1000
    """Rows of a stream that are read, filtered and shuffled together."""
    split: str = "train"
    """The split to train on, slices included: `train`, `train[200:]`."""
    prompt: str = "{question}"
    """The prompt, with the columns of the data set in braces."""
    system_prompt: str | None = None
    """The first message of a conversational prompt; a plain prompt begins with it."""
    conversational: bool = False
    """Whether prompts are lists of messages, to which the chat template is applied."""
    images: str | None = None
    """The column with the images of a prompt: a path, bytes, a picture, or a list of them; null or empty for none."""
    image_folder: str | None = None
    """Folder of image files with relative paths."""
    min_pixels: int | None = None
    """Width times height of the smallest image as the policy sees it; smaller images are enlarged."""
    max_pixels: int | None = None
    """Width times height of the largest image; larger images are scaled down. None takes the processor's limit."""
    few_shot: FewShot = field(default_factory=FewShot)
    tools: list[str] = field(default_factory=list)
    """Functions that the policy may call: `path/to/file.py:function`, `package.module.function`, or entry points of the
    group `grpo.tools`. Their docstrings and types describe the calls to the policy."""
    environment: str | None = None
    """A class, named in the same way, whose methods the policy may call; each completion has an instance of its own."""
    environment_id: str | None = None
    """First argument of the class, for environments that are one of many: an id, a package, a URL."""
    environment_args: Any = None
    """Keyword arguments of the class: a mapping."""
    tool_timeout: float = 60.0
    """Limit of a call of a tool or of the environment, seconds; the policy reads an error after a longer call."""
    answer: Answer = field(default_factory=Answer)
    eval: Evaluation = field(default_factory=Evaluation)
    max_prompt_length: int = 512
    """Tokens of the longest prompt, chat template and images included; longer prompts are filtered from the data."""


@dataclass
class MixedLimits:
    """Keys of `train` that a file of `conf/task` sets; in a mixture, a limit of this task."""

    max_completion_length: int | None = None
    """Tokens of the longest completion."""
    max_tool_calling_iterations: int | None = None
    """Turns with calls of tools; the same for all tasks with tools."""


@dataclass
class MixedTask:
    """A task of a mixture."""

    task: SingleTask = field(default_factory=SingleTask)
    """Data, prompt, answers, limits and grader of this task."""
    train: MixedLimits = field(default_factory=MixedLimits)
    weight: float = 1.0
    """Prompts of this task in a step, relative to those of the others."""
    rewards: list[str] | None = None
    """Names of the rewards that score this task; None for all."""


@dataclass
class Task(SingleTask):
    """The problems of a run: of one task, or with `task=mixture` of several."""

    thinking: Any = None
    """Whether the policy thinks, `true` or `false`, or how much, `low`, `medium` or `high`: the argument that its chat
    template has for it. None leaves it to the template."""
    tasks: dict[str, MixedTask] = field(default_factory=dict)
    """The tasks of a mixture, by their names."""
