"""Events in any order: import, register, register again, import an alias, fork, spawn, revert all end in the same."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from activities import layers as bound
from fetch_vllm import ALL_RELEASES
from stock import release_root, run_in_release
from table import AFFECTED_RELEASES, ALL_APPLIED, SAMPLE, affected_by
from vllm_graphfix.fix import Diagnosis, Fix, Patch
from vllm_graphfix.fixes import BY_NAME, FIXES
from vllm_graphfix.source.files import open_source
from warm_release import WarmRelease, warm_process

# T imports the targets, R registers, the second R does so again, A imports subclasses and `from … import` aliases of
# them, F forks, S spawns, V reverts.
WITHOUT_REVERT = sorted({"".join(order) for order in itertools.permutations("TRRAFS")})
ORDERS = sorted({"".join(order) for order in itertools.permutations("TRRAFSV")})
PROCESSES = 3
"""The number of processes of an order: its own, the forked one, the spawned one."""
ELEVENTH = 11
"""No divisor of the number of orders: every eleventh has each event in each place."""
SOME = 2520
"""In `make test`: one order of all, and one without a revert."""
IN_MAKE_TEST = ("0.17.1", "0.21.0")
_BATCH = 40
_LIMIT = 600
"""Seconds for a batch."""

Case = tuple[str, tuple[str, ...]]
"""An order, and the fixes that it reverts."""
RecordProperty = Callable[[str, object], None]


def test_there_are_as_many_orders_as_there_should_be() -> None:
    assert len(ORDERS) == 2520
    assert len(WITHOUT_REVERT) == 360


class Warm(NamedTuple):
    """A warm process of a release, and how many of the orders are run in its forks."""

    process: WarmRelease
    release: str
    slow: bool

    def of(self, orders: Sequence[str], largest: int = 1) -> list[str]:
        """Every *largest*-th order on a release of each shape, every eleventh of these on the others.

        In `make test` they are a few.
        """
        stride = SOME
        if self.slow:
            stride = largest if self.release in SAMPLE else largest * ELEVENTH
        return list(orders[ALL_RELEASES.index(self.release) % stride :: stride])


@pytest.fixture
def warm(request: pytest.FixtureRequest) -> Warm:
    release, slow = request.param
    return Warm(warm_process(release, bare=True), release, slow)


def on_releases(releases: Sequence[str], *, in_make_test: bool = True) -> pytest.MarkDecorator:
    few = [(release, False) for release in IN_MAKE_TEST if release in releases and in_make_test]
    params = [
        pytest.param(
            (release, slow),
            marks=[pytest.mark.xdist_group(f"orders-{release}"), pytest.mark.slow]
            if slow
            else pytest.mark.xdist_group(release),
            id=f"{release}-{'many' if slow else 'few'}",
        )
        for release, slow in (*few, *((release, True) for release in releases))
    ]
    return pytest.mark.parametrize("warm", params, indirect=True)


# -- what is to come of it ---------------------------------------------------------------------------------------------


@cache
def diagnosis(fix: str, release: str) -> Diagnosis:
    return BY_NAME[fix].diagnose(open_source(release_root(release)))


@cache
def patches(fix: str, release: str, *, observed: bool) -> Sequence[Patch]:
    if fix not in affected_by(release):
        return ()
    offered = BY_NAME[fix].patches(diagnosis(fix, release).shape)
    return [patch for patch in offered if patch.observes or not observed]


@cache
def modules(release: str) -> list[str]:
    """The modules of all fixes, as far as *release* has them and they can be imported."""
    named = dict.fromkeys(module for fix in FIXES for module in fix.modules)
    if release in ("0.19.0", "0.19.1"):  # imports a module that the wheel has under another name
        del named["vllm.v1.worker.encoder_cudagraph"]
    return [name for name in named if (release_root(release) / f"{name.replace('.', '/')}.py").exists()]


@cache
def targets(release: str) -> list[tuple[str, str]]:
    all_patches = (
        patch for fix in FIXES for seen in (False, True) for patch in patches(fix.name, release, observed=seen)
    )
    return list(dict.fromkeys((patch.module, patch.name) for patch in all_patches))


def engaged(release: str, taken_back: tuple[str, ...], *, observed: bool) -> list[Fix]:
    """The fixes that are on vLLM in the end."""
    remaining = [BY_NAME[name] for name in affected_by(release) if name not in taken_back]
    return [fix for fix in remaining if observed or not missing_companion(fix, taken_back)]


def missing_companion(fix: Fix, taken_back: tuple[str, ...]) -> str | None:
    """Return the reason why *fix* cannot stay, or None."""
    lost = [t for t in fix.requires if t.name in taken_back and not t.may_be_off]
    return f"{lost[0].name} is off; without it {lost[0].because}" if lost else None


@cache
def states(release: str, taken_back: tuple[str, ...], *, observed: bool) -> dict[str, list[str]]:
    result = {}
    for fix in FIXES:
        sites = [
            patch.name if "." in patch.name else f"{patch.module.rpartition('.')[2]}.{patch.name}"
            for patch in patches(fix.name, release, observed=observed)
        ]
        if fix.name in taken_back:
            entry = ["off", "reverted; graphs captured before then keep what they recorded"]
        elif fix.name not in affected_by(release):
            entry = ["not-needed", diagnosis(fix.name, release).reason]
        elif fix not in engaged(release, taken_back, observed=observed):
            entry = ["incompatible", str(missing_companion(fix, taken_back))]
        elif observed:
            entry = ["observing", f"counts at {', '.join(sorted(sites))}"]
        else:
            entry = ["active", f"applied to {', '.join(sorted(sites))}"]
        result[fix.name] = entry
    return result


@cache
def layers(release: str, taken_back: tuple[str, ...], place: tuple[str, str], *, observed: bool) -> list[str]:
    """On one target, the outermost first."""
    on_it = [
        fix.name.replace("-", "_")
        for fix in engaged(release, taken_back, observed=observed)
        if place in [(patch.module, patch.name) for patch in patches(fix.name, release, observed=observed)]
    ]
    return on_it[::-1]


def expected(release: str, case: Case, *, observed: bool) -> dict[str, Any]:
    order, reverted = case

    def outcome(taken_back: tuple[str, ...], aliases: dict[str, list[str]]) -> dict[str, Any]:
        return {
            "states": states(release, taken_back, observed=observed),
            "layers": {f"{m}:{n}": layers(release, taken_back, (m, n), observed=observed) for m, n in targets(release)},
            "aliases": aliases,
            "elsewhere": [],
            "subclasses see the same": True,
            "load_general_plugins": "vllm_graphfix.patching.hooks",
        }

    before_alias = order[: order.index("A")]
    carried_away = {}
    for module, name in targets(release):
        if "." not in name:
            # A name that is imported from a patched one is that with its layer, and stays so.
            back = reverted if "V" in before_alias else ()
            on_it = layers(release, back, (module, name), observed=observed) if "R" in before_alias else []
            carried_away[f"{module}:{name}"] = on_it
    forked = order[: order.index("F")]
    return {
        "ended": outcome(reverted if "V" in order else (), carried_away),
        "forked": outcome(reverted if "V" in forked else (), carried_away if "A" in forked else {}),
        "spawned": outcome((), {}),
    }


# -- running -----------------------------------------------------------------------------------------------------------


def check(
    warm: Warm,
    cases: Sequence[Case],
    record: RecordProperty,
    about: str,
    *,
    observed: bool = False,
    really_spawn: bool = False,
) -> None:
    release = warm.release
    text = (Path(__file__).parent / "support" / "orders.py").read_text()
    env = {"VLLM_GRAPHFIX": "observe"} if observed else ALL_APPLIED
    ran, wrong = 0, []
    size = 1 if really_spawn else _BATCH
    for first in range(0, len(cases), size):
        batch = cases[first : first + size]
        task = {
            "orders": batch,
            "modules": modules(release),
            "targets": targets(release),
            "really spawn": really_spawn,
            "text": text if really_spawn else "",
        }
        done = warm.process.run(f"{text}\nrun(json.loads({json.dumps(task)!r}))", env, timeout=_LIMIT)
        results = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("ORDER ")]
        assert len(results) == len(batch), done.stdout[-3000:]
        for order, reverted, actual in results:
            ran += 1
            wanted = expected(release, (order, tuple(reverted)), observed=observed)
            wrong += [
                f"{order}, {', '.join(reverted) or 'nothing'} taken back, {which}: {differences(actual, wanted, which)}"
                for which in wanted
                if actual.get(which) != wanted[which]
            ]
    record("counted", ("orders, each of three processes", release, about, ran))
    assert not wrong, f"{len(wrong)} of {ran * PROCESSES} processes ended otherwise, the first:\n" + "\n".join(
        wrong[:3]
    )


def differences(actual: dict[str, Any], wanted: dict[str, Any], which: str) -> object:
    outcome = actual.get(which, actual)
    if "error" in outcome:
        return outcome["error"]
    return {
        (about, name): (each, wanted[which][about].get(name))
        for about in ("states", "layers", "aliases")
        for name, each in outcome[about].items()
        if each != wanted[which][about].get(name)
    } or outcome


@on_releases(AFFECTED_RELEASES)
def test_after_a_revert_vllm_is_stock_for_good(warm: Warm, record_property: RecordProperty) -> None:
    back = affected_by(warm.release)
    cases = [(order, back) for order in warm.of(ORDERS)]
    check(warm, cases, record_property, "all reverted")


@on_releases(AFFECTED_RELEASES)
def test_one_fix_is_reverted_and_the_others_stay(warm: Warm, record_property: RecordProperty) -> None:
    """But for the one that cannot be without it."""
    fixes = itertools.cycle(affected_by(warm.release))
    cases = [(order, (next(fixes),)) for order in warm.of(ORDERS, ELEVENTH)]
    check(warm, cases, record_property, "one reverted")


@on_releases(ALL_RELEASES)
def test_each_fix_is_on_vllm_once_and_only_where_it_is_needed(warm: Warm, record_property: RecordProperty) -> None:
    cases: list[Case] = [(order, ()) for order in warm.of(WITHOUT_REVERT)]
    check(warm, cases, record_property, "none reverted")


@on_releases(AFFECTED_RELEASES)
def test_observers_go_by_the_same(warm: Warm, record_property: RecordProperty) -> None:
    back = affected_by(warm.release)
    cases = [(order, back if "V" in order else ()) for order in warm.of(ORDERS + WITHOUT_REVERT, ELEVENTH)]
    check(warm, cases, record_property, "observed", observed=True)


@on_releases([r for r in AFFECTED_RELEASES if r in SAMPLE], in_make_test=False)
def test_what_multiprocessing_spawns_is_as_its_double(warm: Warm, record_property: RecordProperty) -> None:
    """At each place in one order."""
    others, back = "RTAFRV", affected_by(warm.release)
    cases = [(f"{others[:place]}S{others[place:]}", back) for place in range(len(others) + 1)]
    check(warm, cases, record_property, "really spawned", really_spawn=True)


@pytest.mark.parametrize("shape", ["capture-graph-inline", "capture-graph-split"])
@pytest.mark.parametrize("name", ["prepare_inputs_to_capture", "set_forward_context"])
def test_a_name_carried_away_with_its_layer_does_what_stock_does_after_a_revert(shape: str, name: str) -> None:
    """The layers of the methods, which alone give it something to do, are gone then."""
    calls, answer = [], object()

    def stock(*args: Any, **kwargs: Any) -> object:
        calls.append((args, kwargs))
        return answer

    _, offered = bound(BY_NAME["capture-state"], shape)
    layer = next(layer for layer in offered if layer.name == name).wrap(stock)
    assert layer is not stock
    assert layer(1, two=2) is answer
    assert calls == [((1,), {"two": 2})]


def test_a_revert_outlasts_the_engine_that_it_was_made_for() -> None:
    """A process that starts another engine goes by another decision."""
    code = """
import vllm_graphfix
from vllm_graphfix.patching.manager import Policy
from vllm_graphfix.settings.environment import Master
vllm_graphfix.register()
process = vllm_graphfix._this_process().manager
process.revert("flashmla-fp8")
process.start(Policy(Master.STRICT, process._policy.modes))
told = process.states(diagnose=False)
assert told["flashmla-fp8"].state.value == "off", told
assert told["flashmla-padding"].state.value == "waiting", told
"""
    run_in_release("0.18.1", code)
