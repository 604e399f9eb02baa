"""Terminal links (OSC 8) to upstream's threads, to the pages of fixes, and to files of a vLLM.

Rich omits them if the output is no terminal, or one without colours; terminals that do not know them print the text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_graphfix.text import PAGES

if TYPE_CHECKING:
    from rich.text import Text

_VLLM = "https://github.com/vllm-project/vllm"
_THREAD = re.compile(r"\b(PR|issue) (\d+)\b")
_PLACE = re.compile(r"\b(vllm/[\w./-]+\.py)(?::(\d+))?")


def page(fix: str) -> str:
    """Return the address of the page of a fix."""
    return f"{PAGES}/fixes/{fix}.md"


def thread(kind: str, number: str) -> str:
    """Return the address of upstream's thread; *kind* is ``PR`` or ``issue``."""
    return f"{_VLLM}/{'pull' if kind == 'PR' else 'issues'}/{number}"


def linked(text: str, style: str = "", *, folder: Path | None = None) -> Text:
    """Link each of upstream's threads in *text*, and each file of the vLLM in *folder* that exists.

    A line number becomes the link's fragment. Markup in *text* is printed, not interpreted.
    """
    from rich.text import Text

    links = Text(text, style=style)
    for match in _THREAD.finditer(text):
        links.stylize(f"link {thread(*match.groups())}", *match.span())
    for match in _PLACE.finditer(text) if folder is not None else ():
        path, line = match.groups()
        file = folder / path if folder is not None else Path(path)
        if file.is_file():
            links.stylize(f"link {file.resolve().as_uri()}{f'#{line}' if line else ''}", *match.span())
    return links


def fix_name(fix: str) -> Text:
    """Return the name of a fix, in bold, linked to its page."""
    from rich.text import Text

    # A span, not the style of the whole text: the padding of a column would be a part of the link.
    return Text.assemble((fix, f"bold link {page(fix)}"))
