"""All rows on two processes: `torchrun --nproc-per-node=2 -m tests.combinations.on_two_processes FOLDER SHARD`."""

import json
import os
import sys
from pathlib import Path

from accelerate import PartialState

from tests.combinations.array import name, rows_of
from tests.combinations.features import FEATURES
from tests.combinations.trainings import check, check_sharded, saved
from tests.sharding_on_cpus import enable


def main(folder: Path, shard: str) -> None:
    """Write what went wrong with each row, or null, into `found.json`.

    Args:
        folder: shared by both.
        shard: `none` or a choice of `conf/shard`.
    """
    if shard != "none":
        enable()
        if not shard.startswith("zero"):
            os.environ.pop("DS_ACCELERATOR", None)
    for policy in FEATURES["policy"]:
        saved(policy)
    rank = PartialState(cpu=True).process_index
    found: dict[str, str | None] = {}
    for place, row in enumerate(rows_of(shard)):
        try:
            if shard == "none":
                check(row, folder / str(place))
            else:
                check_sharded(row, folder / str(place), shard)
            found[name(row)] = None
        except Exception as error:  # of this row; the others run
            found[name(row)] = f"{type(error).__name__}: {error}"[:500]
        (folder / f"found_{rank}.json").write_text(json.dumps(found, indent=1))
    if rank == 0:
        (folder / f"found_{rank}.json").rename(folder / "found.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
