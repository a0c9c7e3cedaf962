"""`python -m grpo.train`, whose page is written every second from the first step on.

The process that writes it has the usual priority: other tests may want all cores, and leave an idle process none.
"""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from grpo.run import live_page

PROCESS = "from grpo.run import page_process as page; page.give_way = lambda: None; page.main()"


def start(line: list[str], **options: Any) -> subprocess.Popen:
    place = line.index("grpo.run.page_process")
    return subprocess.Popen([sys.executable, "-c", PROCESS, *line[place + 1 :]], **options)


if __name__ == "__main__":
    live_page.EVERY, live_page.PORTION = 1.0, 1.0
    live_page.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": start})
    from grpo.train import main

    main()
