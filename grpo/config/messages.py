"""One-line messages for exceptions of Hydra and OmegaConf: the key, the likely intention, the possible values."""

import difflib
import re
import shlex
import sys
from collections.abc import Iterable

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import MarkedYAMLError

from grpo.config.schema import GROUPS, NOT_SETTABLE, ROOT
from grpo.utils.errors import ConfigError

GGUF = "a GGUF file is read once, by a script as examples/smollm2/to_safetensors.py"
REMOVED = {
    "model.gguf_file": f"removed in 0.3; {GGUF}",
    "rollout.temperature_end": "removed in 0.3; each step samples at train.temperature",
    "rollout.max_entropy": "removed in 0.3; rollout.max_repetition skips completions that repeat themselves",
}
"""Keys of earlier versions, and what to use instead."""


def meant(word: object, possible: Iterable[object]) -> str:
    """Return `; did you mean a, b?` with the names closest to `word`, or a list of the possible names."""
    names = sorted({str(name) for name in possible})
    close = difflib.get_close_matches(str(word), names, n=3, cutoff=0.6)
    if close:
        return f"; did you mean {', '.join(close)}?"
    return f"; possible: {', '.join(names)}" if 0 < len(names) <= 40 else ""


def elsewhere(key: str) -> list[str]:
    """Return the keys of the same name in the groups of the configuration, such as `task.max_prompt_length`."""
    schema = ConfigStore.instance().load("schema.yaml").node
    parts = [(group, schema._get_node(group)) for group in GROUPS]
    return [f"{group}.{key}" for group, node in parts if isinstance(node, DictConfig) and key in (node._content or ())]


def check_flags(words: Iterable[str]) -> None:
    """Raise a ConfigError for an option in TRL's form, as `--learning_rate`, among the words of a command line."""
    for word in words:
        name = word.partition("=")[0][2:].replace("-", "_")
        if word.startswith("--") and (places := elsewhere(name)):
            raise ConfigError(
                f"{word}: write {' or '.join(f'{place}=…' for place in places)}; python -m grpo.from_trl converts a "
                "command of TRL"
            )


def of_yaml(error: MarkedYAMLError) -> str:
    """Return a line about a YAML that cannot be read: the file, the line and the reason."""
    mark, problem = error.problem_mark, str(error.problem)
    reason = "a tab; YAML is indented by spaces" if "'\\t'" in problem else problem
    return f"{mark.name}, line {mark.line + 1}: {reason}" if mark else reason


def explain(error: Exception) -> str:
    """Turn an exception of Hydra or OmegaConf into one line."""
    if isinstance(error, MissingConfigException):
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        if group in ("hydra/launcher", "hydra/sweeper") and choice.startswith("_"):  # that ours begins with
            return f"{group}={choice[1:]}: its plugin is not installed: `make extras` installs it"
        return f"{group}={choice}: no such choice{meant(choice, error.options or [])}"
    if "Ambiguous value for argument" in str(error):
        override = str(error).split("'")[1]
        key, _, values = override.partition("=")
        text = f", one text is {quoted}" if (quoted := to_paste(override)) and " " in values else ""
        return f"{override}: several values are a sweep, python -m grpo.train -m …; one list is {key}=[{values}]{text}"
    if isinstance(error, OverrideParseException):
        quoted = to_paste(str(error.override))
        how = f"type {quoted}, as the shell takes its quotes away" if quoted else "write key=value"
        return f"{' '.join(str(error.override).split())}: not an override ({_first_line(error)}); {how}"
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, MissingMandatoryValue):
        return f"{cause.full_key or ''}: needs a value".lstrip(": ")
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        group, _, key = str(cause.full_key).rpartition(".")
        if cause.full_key in REMOVED:
            return f"{cause.full_key}: {REMOVED[cause.full_key]}"
        if group == "train" and key in NOT_SETTABLE:
            return f"{cause.full_key}: {NOT_SETTABLE[key]}"
        if type(cause).__name__.startswith("Config"):
            plus = {
                "reward": f"; a new reward is added with a plus: +{cause.full_key}.fn=…",
                "guard": "; guard=accuracy has its options" if not cause.parent_node else "",
                "peft": f"; any other field of peft.LoraConfig is added with a plus: +{cause.full_key}=…",
            }
            places = elsewhere(key)
            guess = f"; did you mean {' or '.join(places)}?" if places else meant(cause.key, _possible_keys(cause))
            return f"{cause.full_key}: no such key{guess}{plus.get(group, '')}"
        return f"{cause.full_key}: {_wrong_value(cause)}"
    return _of_defaults(str(error))


def _of_defaults(text: str) -> str:
    """Return a line about a group that the defaults list does not have, or what Hydra says."""
    if "use +" in text:
        return f"{text.rpartition('use ')[2].strip()}: a group outside of the defaults is appended with a plus"
    if unknown := re.match(
        r"In '([^']+)': Config(?:Key|Attribute)Error .*?Key '(\w+)' not in '(\w+)'", text, re.DOTALL
    ):
        file, key, kind = unknown.groups()
        places = elsewhere(key)
        return (
            f"{file}.yaml: {key}: no such key{f'; did you mean {places[0]}?' if places else meant(key, _keys_of(kind))}"
        )
    if chosen := re.search(r"In 'task/(\w+)': Could not override 'reward@task\.tasks\.(\w+)", text):
        task, name = chosen.groups()
        return f"+task@task.tasks.{name}={task}: conf/task/{task}.yaml chooses its rewards; a mixture takes none such"
    return " ".join(text.split("\n")[:2])


def of_resolver(error: BaseException | None) -> ConfigError | None:
    """Return the error that a resolver of this project has raised, and that Hydra or OmegaConf has wrapped, if any."""
    while error and not isinstance(error, ConfigError):
        error = error.__cause__ or error.__context__
    return error if isinstance(error, ConfigError) else None


def to_paste(override: str) -> str | None:
    """Return an override as it has to be typed in a shell for its value to be text; None if it is no `key=value`.

    Hydra's grammar needs quotes around braces, brackets and other signs, and the shell needs some around those.
    """
    key, equals, value = override.partition("=")
    text = f"{key}={QuotedString(value, Quote.single).with_quotes()}"
    try:
        OverridesParser.create().parse_override(text)
    except (HydraException, OmegaConfBaseException):
        return None
    if not equals:
        return None
    if "\n" in text:
        return "$'" + text.replace("\\", r"\\").replace("'", r"\'").replace("\n", r"\n") + "'"
    return shlex.quote(text) if set(text) & set('"$`\\!') else f'"{text}"'


def _wrong_value(error: OmegaConfBaseException) -> str:
    problem = _first_line(error).removeprefix("ConfigError raised while resolving interpolation: ")
    typed = next((word for word in sys.argv if word.lstrip("+").startswith(f"{error.full_key}=")), None)
    if typed and "to string: " in problem:  # Hydra has read a list or a mapping
        problem += f"; as text it is {to_paste(typed)}"
    return problem


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0]


def _keys_of(kind: str) -> list[str]:
    """Return the keys of the group whose values are of this type, and the groups of the configuration itself."""
    if kind == "Config":
        return list(GROUPS)
    schema = ConfigStore.instance().load("schema.yaml").node
    groups = [node for node in map(schema._get_node, GROUPS) if isinstance(node, DictConfig) and node._content]
    mine = [node for node in groups if getattr(OmegaConf.get_type(node), "__name__", "") == kind]
    return [str(key) for node in mine for key in node]


def _possible_keys(error: OmegaConfBaseException) -> list[str]:
    parent = error.parent_node
    keys = [str(key) for key in parent] if isinstance(parent, DictConfig) else []
    if str(error.full_key) == str(error.key):  # at the top, a choice from a group may have been meant
        keys += [path.name for path in (ROOT / "conf").iterdir() if path.is_dir()]
    return keys
