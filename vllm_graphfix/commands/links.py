"""Links from what output names to upstream's threads, to the page of a fix, and to places in a vLLM (OSC 8).

Rich leaves them out where output is no terminal, or one without colours; terminals that do not know them show the text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

PAGES = "https://github.com/vllm-graphfix/vllm-graphfix/blob/main/docs"
"""The address of the folder `docs/`: that of Source in pyproject.toml, and the main branch."""
_VLLM = "https://github.com/vllm-project/vllm"
_THREAD = re.compile(r"\b(PR|issue) (\d+)\b")
_PLACE = re.compile(r"\b(vllm/[\w./-]+\.py)(?::(\d+))?")


def page(fix: str) -> str:
    """The address of the page of a fix."""
    return f"{PAGES}/fixes/{fix}.md"


def thread(kind: str, number: str) -> str:
    """The address of upstream's thread: *kind* is ``PR`` or ``issue``."""
    return f"{_VLLM}/{'pull' if kind == 'PR' else 'issues'}/{number}"


def linked(text: str, style: str = "", *, folder: Path | None = None) -> Text:
    """*text* with a link on each thread of upstream, and on each file of the vLLM in *folder*; nothing in it is markup.

    A file is linked only where it exists, with its line as the fragment.
    """
    from rich.text import Text

    found = Text(text, style=style)
    for match in _THREAD.finditer(text):
        found.stylize(f"link {thread(*match.groups())}", *match.span())
    for match in _PLACE.finditer(text) if folder is not None else ():
        path, line = match.groups()
        file = folder / path if folder is not None else Path(path)
        if file.is_file():
            found.stylize(f"link {file.resolve().as_uri()}{f'#{line}' if line else ''}", *match.span())
    return found


def fix_name(fix: str) -> Text:
    """The name of a fix, in bold, linked to its page."""
    from rich.text import Text

    return Text.assemble((fix, f"bold link {page(fix)}"))  # as a part of it: what fills a column is no link
