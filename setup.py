"""The description on PyPI: README.md, whose relative links get the project's address. All else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

TREE = Path(__file__).parent
LINK = re.compile(r"(\]\(|^\[[^]\n]+\]: )(?!https?://|#)([^)\s]+)", re.MULTILINE)
"""The target of a relative link, inline or as a definition, and what stands before it."""


def with_addresses(readme: str, source: str) -> str:
    """Return *readme* for a reader without the tree, which is at *source*; pictures need the file itself."""
    raw = source.replace("//github.com", "//raw.githubusercontent.com")

    def whole(match: "re.Match[str]") -> str:
        before, target = match.groups()
        return f"{before}{f'{raw}/main/' if target.endswith('.svg') else f'{source}/blob/main/'}{target}"

    return LINK.sub(whole, readme)


if __name__ == "__main__":
    address = re.findall(r'^Source = "([^"]+)"$', (TREE / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)[
        0
    ]
    setup(
        long_description=with_addresses((TREE / "README.md").read_text(encoding="utf-8"), address),
        long_description_content_type="text/markdown",
    )
