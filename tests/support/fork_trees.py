"""Trees as a maintainer or a fork would leave them: files moved, names changed, code put elsewhere."""

from __future__ import annotations

import ast
import builtins
import functools
import keyword
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from edited import stock_source
from stock import release_root
from vllm_graphfix import manifest
from vllm_graphfix.fix import Diagnosis, Fix, Verdict
from vllm_graphfix.fixes import BY_NAME, FIXES, module_of
from vllm_graphfix.source.files import Source
from vllm_graphfix.source.functions import Function

T = TypeVar("T")
SEED = 47
RELEASES = ("0.18.1", "0.21.0", "0.25.1", "0.29.0", "0.33.0")
HONEST_WITH_THE_DEFECT = {Verdict.AFFECTED, Verdict.UNRECOGNISED}
_MOST = 40
"""Identifiers of one fix on one release; those that its patterns name most often come first."""


class ForkTree:
    """A stock release with other texts in some files; nothing is written to disk."""

    def __init__(self, release: str) -> None:
        self.release = release
        self._root = release_root(release)
        self.changed: dict[str, str | None] = {}
        self._judged: tuple[dict[str, str | None], Source] | None = None

    def text(self, path: str) -> str | None:
        if path in self.changed:
            return self.changed[path]
        file = self._root / path
        return file.read_text() if file.is_file() else None

    def put(self, path: str, text: str | None) -> None:
        """Set the text of *path*; None takes the file away. Raises SyntaxError where *text* is no Python."""
        if text is not None:
            ast.parse(text)
        self.changed[path] = text

    def replace(self, path: str, old: str, new: str) -> None:
        """Replace *old*, which has to be there once. Raises LookupError."""
        text = self.text(path) or ""
        if text.count(old) != 1:
            raise LookupError(f"{path} of {self.release} has this {text.count(old)} times: {old[:60]!r}")
        self.put(path, text.replace(old, new))

    def move(self, path: str, to: str, paths: tuple[str, ...]) -> None:
        """Move the file *path*, and adjust the imports of it in *paths*."""
        text = self.text(path)
        self.put(path, None)
        self.put(to, text)
        old, new = (each.removesuffix(".py").replace("/", ".") for each in (path, to))
        (package, _, name), (_, _, new_name) = old.rpartition("."), new.rpartition(".")
        for each in paths:
            before = self.text(each)
            if each != path and before is not None:
                after = re.sub(rf"\b{re.escape(old)}\b", new, before)
                after = re.sub(rf"(from {re.escape(package)} import (?:\([^)]*?)?\b){name}\b", rf"\1{new_name}", after)
                if after != before:
                    self.put(each, after)

    def rename(self, word: str, to: str, paths: tuple[str, ...]) -> bool:
        """Rename the identifier *word* in *paths*; tell whether it was there."""
        there = False
        for path in paths:
            before = self.text(path)
            after = re.sub(rf"\b{word}\b", to, before) if before is not None else None
            if after != before:
                there = True
                self.put(path, after)
        return there

    def verdict(self, fix: str) -> Diagnosis:
        """Return the plugin's diagnosis of it."""
        return manifest.diagnose(BY_NAME[fix], self.source())

    def source(self) -> Source:
        """Return one source for all fixes until something changes: they share what is parsed and searched."""
        if self._judged is None or self._judged[0] != self.changed:
            self._judged = dict(self.changed), self._opened()
        return self._judged[1]

    def _opened(self) -> Source:
        def read(path: str) -> bytes | None:
            if path in self.changed:
                text = self.changed[path]
                return None if text is None else text.encode()
            file = self._root / path
            return file.read_bytes() if file.is_file() else None

        def sizes() -> dict[str, int]:
            changed = {path: text for path, text in self.changed.items() if text is not None}
            stock = stock_source(self._root).sizes
            there = {path: size for path, size in stock.items() if path not in self.changed}
            return there | {path: len(text.encode()) for path, text in changed.items()}

        return Source(f"a fork of {self.release}", read, lambda: None, list_sizes=sizes)


@functools.cache
def stock_verdict(fix: str, release: str) -> Verdict:
    verdict: Verdict = _stock(release).verdict(fix).verdict
    return verdict


@functools.lru_cache(maxsize=1)
def _stock(release: str) -> ForkTree:
    return ForkTree(release)


@functools.cache
def all_paths() -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for fix in FIXES for path in fix.inspected_files))


def moves(release: str) -> list[str]:
    """Return each file that a fix which *release* is affected by inspects, in an order that the seed gives."""
    paths = dict.fromkeys(path for fix in _affected(release) for path in fix.inspected_files)
    return _shuffled(release, [each for each in paths if _is_moved(release, each)])


def _is_moved(release: str, path: str) -> bool:
    return (release_root(release) / path).is_file() and not path.endswith("__init__.py")


def renames(release: str) -> list[tuple[str, str]]:
    """Return each fix that *release* is affected by, and identifier that its patterns name, in an order of the seed."""
    return _shuffled(
        release, [(fix.name, word) for fix in _affected(release) for word in identifiers(fix.name, release)]
    )


def _shuffled(release: str, some: list[T]) -> list[T]:
    random.Random(f"{SEED} {release}").shuffle(some)  # noqa: S311 - to choose the same again
    return some


def _affected(release: str) -> Iterator[Fix]:
    return (fix for fix in FIXES if stock_verdict(fix.name, release) is Verdict.AFFECTED)


@functools.cache
def identifiers(fix: str, release: str) -> tuple[str, ...]:
    """The identifiers of vLLM that the diagnosis of *fix* names, in patterns, slices and function names."""
    own = module_of(fix).FIX
    words = {word for part in own.surroundings for word in (*part.names.split(), *part.function.split("."))}
    with _patterns_heard(words):
        own.diagnose(_stock(release).source())
    others = {*keyword.kwlist, *vars(builtins), *dir(torch), *dir(torch.Tensor), *dir(torch.cuda), "self", "super", ""}
    texts = ((_stock(release).text(path) or "") for path in own.inspected_files)
    counted = Counter(word for text in texts for word in re.findall(r"\w+", text))
    there = {word: counted[word] for word in words - others if not word.startswith("__")}
    return tuple(sorted((word for word, times in there.items() if times), key=lambda word: (-there[word], word)))[
        :_MOST
    ]


_MATCHING = (
    "find",
    "find_unique",
    "find_each",
    "call_has_keyword",
    "arguments",
    "used_only_in",
    "contains_name",
    "assigned",
    "assignments",
)
"""Methods of `Function` that take patterns or names."""


class _patterns_heard:  # noqa: N801 - used as a function
    """Adds to *words* the identifiers of each pattern that a function is asked for."""

    def __init__(self, words: set[str]) -> None:
        self._words = words
        self._stock: dict[str, Callable[..., object]] = {}

    def __enter__(self) -> None:
        words = self._words
        for name in _MATCHING:
            stock = self._stock[name] = vars(Function)[name]

            def heard(self: Function, *args: object, stock: Callable[..., object] = stock, **kwargs: object) -> object:
                for pattern in args:
                    if isinstance(pattern, str):
                        words.update(re.findall(r"[^\W\d]\w*", pattern))
                return stock(self, *args, **kwargs)

            setattr(Function, name, heard)

    def __exit__(self, *_: object) -> None:
        for name, stock in self._stock.items():
            setattr(Function, name, stock)


def dishonest_moves(release: str, chosen: list[str]) -> tuple[int, list[str]]:
    """Return the number of verdicts on *chosen* moves, and those that are an all-clear with the defect there."""
    tried, dishonest = 0, []
    for path in chosen:
        tree = ForkTree(release)
        tree.move(path, f"{path.removesuffix('.py')}_impl.py", all_paths())
        for fix in _affected(release):
            if path in fix.inspected_files:
                tried += 1
                verdict = tree.verdict(fix.name)
                if verdict.verdict not in HONEST_WITH_THE_DEFECT or verdict.known:
                    dishonest.append(f"{release}, {path} moved: {fix.name} {verdict.verdict.value}")
    return tried, dishonest


def dishonest_renames(release: str, chosen: list[tuple[str, str]]) -> tuple[int, list[str]]:
    """The same of *chosen* identifiers, each renamed in all files that its fix inspects."""
    tried, dishonest = 0, []
    for fix, word in chosen:
        tree = ForkTree(release)
        if tree.rename(word, f"{word}_renamed", BY_NAME[fix].inspected_files):
            tried += 1
            verdict = tree.verdict(fix)
            if verdict.verdict not in HONEST_WITH_THE_DEFECT:
                dishonest.append(f"{release}, {word} renamed: {fix} {verdict.verdict.value}")
    return tried, dishonest
