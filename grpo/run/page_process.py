"""`python -m grpo.run.page_process RUN_DIR PARENT SECONDS PORTION` writes the page of a run while its metrics grow.

It ends with the process that has started it, whose number is PARENT, and imports no PyTorch. Between two pages are at
least SECONDS, and so many that a page takes no more than PORTION of them on a processor; the first page, with which
libraries are imported, does not count.
"""

import math
import os
import signal
import sys
import time
from pathlib import Path

from grpo.utils.priority import give_way
from rewards.isolation.system import end_with_parent


def main() -> None:
    """Write pages until SIGTERM, which also the end of the parent sends."""
    run_dir, parent, seconds, portion = Path(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # an exception, so that no partial file is left
    end_with_parent(signal.SIGTERM)
    give_way()
    size, told, began = 0, False, math.inf
    while os.getppid() == parent:
        try:
            size = write_if_grown(run_dir, size)
        except Exception as error:
            if not told:
                told = True
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                print(f"the page is not written while the run runs: {reason}", file=sys.stderr, flush=True)
        time.sleep(max(seconds, (time.process_time() - began) / portion))
        began = time.process_time()


def write_if_grown(run_dir: Path, size: int) -> int:
    """Write the page if the file of metrics has another size than before, in bytes; return that which it has."""
    current = (run_dir / "metrics.jsonl").stat().st_size
    if current != size:
        from grpo.reporting.page import write_report  # its libraries, which may fail as a page may

        write_report(run_dir)
    return current


if __name__ == "__main__":
    main()
