"""Copies of a stock release with one file edited: links to everything else, bytecode included."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

from trial_rows import Edit
from vllm_graphfix.source.files import Source, open_source

Change = Callable[[str], str]
"""A change of the text of a file; LookupError where it has nothing to change."""


def edited(stock: Path, destination: Path, changes: dict[str, Change], *, anonymous: bool = True) -> Path:
    """A vLLM in *destination*, a new folder, that is *stock* but for the files that *changes* rewrites.

    Anonymous: without the metadata and the file that would tell the version.
    """
    destination.mkdir(parents=True)
    link(stock.resolve(), destination, {Path(path).parts for path in changes})
    for path, text in _texts(stock, changes).items():
        (destination / path).parent.mkdir(exist_ok=True)
        (destination / path).write_text(text)
    if anonymous:
        for metadata in destination.glob("vllm-*.dist-info"):
            metadata.unlink()
        (destination / "vllm" / "_version.py").unlink(missing_ok=True)
    return destination


def edited_source(stock: Path, changes: dict[str, Change]) -> Source:
    """Return the source of a vLLM that `edited` would make: for a diagnosis alone no tree is made."""
    texts = {path: text.encode() for path, text in _texts(stock, changes).items()}
    unchanged = stock_source(stock)
    return Source(
        "edited",
        lambda path: texts[path] if path in texts else unchanged.read(path),
        lambda: None,
        list_sizes=lambda: unchanged.sizes | {path: len(text) for path, text in texts.items()},
    )


@functools.cache
def stock_source(stock: Path) -> Source:
    """Return the source of a release as it is, for all tests: its files are listed, read and searched once."""
    return open_source(stock)


def _texts(stock: Path, changes: dict[str, Change]) -> dict[str, str]:
    """The new text of each file. Raises LookupError where nothing was changed."""
    texts = {}
    for path, change in changes.items():
        before = (stock / path).read_text() if (stock / path).exists() else ""
        texts[path] = change(before)
        if texts[path] == before:
            raise LookupError(f"{path} of {stock.name}: nothing was edited")
    return texts


def link(stock: Path, destination: Path, excluded: set[tuple[str, ...]]) -> None:
    """Links what is in *stock*; folders on the way to a file that is left out, and the package itself, are made.

    So are their folders of bytecode, of links: Python replaces one of these by a file where it compiles anew, and so
    writes nothing into the release; and what is as in the release it need not compile.
    """
    destination.mkdir(parents=True, exist_ok=True)
    for child in stock.iterdir():
        below = {parts[1:] for parts in excluded if parts[0] == child.name}
        if () in below:
            continue
        if child.name == "__pycache__":
            link(child, destination / child.name, set())
        elif child.is_dir() and (any(below) or child.name == "vllm"):
            link(child, destination / child.name, below)
        else:
            (destination / child.name).symlink_to(child)


def cut(*patterns: str) -> Change:
    """Cuts each match of *patterns*, which must occur."""

    def change(text: str) -> str:
        for pattern in patterns:
            text, count = re.subn(pattern, "", text, flags=re.MULTILINE)
            if not count:
                raise LookupError(pattern)
        return text

    return change


def swap(pattern: str, replacement: str | Callable[[re.Match[str]], str]) -> Change:
    def change(text: str) -> str:
        changed, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if not count:
            raise LookupError(pattern)
        return changed

    return change


def both(*changes: Change) -> Change:
    """One after the other."""
    return lambda text: functools.reduce(lambda changed, change: change(changed), changes, text)


def changes(edit: Edit) -> dict[str, Change]:
    """Return the change that a trial's edit makes to each file."""
    by_path: dict[str, Change] = {}
    for path, pattern, replacement in ((edit.path, edit.pattern, edit.replacement), *edit.also):
        change = swap(pattern, replacement)
        by_path[path] = both(by_path[path], change) if path in by_path else change
    return by_path


def before(pattern: str, *lines: str) -> Change:
    """*lines* in front of each line that matches *pattern*, which takes no indentation, as deep as that."""
    inserted = "".join(rf"\1{line}\n" for line in lines)
    return swap(rf"^( *)(?={pattern})", inserted + r"\1")


def after(pattern: str, *lines: str) -> Change:
    """The same behind it."""
    return swap(rf"^( *)({pattern}.*)\n", r"\1\2\n" + "".join(rf"\1{line}\n" for line in lines))
