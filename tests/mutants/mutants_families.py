"""The family of each fix: mutants of the functions that it patches or reads, and of those near them.

They are generated, in releases with the defect and in ones without; what no operator makes is worded by hand in the
fix's trial.
"""

from __future__ import annotations

import builtins
import itertools
import keyword
import random
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import TypeVar

from mutants import OPERATORS
from mutants_around import around, imported_otherwise
from mutants_bases import base_of, bases
from mutants_made import Base, Mutant, Step, edits_of_kind, fingerprint, sound
from mutants_near import FUNCTIONS, own, patched, seen
from mutants_of_values import OPERATORS as OF_VALUES
from trial_rows import wordings_of

T = TypeVar("T")
PAIRS = 1000
"""Of edits of one base that are tried at once."""


def enough(fix: str) -> int:
    """Mutants that have to be left once those that are broken without the plugin are taken away."""
    return 200 if wordings_of(fix) else 80


@cache
def family(fix: str, release: str | None = None) -> tuple[Mutant, ...]:
    """Mutants of all bases, or of those of one release, no two with the same trees."""
    everywhere = [where.base for where in bases(fix) if where.base.name in seen()[fix]]
    here = [base for base in everywhere if release in (None, base.release)]
    by_rule = (mutant for mutant in _by_rule(fix, here) if release in (None, mutant.base.release))
    by_identity = {identity(mutant): mutant for mutant in by_rule}
    wanted = enough(fix) * 13 // 10 * len(here) // len(everywhere)
    each = max(0, -(-(wanted - len(by_identity)) // len(here)))
    for base in here:
        new = (mutant for mutant in _of_base(fix, base) if sound(mutant) and identity(mutant) not in by_identity)
        by_identity |= {identity(mutant): mutant for mutant in itertools.islice(new, each)}
    return tuple(by_identity.values())


def identity(mutant: Mutant) -> str:
    """Its trees, and what is done to calls of its function, which may be elsewhere."""
    return fingerprint(mutant) + "".join(step.kind for step in mutant.steps if step.kind.startswith("called"))


def _by_rule(fix: str, here: Iterable[Base]) -> Iterator[Mutant]:
    """Yield those worded by hand, and those that change whole classes, modules and imports."""
    for wording in wordings_of(fix):
        base = base_of(fix, wording.release, wording.of)
        for name, change in wording.changes.items():
            by_hand = change if isinstance(change, Mapping) else {wording.path: change}
            yield Mutant(fix, base, _paths(fix, base), (), tuple(by_hand.items()), name=name, kind=wording.kind)
    for base in here:
        if base.remedy:
            yield from _of_classes(fix, base)


def _of_classes(fix: str, base: Base) -> Iterator[Mutant]:
    """Of the classes whose methods the fix patches, and of the names that it replaces in modules."""
    methods: dict[tuple[str, str], list[str]] = {}
    for path, name in patched(fix, base):
        cls, _, method = name.rpartition(".")
        methods.setdefault((path, cls), []).append(method)
    for (path, cls), names in methods.items():
        if cls:
            yield from around(fix, base, path, cls, _paths(fix, base), tuple(names))
        else:
            for name in names:
                yield from imported_otherwise(fix, base, path, name, _paths(fix, base))


def _paths(fix: str, base: Base) -> tuple[str, ...]:
    near = seen()[fix].get(base.name, ())
    return tuple(dict.fromkeys([*(path for path, _ in own(fix, base)), *(path for path, _, _ in near)]))


def _of_base(fix: str, base: Base) -> Iterator[Mutant]:
    """Of what is the fix's own and of what is near it in turn: one of each kind, then another one of each.

    Every other one of those near it is of what functions take and give: of the kinds that may cure a defect elsewhere,
    or bring it back. Every fifth is two of the fix's own at once.
    """
    its_own = own(fix, base)
    near = [(path, name, far) for path, name, far in seen()[fix][base.name] if (path, name) not in its_own]
    # Where more is read than a sample reaches, what is patched comes first.
    behind = 2 if len(its_own) > FUNCTIONS else 0
    ranked = [(path, name, 0 if (path, name) in patched(fix, base) else behind) for path, name in its_own]
    mine = _kinds_in_turn(fix, base, ranked, OPERATORS)
    values = _kinds_in_turn(fix, base, near, OF_VALUES)
    rest = _kinds_in_turn(fix, base, near, OPERATORS)
    for steps in _in_turn([mine, values, mine, rest, _two_at_once(fix, base)]):
        name = " + ".join(
            f"{step.path.removeprefix('vllm/')} {step.qualname}: {step.kind}: {step.label}" for step in steps
        )
        kind = steps[0].kind if len(steps) == 1 else "two at once"
        yield Mutant(fix, base, _paths(fix, base), steps, name=name, kind=kind)


def _kinds_in_turn(
    fix: str, base: Base, functions: list[tuple[str, str, int]], kinds: Iterable[str]
) -> Iterator[tuple[Step]]:
    """One of each kind, then another one of each, and each kind of all functions in turn."""
    waiting = []
    for kind in kinds:
        chance = random.Random(f"{fix} {base.name} {kind}")  # noqa: S311 - to choose the same again
        order = sorted(functions, key=lambda function: (function[2] > 1, chance.random()))
        waiting.append(_in_turn([_steps(fix, base, path, name, kind, chance) for path, name, _ in order]))
    random.Random(f"{fix} {base.name}").shuffle(waiting)  # noqa: S311 - to choose the same again
    return ((step,) for step in _in_turn(waiting))


def _two_at_once(fix: str, base: Base) -> Iterator[tuple[Step, ...]]:
    """Of the fix's own, without end."""
    chance = random.Random(f"{fix} {base.name} two at once")  # noqa: S311 - to choose the same again
    functions = [(path, name, 0) for path, name in own(fix, base)]
    some = [step for (step,) in itertools.islice(_kinds_in_turn(fix, base, functions, OPERATORS), 2 * len(OPERATORS))]
    for _ in range(PAIRS if len(some) > 1 else 0):
        yield tuple(chance.sample(some, 2))


def _in_turn(each: Iterable[Iterator[T]]) -> Iterator[T]:
    """The first of each, then the second; none is asked for before its turn, since that takes a while."""
    waiting = deque(each)
    while waiting:
        with suppress(StopIteration):
            yield next(waiting[0])
            waiting.append(waiting[0])
        waiting.popleft()


def _steps(fix: str, base: Base, path: str, name: str, kind: str, chance: random.Random) -> Iterator[Step]:
    """First those about what the remedy is about."""
    try:
        labels = list(edits_of_kind(base, path, name, kind, False))
    except (LookupError, AssertionError, AttributeError, TypeError, ValueError):
        return
    chance.shuffle(labels)
    words = _words_of_the_remedy(fix)
    labels.sort(key=lambda label: words.isdisjoint(_words(label)))
    yield from (Step(path, name, kind, label) for label in labels)


@cache
def _words_of_the_remedy(fix: str) -> frozenset[str]:
    """The names in the lines that a remedy changes."""
    words: set[str] = set()
    for base in (where.base for where in bases(fix) if where.base.remedy):
        for path in dict(base.remedy):
            texts = (base.text(path, remedied=remedied) for remedied in (False, True))
            lines = (set(re.sub(r"#.*", "", text).splitlines()) for text in texts)
            words.update(*map(_words, set.symmetric_difference(*lines)))
    return frozenset(words - {"self", *keyword.kwlist, *vars(builtins)})


def _words(text: str) -> set[str]:
    return set(re.findall(r"[^\W\d]\w+", text))
