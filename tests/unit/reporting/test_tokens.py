"""Values per token on a page."""

from pathlib import Path
from typing import Any

import pandas
import pyarrow
from pyarrow import parquet

from grpo.reporting.completions import as_data, sample
from grpo.reporting.tokens import tokens_of


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write two completions of a step, and values per token; return the file of the completions."""
    (folder / "completions").mkdir(exist_ok=True)
    table = {"step": [3, 3], "prompt": ["p", "p"], "completion": ["a b", "c"], "correct": [1.0, 0.0]}
    file = folder / "completions" / "completions_00003.parquet"
    pandas.DataFrame(table | {"advantage": [1.0, -1.0], "completion_id": [6, 7]}).to_parquet(file)
    parquet.write_table(pyarrow.Table.from_pylist(rows), file.with_name("tokens_00003.parquet"))
    return file


ROW = {
    "completion_id": 6,
    "token": ["a", " <b>"],
    "kind": ["loss", "loss"],
    "clipped": [False, True],
    "logp": [-0.123456, None],
    "entropy": [1.0, 2.0],
    "advantage": [0.5, 0.5],
    "ratio": [1.0, 1.0],
}


def test_a_value_that_all_tokens_have_stands_there_once(tmp_path: Path) -> None:
    assert tokens_of(write(tmp_path, [ROW])) == {
        6: {
            "token": ["a", " <b>"],
            "logp": [-0.123, None],
            "entropy": [1.0, 2.0],
            "advantage": 0.5,
            "ratio": 1.0,
            "clipped": [False, True],
            "kind": "loss",
        }
    }


def test_the_page_has_them_at_their_completion(tmp_path: Path) -> None:
    write(tmp_path, [ROW])
    found = sample(tmp_path, {"correct": 1.0}, "correct")
    first, second = found["steps"][0]["groups"][0]["completions"]
    assert found["tokens"]
    assert first["values"]["token"] == ["a", " <b>"]
    assert "values" not in second
    assert "<" not in as_data(found)


def test_a_file_that_was_not_completed_is_not_there(tmp_path: Path) -> None:
    file = write(tmp_path, [ROW])
    tokens = file.with_name("tokens_00003.parquet")
    tokens.write_bytes(tokens.read_bytes()[:60])
    assert tokens_of(file) == {}
    tokens.unlink()
    assert not sample(tmp_path, {"correct": 1.0}, "correct")["tokens"]
