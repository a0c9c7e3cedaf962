"""The logs of all trainers and trackers become the same steps and completions."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo.extras.doctor.read import read
from grpo.utils.errors import ConfigError
from tests.unit.extras.doctor import logs


@pytest.mark.parametrize("write", logs.FORMATS, ids=lambda write: write.__name__)
def test_a_format_has_the_steps_that_were_logged(tmp_path: Path, write: Callable) -> None:
    rows = logs.learning(12)
    history, run = read(write(tmp_path, rows))
    assert run is None
    assert [row["step"] for row in history.steps] == [row["step"] for row in rows]
    names = {"reward", "entropy", "grad_norm", "learning_rate", "loss"}
    names |= {name for name in rows[0] if name.startswith("completions/")}
    names |= set() if write in (logs.verl, logs.verl_lines) else {"rewards/correct/mean", "reward_std"}
    for name in names:
        for row, expected in zip(history.steps, rows, strict=True):
            assert row[name] == pytest.approx(expected[name], rel=1e-3), name


def test_a_file_is_read_as_its_directory_is(tmp_path: Path) -> None:
    rows = logs.learning(12)
    for write, name in ((logs.trl, "trainer_state.json"), (logs.swift, "logging.jsonl"), (logs.verl, "train.log")):
        folder = tmp_path / write.__name__
        folder.mkdir()
        assert read(write(folder, rows) / name)[0].steps == read(folder)[0].steps
    (tmp_path / "renamed").write_bytes((tmp_path / "verl" / "train.log").read_bytes())
    assert read(tmp_path / "renamed")[0].steps == read(tmp_path / "verl")[0].steps


def test_the_newest_checkpoint_has_the_steps(tmp_path: Path) -> None:
    for steps in (8, 16, 100):
        (tmp_path / f"checkpoint-{steps}").mkdir()
        logs.trl(tmp_path / f"checkpoint-{steps}", logs.learning(steps))
    logs.write_tables(tmp_path)
    assert len(read(tmp_path)[0].steps) == 100
    history, _ = read(tmp_path / "checkpoint-16")
    assert (len(history.steps), len(history.completions)) == (16, 160)
    logs.trl(tmp_path, logs.learning(101))
    assert len(read(tmp_path)[0].steps) == 101, "the state of the end"


def test_logs_below_the_directory_have_their_completions(tmp_path: Path) -> None:
    folder = tmp_path / "output" / "v0-20261130"
    (folder / "checkpoint-8").mkdir(parents=True)
    logs.trl(folder / "checkpoint-8", logs.learning(8))
    history, _ = read(logs.write_tables(logs.swift(folder, logs.learning(12))).parent)
    assert (len(history.steps), len(history.groups)) == (12, 40), "ms-swift's own log, which is longer"


def test_rounded_numbers_of_verl_are_no_zeros(tmp_path: Path) -> None:
    lines = [logs.verl_line(row, "{:.3f}") for row in logs.learning(12, entropy=0.0)]
    (tmp_path / "train.log").write_text("\n".join(lines))
    history, _ = read(tmp_path)
    assert "actor/lr:0.000" in lines[0]
    assert all("learning_rate" not in row and row["entropy"] == 0 for row in history.steps)


def test_equal_extremes_of_verl_are_a_spread_of_0(tmp_path: Path) -> None:
    ends = "critic/rewards/max:{0} - critic/rewards/min:0.5 - critic/advantages/max:{1} - critic/advantages/min:0.0"
    lines = [
        f"step:{step} - critic/rewards/mean:0.5 - {ends.format(*high)}"
        for step, high in ((1, (0.5, 0.0)), (2, (1.0, 1.0)))
    ]
    (tmp_path / "train.log").write_text("\n".join(lines))
    equal, different = read(tmp_path)[0].steps
    assert (equal["reward_std"], equal["frac_reward_zero_std"]) == (0.0, 1.0)
    assert not {"reward_std", "frac_reward_zero_std"} & different.keys()


def test_metrics_of_the_engine_have_common_names(tmp_path: Path) -> None:
    (tmp_path / "logging.jsonl").write_text('{"rollout_correction/k3_kl": 0.01, "reward": 1, "iteration": "3/9"}\n')
    assert read(tmp_path)[0].steps == [{"step": 3, "rollout_corr/k3_kl": 0.01, "reward": 1.0}]
    (tmp_path / "logging.jsonl").write_text('{"rollout_corr/rollout_is_mean": 1.2, "reward": 1, "step": 3}\n')
    assert read(tmp_path)[0].steps[0]["sampling/importance_sampling_ratio/mean"] == 1.2


def test_missing_and_broken_values_are_kept_apart(tmp_path: Path) -> None:
    logs.trl(tmp_path, logs.learning(12, reward=lambda place: None if place else math.nan))
    history, _ = read(tmp_path)
    assert math.isnan(history.steps[0]["reward"])
    assert history.steps[1]["reward"] is None
    assert history.values("reward") == []


def test_a_repeated_step_has_its_last_values(tmp_path: Path) -> None:
    lines = [{"step": 1, "reward": 0.1, "kl": 1.0}, {"step": 2, "reward": 0.2}, {"step": 1, "reward": 0.3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "rew')
    assert read(tmp_path)[0].steps == [{"step": 1, "reward": 0.3, "kl": 1.0}, {"step": 2, "reward": 0.2}]


def test_tables_of_trl_are_groups(tmp_path: Path) -> None:
    history, _ = read(logs.write_tables(logs.trl(tmp_path, logs.learning(12)), messages=lambda group, place: 7.0))
    assert len(history.groups) == 5 * 8
    assert {len(group) for group in history.groups} == {4}
    assert history.groups[0][0].rewards == {"correct": 0.0}, "by the metrics, of all columns of numbers"


def test_tables_of_ms_swift_and_rollouts_of_verl_are_groups(tmp_path: Path) -> None:
    by_trl = read(logs.write_tables(tmp_path / "trl"))[0]
    frames = [logs.table(step) for step in range(1, 6)]
    (tmp_path / "swift").mkdir()
    lines = [frame.rename(columns={"advantage": "advantages"}).to_dict("list") for frame in frames]
    lines = [line | {"step": [str(step) for step in line["step"]]} for line in lines]
    (tmp_path / "swift" / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read(tmp_path / "swift")[0].groups == by_trl.groups
    (tmp_path / "verl" / "rollouts").mkdir(parents=True)
    for step, frame in enumerate(frames, 1):
        columns = {"prompt": "input", "completion": "output", "correct": "score"}
        rows = frame.rename(columns=columns).drop(columns="advantage").to_dict("records")
        text = "".join(json.dumps(row | {"gts": "7"}) + "\n" for row in rows)
        (tmp_path / "verl" / "rollouts" / f"{step}.jsonl").write_text(text)
    history, _ = read(tmp_path / "verl")
    assert [[row.text for row in group] for group in history.groups] == [
        [row.text for row in group] for group in by_trl.groups
    ]
    assert history.groups[0][1].rewards == {"score": 1.0}


def test_tables_alone_have_the_metrics_of_their_rewards(tmp_path: Path) -> None:
    history, _ = read(logs.write_tables(tmp_path))
    assert [row["step"] for row in history.steps] == [1, 2, 3, 4, 5]
    assert history.steps[0]["reward"] == history.steps[0]["rewards/correct/mean"] == 0.5
    empty = {"tool": lambda group, place: None, "name": lambda group, place: "7"}
    assert read(logs.write_tables(tmp_path / "extra", **empty))[0].rewards == ["correct"]
    missing, _ = read(logs.write_tables(tmp_path / "none", correct=lambda group, place: math.nan))
    assert missing.steps[0]["reward"] is None


def test_repeated_tables_count_once(tmp_path: Path) -> None:
    logs.write_tables(tmp_path, prompt=lambda group, place: f"problem {group}")
    assert len(read(tmp_path)[0].groups) == 8


def test_a_torn_table_is_noted(tmp_path: Path) -> None:
    logs.write_tables(tmp_path)
    file = tmp_path / "completions" / "completions_00002.parquet"
    file.write_bytes(file.read_bytes()[:500])
    history, _ = read(tmp_path)
    assert len(history.groups) == 4 * 8
    assert history.notes == [f"skipped: {file} is torn, or holds no completions"]


def test_conversations_are_compared_by_their_contents(tmp_path: Path) -> None:
    logs.write_tables(tmp_path, completion=lambda group, place: [{"role": "assistant", "content": f"{place}"}])
    assert [row.text for row in read(tmp_path)[0].groups[0]] == ["0", "1", "2", "3"]


def test_a_torn_event_file_has_its_complete_events(tmp_path: Path) -> None:
    (file,) = logs.tensorboard(tmp_path, logs.learning(12)).rglob("*tfevents*")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert 3 <= len(read(tmp_path)[0].steps) < 12


def written(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def two_runs(folder: Path) -> Path:
    for name in ("a", "b"):
        (folder / name).mkdir()
        logs.trl(folder / name, logs.learning(12))
    return folder


def two_logs(folder: Path) -> Path:
    logs.verl_lines(folder, logs.learning(12)).joinpath("experiment.jsonl").rename(folder / "other.jsonl")
    return logs.verl_lines(folder, logs.learning(12))


def two_charts(folder: Path) -> Path:
    logs.chart(folder, [{"step": 1, "reward": 0.5}], "a").joinpath("wandb_export_0.csv").rename(folder / "a.csv")
    return logs.chart(folder, [{"step": 1, "reward": 0.7}], "b")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda folder: folder / "nothing", "no such file or directory; name trainer_state.json"),
        (lambda folder: folder, "an empty directory"),
        (written("state.json", b'{"a": 1}'), "no list log_history"),
        (written("state.json", b"[1, 2]"), "no list log_history"),
        (written("trainer_state.json", b'{"log_history": [{"st'), "torn, or not JSON"),
        (written("trainer_state.json", b"[" * 100_000), "torn, or not JSON"),
        (written("trainer_state.json", b"\xff\xfe\x00"), "torn, or not JSON"),
        (written("x.parquet", b"PAR1 and no more"), "torn, or no table"),
        (written("x.bin", bytes(range(256)) * 9), "neither text nor a known format"),
        (written("events.out.tfevents.1", bytes(range(256)) * 9), "no step of a run in it"),
        (written("x.csv", b"a,b\n1,2\n"), "no step of a run in it"),
        (written("x.csv", b"\xff\xfe\x00\x01"), "cannot be read as CSV"),
        (written("x.csv", b"Step,a - reward,b - reward\n1,2,3\n"), "2 runs, 'a' and 'b' among them"),
        (written("notes.txt", b"hello\n"), "no step of a run in it"),
        (written("x.jsonl", b'{"step": 1, "loss": 0.5}\n'), "none of GRPO's metrics"),
        (lambda folder: logs.trl(folder, []), "no step of a run in it"),
        (two_runs, "2 runs, such as .*a/trainer_state.json and .*b/trainer_state.json; name one of them"),
        (two_logs, "2 runs, such as .*experiment.jsonl and .*other.jsonl"),
        (two_charts, "several files with reward, of several runs"),
    ],
)
def test_other_input_is_refused(tmp_path: Path, write: Callable, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read(write(tmp_path))
    assert "\n" not in str(raised.value)
