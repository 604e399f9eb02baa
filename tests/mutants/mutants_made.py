"""A mutant: what it is made of, and which edits are carried out. Its text is made when it is wanted."""

from __future__ import annotations

import ast
import hashlib
import io
import re
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from mutants import edits
from mutants_draft import Draft, Edit
from stock import release_root

if TYPE_CHECKING:
    from edited import Change

Target = tuple[str, str]
"""Path and qualified name."""


class Base(NamedTuple):
    """A vLLM that mutants are made of: a stock release, or one with the remedy cut out or written in."""

    release: str
    kind: str
    changes: tuple[tuple[str, Change], ...] = ()
    remedy: tuple[tuple[str, Change], ...] = ()
    """What upstream's correction is in this very code; the judge of what is right, where stock and patched are both
    wrong."""

    def text(self, path: str, *, remedied: bool = False) -> str:
        return _text(self, path, remedied)

    @property
    def name(self) -> str:
        return f"{self.release} {self.kind}"


@cache
def _text(base: Base, path: str, remedied: bool) -> str:
    file = release_root(base.release) / path
    text = file.read_text() if file.is_file() else ""
    for changed, change in (*base.changes, *(base.remedy if remedied else ())):
        if changed == path:
            text = change(text)
    return text


@cache
def parsed(base: Base, path: str, remedied: bool) -> ast.Module:
    return ast.parse(_text(base, path, remedied))


class Step(NamedTuple):
    path: str
    qualname: str
    kind: str
    label: str


class Mutant(NamedTuple):
    fix: str
    base: Base
    paths: tuple[str, ...] = ()
    """The files that may refer to each other by renamed words."""
    steps: tuple[Step, ...] = ()
    by_hand: tuple[tuple[str, Change], ...] = ()
    moved: tuple[tuple[str, str], ...] = ()
    """Path and text of new files."""
    renamed_by_hand: tuple[tuple[str, str], ...] = ()
    name: str = ""
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.fix} | {self.base.name} | {self.name}"

    def files(self, *, remedied: bool = False) -> dict[str, str]:
        """Text of each file that is not the base's, the base's own changes included.

        Raises LookupError where an edit has no place.
        """
        return _files(self, remedied)[0]

    def renamed(self) -> dict[str, str]:
        return _files(self, False)[1] | dict(self.renamed_by_hand)


def find(tree: ast.Module, qualname: str) -> tuple[ast.FunctionDef, str | None]:
    scope: ast.AST = tree
    owner = None
    for name in qualname.split("."):
        if isinstance(scope, ast.ClassDef):
            owner = scope.name
        children = [child for child in getattr(scope, "body", ()) if getattr(child, "name", None) == name]
        if not children:
            raise LookupError(qualname)
        scope = children[-1]
    assert isinstance(scope, ast.FunctionDef)
    return scope, owner


def _bound(tree: ast.Module) -> frozenset[str]:
    """Names of the module, of methods and of attributes that its methods set."""
    words: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            words.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            words.add(node.name)
    words.update(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
    for node in tree.body:
        if isinstance(node, ast.Assign):
            words.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return frozenset(words)


def draft_of(base: Base, path: str, qualname: str, *, remedied: bool = False) -> Draft:
    tree = parsed(base, path, remedied)
    node, owner = find(tree, qualname)
    return Draft(node, owner, _module_names(base, path, remedied))


@cache
def _module_names(base: Base, path: str, remedied: bool) -> frozenset[str]:
    return _bound(parsed(base, path, remedied))


def drafts(mutant: Mutant, *, remedied: bool = False) -> dict[Target, Draft]:
    """Each function that the steps edit, edited. LookupError where a step finds no place."""
    return _drafts(mutant.base, mutant.steps, remedied)


@lru_cache(maxsize=8)
def _drafts(base: Base, steps: tuple[Step, ...], remedied: bool) -> dict[Target, Draft]:
    by_target: dict[Target, Draft] = {}
    for step in steps:
        target = (step.path, step.qualname)
        try:
            if target not in by_target:
                by_target[target] = draft_of(base, *target, remedied=remedied)
                edits_of_kind(base, *target, step.kind, remedied)[step.label](by_target[target])
            else:
                edits(step.kind, by_target[target])[step.label](by_target[target])
        except (KeyError, AttributeError, IndexError, ValueError, TypeError, AssertionError, SyntaxError) as error:
            raise LookupError(f"{step}: {error}") from error
        ast.fix_missing_locations(by_target[target].node)
    return by_target


@cache
def edits_of_kind(base: Base, path: str, qualname: str, kind: str, remedied: bool) -> dict[str, Edit]:
    """They are about places by number, and do for every copy of the function."""
    return edits(kind, draft_of(base, path, qualname, remedied=remedied))


def _indented(statements: list[ast.stmt], width: int) -> str:
    text = "\n\n".join(ast.unparse(ast.fix_missing_locations(statement)) for statement in statements)
    return textwrap.indent(text, " " * width) + "\n"


def _files(mutant: Mutant, remedied: bool) -> tuple[dict[str, str], dict[str, str]]:
    base = mutant.base
    made = drafts(mutant, remedied=remedied)
    texts = {
        path: base.text(path, remedied=remedied) for path, _ in (*base.changes, *(base.remedy if remedied else ()))
    }
    renamed: dict[str, str] = {}
    for path in dict.fromkeys(path for path, _ in made):
        texts[path] = _spliced(base, path, made, remedied)
    for (edited, qualname), draft in made.items():
        for path in mutant.paths if draft.calls else ():
            before = texts.get(path) or base.text(path, remedied=remedied)
            after = _with_calls_changed(before, qualname, draft)
            if after != before:
                texts[path] = after
        renamed |= draft.renamed
        assert edited in texts
    for path, change in mutant.by_hand:
        texts[path] = change(texts.get(path) or base.text(path, remedied=remedied))
    texts |= dict(mutant.moved)
    if renamed:
        words = re.compile(rf"\b({'|'.join(map(re.escape, renamed))})\b")
        for path in mutant.paths:
            before = texts.get(path) or base.text(path, remedied=remedied)
            after = words.sub(lambda match: renamed[match.group()], before)
            if after != before:
                texts[path] = after
    return texts, renamed


def _spliced(base: Base, path: str, made: Mapping[Target, Draft], remedied: bool) -> str:
    lines = base.text(path, remedied=remedied).splitlines(keepends=True)
    end = ""
    parts = []
    for (edited, qualname), draft in made.items():
        if edited == path:
            node, _ = find(parsed(base, path, remedied), qualname)
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            parts.append((first, node.end_lineno or first, node.col_offset, draft))
    for first, last, width, draft in sorted(parts, key=lambda part: -part[0]):
        lines[first - 1 : last] = [_indented([*draft.beside, draft.node, *draft.behind], width)]
        if draft.appended:
            end += "\n\n" + _indented(draft.appended, 0)
    return "".join(lines) + end


def _with_calls_changed(text: str, qualname: str, draft: Draft) -> str:
    """*text* with every call of the function changed as the draft wants it, but for those in the function itself."""
    name = qualname.rsplit(".", 1)[-1]
    name = {"__init__": draft.owner or name}.get(name, name)
    if f"{name}(" not in text:
        return text
    calls = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and (getattr(node.func, "attr", None) or getattr(node.func, "id", None)) == name
    ]
    lines = text.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    content = text.encode()
    for node in sorted(calls, key=lambda node: (-node.lineno, -node.col_offset)):
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        for change in draft.calls:
            change(node)
        content = content[:start] + ast.unparse(ast.fix_missing_locations(node)).encode() + content[stop:]
    return content.decode()


def fingerprint(mutant: Mutant) -> str:
    """The same for mutants that come to the same syntax trees, in whichever release."""
    if not mutant.steps:
        files = mutant.files()
        return _hash(
            repr(
                [
                    (path, _changed(mutant.base.text(path), files[path]))
                    for path in sorted(files)
                    if path not in dict(mutant.moved)
                ]
            )
        )
    return _hash(repr(_trees(mutant.base, mutant.steps)))


def _changed(one: str, other: str) -> list[list[str]]:
    """The first to the last line that is another, spaces left out: parsing the largest files takes too long."""
    before, after = ([line.strip() for line in text.splitlines() if line.strip()] for text in (one, other))
    for _ in range(2):  # what is the same at the beginning, then at the end
        same = next((at for at, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), 0)
        before, after = before[same:][::-1], after[same:][::-1]
    return [before, after]


def _wider(draft: Draft) -> tuple[int, list[str]]:
    return len(draft.calls), sorted(draft.renamed)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@cache
def _trees(base: Base, steps: tuple[Step, ...]) -> tuple[tuple[Target, str, tuple[int, list[str]]], ...]:
    """Return a hash of each edited function, and the code around it.

    Raises LookupError, SyntaxError or ValueError where that is no Python.
    """
    trees = []
    for target, draft in _drafts(base, steps, False).items():
        parts = [*draft.beside, draft.node, *draft.behind, *draft.appended]
        tree = ast.parse("\n".join(ast.unparse(ast.fix_missing_locations(part)) for part in parts))
        compile(tree, "mutant", "exec")
        trees.append((target, _hash(ast.dump(tree)), _wider(draft)))
    return tuple(trees)


def sound(mutant: Mutant) -> bool:
    """Return whether it is Python, and not the same trees as before."""
    try:
        trees = _trees(mutant.base, mutant.steps)
    except (LookupError, SyntaxError, ValueError):
        return False
    return any(tree != _tree_of(mutant.base, *target) or wider != (0, []) for target, tree, wider in trees)


@cache
def _tree_of(base: Base, path: str, qualname: str) -> str:
    return _hash(ast.dump(ast.parse(ast.unparse(draft_of(base, path, qualname).node))))


def formatted(fix: str, base: Base, paths: Iterable[str]) -> Iterator[Mutant]:
    """The same trees as the base's, written otherwise."""

    def without_blank_lines(text: str) -> str:
        return "\n".join(line for line in text.splitlines() if line.strip()) + "\n"

    def with_wide_tabs(text: str) -> str:
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        in_strings = {line for token in tokens for line in range(token.start[0] + 1, token.end[0] + 1)}
        return "".join(
            line if number in in_strings else re.sub(r"^( +)(?=\S)", r"\1\1", line)
            for number, line in enumerate(text.splitlines(keepends=True), 1)
        )

    def with_comments(text: str) -> str:
        return re.sub(r"^( *)((?:def|return|if|for|with) )", r"\1# as it was\n\1\2", text, flags=re.MULTILINE)

    ways: dict[str, Change] = {
        "unparsed": lambda text: ast.unparse(ast.parse(text)),
        "without blank lines": without_blank_lines,
        "with comments": with_comments,
        "under a header": lambda text: "# a fork's header\n\n" + text,
        "with wide tabs": with_wide_tabs,
    }
    for way, change in ways.items():
        by_hand = tuple((path, change) for path in paths if (release_root(base.release) / path).is_file())
        yield Mutant(fix, base, (), (), by_hand, name=way, kind="the same trees")
