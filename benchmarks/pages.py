"""Parts of the documentation that a command writes, between two comments."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
END = "<!-- end of this part -->\n"


def with_part(page: Path, module: str, text: str) -> str:
    """Return a page with the part that `python -m module` writes, which has to be marked there, replaced by a text."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- python -m {module} writes this part -->\n")
    assert begin, f"{page} has no part of {module}"
    return f"{before}{begin}\n{text}\n{END}{rest.partition(END)[2]}"


def write_part(page: Path, module: str, text: str) -> None:
    """Replace the part of a page that `python -m module` writes."""
    page.write_text(with_part(page, module, text), encoding="utf-8")
