"""The Dockerfile: its instructions, its base, its user, and the commands that it names."""

import json
import re

from grpo.config.schema import ROOT

LINES = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ").splitlines()
INSTRUCTIONS = [tuple(line.split(maxsplit=1)) for line in LINES if line.strip()]


def of(name: str) -> list[str]:
    """Return the arguments of an instruction, as often as it stands there."""
    return [arguments for instruction, arguments in INSTRUCTIONS if instruction == name]


def test_its_instructions_are_known_and_begin_with_a_base() -> None:
    known = {"FROM", "RUN", "USER", "WORKDIR", "COPY", "ARG", "ENV", "CMD"}
    assert {name for name, _ in INSTRUCTIONS} <= known
    assert INSTRUCTIONS[0][0] == "FROM"
    (base,) = of("FROM")
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-devel-ubuntu24\.04", base)


def test_its_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = [target for command in of("RUN") for target in re.findall(r"\bmake (\w+)", command)]
    program, target = json.loads(of("CMD")[0])
    assert program == "make"
    for name in (*named, target):
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name
    assert named == ["install", "vllm"]
    assert "NVIDIA" in re.findall(r"case \$\{GPU:-\} in (.*?)\)", (ROOT / "launch" / "install.sh").read_text())[0]


def test_a_user_without_rights_installs_and_runs() -> None:
    names = [name for name, _ in INSTRUCTIONS]
    assert of("USER") == ["1000"]
    assert names.index("USER") < names.index("WORKDIR") < names.index("COPY")
    assert of("COPY") == ["--chown=1000:1000 . ."]
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*", "outputs", "multirun"} <= set(ignored)
