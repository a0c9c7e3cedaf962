"""All rows on two processes: `torchrun --nproc-per-node=2 -m tests.combinations.on_two_processes FOLDER SHARD`."""

import json
import os
import shutil
import sys
from pathlib import Path

from accelerate import PartialState

from grpo.trainer.placement import gathered_with_its_norm
from tests.combinations.array import name, rows_of
from tests.combinations.comparisons import check, check_sharded
from tests.combinations.features import FEATURES
from tests.combinations.trainings import saved
from tests.sharding_on_cpus import enable


def main(folder: Path, shard: str) -> None:
    """Write what went wrong with each row, or null, into `found.json`; begun again, continue with the next row.

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
    state = PartialState(cpu=True)
    rank, files = state.process_index, [folder / f"found_{number}.json" for number in range(2)]
    before = [json.loads(file.read_text()) for file in files if file.exists()]  # of processes that have died
    found: dict[str, str | None] = before[rank] if len(before) == 2 else {}
    done = before[0].keys() & before[1].keys() if len(before) == 2 else set()
    state.wait_for_everyone()
    for place, row in enumerate(rows_of(shard)):
        if name(row) in done:
            continue
        shutil.rmtree(folder / str(place), ignore_errors=True)
        state.wait_for_everyone()
        try:
            if shard == "none":
                check(row, folder / str(place))
            else:
                with gathered_with_its_norm():  # for stock TRL, too: each process would keep a gradient of its own
                    check_sharded(row, folder / str(place), shard)
            found[name(row)] = None
        except Exception as error:  # of this row; the others run
            found[name(row)] = f"{type(error).__name__}: {error}"[:500]
        (folder / f"found_{rank}.json").write_text(json.dumps(found, indent=1))
    if rank == 0:
        (folder / f"found_{rank}.json").rename(folder / "found.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
