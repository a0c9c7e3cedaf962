"""All rows on two processes: `torchrun --nproc-per-node=2 -m tests.combinations.on_two_processes FOLDER`."""

import json
import sys
from pathlib import Path

from accelerate import PartialState

from tests.combinations.array import name, rows
from tests.combinations.features import FEATURES
from tests.combinations.trainings import check, saved


def main(folder: Path) -> None:
    """Write what went wrong with each row, or null, into `found.json`."""
    for policy in FEATURES["policy"]:
        saved(policy)
    rank = PartialState(cpu=True).process_index
    found: dict[str, str | None] = {}
    for place, row in enumerate(rows()):
        try:
            check(row, folder / str(place))
            found[name(row)] = None
        except Exception as error:  # of this row; the others run
            found[name(row)] = f"{type(error).__name__}: {error}"[:500]
        (folder / f"found_{rank}.json").write_text(json.dumps(found, indent=1))
    if rank == 0:
        (folder / f"found_{rank}.json").rename(folder / "found.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
