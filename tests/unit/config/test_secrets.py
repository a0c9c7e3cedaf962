"""Secrets that are typed are refused by their names and by their forms; what only looks similar is not."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from grpo.config.secrets import is_secret, refuse_secrets, without_secrets
from grpo.extras.testing.commands import command
from grpo.utils.errors import ConfigError

HUGGING_FACE = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"[:34]
SECRETS = [
    ("reward.tokens.kwargs.api_key", "abcdef"),
    ("reward.mine.kwargs.tokens.first", "abcdef"),
    ("train.model_init_kwargs.token", "abc"),
    ("reward.judge.kwargs.api_key", "abc"),
    ("reward.judge.kwargs.apiKey", "abc"),
    ("reward.judge.kwargs.openai-api-key", "abc"),
    ("reward.mine.kwargs.key", "abc"),
    ("reward.mine.kwargs.secret", "abc"),
    ("reward.mine.kwargs.client_secret", 12345),
    ("reward.mine.kwargs.db_password", 12345),
    ("reward.mine.kwargs.headers.Authorization", "Bearer abc"),
    ("reward.mine.kwargs.anything", HUGGING_FACE),
    ("reward.mine.kwargs.anything", "sk-proj-abcdefghijklmnopqrstuv"),
    ("reward.mine.kwargs.anything", "ghp_abcdefghijklmnopqrstuvwxyz0123456789"),
    ("reward.mine.kwargs.anything", "AKIAABCDEFGHIJKLMNOP"),
    ("reward.mine.kwargs.url", "https://me:pass@example.org/v1"),
    ("reward.mine.kwargs.wandb_key", "abc"),
    ("reward.mine.kwargs.authtoken", "abc"),
    ("reward.mine.kwargs.api_tokens", "abc"),
    ("reward.mine.kwargs.secrets.wandb", "abc"),
    ("reward.mine.kwargs.url", "postgres://:pass@host/db"),
    ("reward.mine.kwargs.url", "https://host/v1?api_key=abc"),
    ("reward.mine.kwargs.token", "${oc.env:HF_TOKEN,abc}"),
    ("hydra.job.env_set.ANYTHING", f"Bearer {HUGGING_FACE}"),
]
HARMLESS = [
    ("reward.tokens.fn", "mine.py:count"),
    (".reward.api_key.kwargs.unit", "words"),
    ("+reward.password", "{fn: mine.py:count}"),
    ("task.tasks.secrets.dataset.path", "mine.jsonl"),
    ("train.max_completion_length", 5),
    ("model.eos_token", "<|im_end|>"),
    ("train.model_init_kwargs.token", True),
    ("train.model_init_kwargs.token", None),
    ("reward.judge.kwargs.api_key", "EMPTY"),
    ("reward.mine.kwargs.delimiter_token", "###"),
    ("reward.mine.kwargs.think_token", "<think>"),
    ("update.max_tokens_per_microbatch", "auto"),
    ("train.importance_sampling_level", "token"),
    ("reward.mine.kwargs.token_limit", "high"),
    ("reward.mine.kwargs.keyword", "abc"),
    ("model.model_name_or_path", "hf_internal/tiny-random-sk-model"),
    ("reward.judge.kwargs.base_url", "http://localhost:8000/v1"),
]


@pytest.mark.parametrize(("key", "value"), SECRETS)
def test_a_secret_is_refused_anywhere_and_never_printed(key: str, value: str | int) -> None:
    config = OmegaConf.create()
    OmegaConf.update(config, key, value)
    for where, typed in ((config, []), (OmegaConf.create(), [f"+{key}={value}"])):
        with pytest.raises(ConfigError, match=r"environment.*\$\{oc\.env:\w+\}") as caught:
            refuse_secrets(where, typed)
        assert str(value) not in str(caught.value)
        assert "abc" not in str(caught.value)
        assert str(caught.value).startswith(f"{key}: ")


@pytest.mark.parametrize(("key", "value"), HARMLESS)
def test_what_is_no_secret_is_not_refused(key: str, value: object) -> None:
    assert not is_secret(key, value)


def test_a_secret_comes_from_the_environment_not_from_a_default() -> None:
    refuse_secrets(OmegaConf.create({"token": ["${oc.env:HF_TOKEN}"]}), ["+a.token='${oc.env:HF_TOKEN}'"])
    refuse_secrets(
        OmegaConf.create({"Authorization": "Bearer ${oc.env:HF_TOKEN}"}), ["+a={token: '${oc.env:HF_TOKEN}'}"]
    )
    for swept in ("+a={token: abc},{token: def}", "+a={x: 1, 'api_key': abc}"):
        with pytest.raises(ConfigError, match=r"^a\.(token|api_key): "):
            refuse_secrets(OmegaConf.create(), [swept])
    with pytest.raises(ConfigError):
        refuse_secrets(OmegaConf.create({"token": f"${{oc.env:HF_TOKEN,{HUGGING_FACE}}}"}), [])


def test_what_is_written_keeps_secrets_as_interpolations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "canary")
    monkeypatch.setenv("PLACE", HUGGING_FACE)
    monkeypatch.setenv("SIZE", "5")
    kept = {"token": "${oc.env:PLACE}", "other": ["${oc.env:MY_TOKEN}", "${token}", 1], "form": "${oc.env:PLACE}"}
    config = OmegaConf.create({**kept, "size": "${oc.env:SIZE}", "twice": "${size}", "none": None})
    written = without_secrets(config)
    assert OmegaConf.to_container(written) == {**kept, "size": "5", "twice": "5", "none": None}
    assert OmegaConf.to_container(written, resolve=True) == OmegaConf.to_container(config, resolve=True)


def test_neither_an_error_nor_a_run_writes_a_secret_to_disk(tmp_path: Path) -> None:
    for line in (["+reward.correctness.kwargs.key=canary"], ["-m", "+train.model_init_kwargs.token=canary,canary2"]):
        done = command("grpo.train", *line, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("grpo.train: ")
        assert done.stderr.count("\n") == 1
        assert not list(tmp_path.iterdir())
    line = [
        "train.model_init_kwargs={token: '${oc.env:HF_TOKEN}'}",
        "+hydra.job.env_set.OTHER=${oc.env:HF_TOKEN}",
        "train.report_to=tensorboard",
        "train.save_steps=1",
        "train.max_steps=1",
        "task.dataset.size=8",
        "task.eval.size=4",
        "train.per_device_train_batch_size=8",
        "train.num_generations=4",
    ]
    done = command("grpo.train", *line, cwd=tmp_path, environment={"HF_TOKEN": "canary"})
    assert done.returncode == 0, done.stderr
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(file.name.startswith("events.out") for file in files)
    assert [file for file in files if b"canary" in file.read_bytes()] == []
