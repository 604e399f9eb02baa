"""One process of `verify`: runs scenarios on the vLLM that its import path holds, and writes a line of JSON for each.

    python -m vllm_graphfix.verify.double.worker FOLDER [FIX…] [-- FIX… [-- FIX…]]

FOLDER holds ``vllm/``. Behind the first dashes: fixes that are not needed, whose code is imported to see that nobody
touched it. Behind the second: fixes that do not recognise this vLLM, whose scenarios have to show that they fit it.

Whether the fixes are on is the environment's to say, as in production.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO

from vllm_graphfix.verify import trial as trials
from vllm_graphfix.verify.measurement import Watch

if TYPE_CHECKING:
    from vllm_graphfix.verify.trial import Scenario


def _results() -> TextIO:
    """Standard output, for results alone: what vLLM logs there goes to standard error."""
    sys.stdout.flush()
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return results


def scenario_of(fix: str) -> Scenario:
    """The scenario that *fix* is shown with.

    Imports what the fix patches, so that its state is not `waiting` when the scenario begins.
    """
    list(_targets(fix))
    scenario: Scenario = _resolve(trials.scenario_of(fix))
    return scenario


def _resolve(place: str) -> Any:
    """What is at ``module:function``."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _install_kernel_stand_ins() -> None:
    """Before any scenario makes vLLM look for its FlashMLA kernels. Raises ImportError without torch."""
    from vllm_graphfix.verify.double.flashmla import install_flashmla_stand_ins

    try:
        install_flashmla_stand_ins()
    except Exception:  # this vLLM has no FlashMLA, or another one; the scenarios that use it will say so
        traceback.print_exc()


def _targets(fix: str) -> Iterator[ModuleType]:
    """The modules that a patch of *fix* may touch, as far as this vLLM has them; imported."""
    from vllm_graphfix.fixes import BY_NAME

    yield from _import_those_there(BY_NAME[fix].modules)


def _import_those_there(modules: Sequence[str]) -> Iterator[ModuleType]:
    """Those that this vLLM has, with all that they take of it: a module of 0.19 names one that its wheel lacks."""
    for name in modules:
        try:
            yield importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not error.name or not (name.startswith(error.name) or error.name.startswith("vllm.")):
                raise


def untouched(fix: str) -> None:
    """Imports what *fix* concerns in this vLLM. Raises AssertionError if a function there is of this package."""
    own = f"vllm_graphfix.fixes.{fix.replace('-', '_')}"
    for module in _targets(fix):
        owners = [module, *(value for value in vars(module).values() if isinstance(value, type))]
        for owner in owners:
            for attribute, value in list(vars(owner).items()):
                # A platform of vLLM answers None to whatever it is asked for.
                written_in = (getattr(value, "__globals__", None) or {}).get("__name__", "")
                if written_in == own:
                    raise AssertionError(f"{module.__name__}: {attribute} is patched")


def use(folder: str) -> None:
    """Makes the vLLM in *folder* the one that is imported. Raises ImportError if it is another one all the same."""
    sys.path[0] = folder  # in place of the working directory, which may be another vLLM's checkout
    import vllm

    if Path(folder) not in Path(str(vllm.__file__)).parents:
        raise ImportError(f"vllm was imported from {vllm.__file__}, not from {folder}")


def watched(names: Sequence[str], *, trigger: bool = True) -> Iterator[tuple[str, Watch]]:
    """Has the shadow check look at every replay in the scenarios of the fixes *names*.

    It does so where these are made for it and it knows their graphs. Told for each kind of graphs. From here on the
    check is wrapped around vLLM's functions, also where the environment has switched every fix off.
    """
    from vllm_graphfix.fix import Mode, State
    from vllm_graphfix.patching.manager import FixManager, Policy
    from vllm_graphfix.settings.environment import Master
    from vllm_graphfix.settings.shadow_rate import Action, Rate
    from vllm_graphfix.shadow import process
    from vllm_graphfix.shadow.runners import RUNNERS
    from vllm_graphfix.shadow.verdict import Results

    tried = {name: trials.trial_of(name) for name in names}
    scenarios = [
        (name, each) for name, trial in tried.items() for each in (trial.watched, *trial.watched_further) if each
    ]
    if not scenarios:
        return
    wanted = Policy(Master.ON, {each.name: Mode.AUTO for each in RUNNERS})
    wrapped = FixManager(RUNNERS, wanted)
    wrapped.start(wanted)
    modules = {each.name: each.modules for each in RUNNERS}
    for name, scenario in scenarios:
        replay = _resolve(scenario.scenario)
        list(
            _import_those_there(modules[scenario.graphs])
        )  # a scenario may import them late, and until then the check waits
        if wrapped.states()[scenario.graphs].state is not State.ACTIVE:
            continue
        process.start(Rate(every=1), Action.REPORT)
        error = None
        try:
            if replay(trigger=trigger) is False:
                continue
        except Exception as raised:
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
        state = process.state(wrapped.states()).state
        results = process.SHADOW.results if process.SHADOW is not None else Results()
        first = results.first_mismatches[0].check if results.first_mismatches else None
        yield name, Watch(results.checks, results.mismatches, first, state.value, error, scenario.graphs)
    process.start(Rate(), Action.REPORT)


def poisoned(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """What poison shows in the scenarios of the fixes *names*, of those that tell where a step begins."""
    from vllm_graphfix.verify.double.poisoned import NotPoisonedError, shown_by_poison

    for name in names:
        try:
            yield name, shown_by_poison(scenario_of(name))
        except NotPoisonedError:
            continue
        except Exception as error:
            traceback.print_exc()
            yield name, [f"{type(error).__name__}: {error}".splitlines()[0]]


def refuse_misfit(scenario: Scenario) -> None:
    """Run *scenario* without the condition of its defect. Raises ValueError where the two runs differ all the same.

    It was written for other code: then what it shows with that condition is not the defect.
    """
    from vllm_graphfix.verify.proof import differing

    found = scenario(trigger=False)
    if found.error or not found.eager or differing(found.eager, found.graphed):
        why = found.error or "runs with and without graphs differ"
        raise ValueError(f"the scenario does not fit this vLLM: without the defect's condition {why}")


def main(
    names: list[str],
    others: Sequence[str] = (),
    unrecognised: Sequence[str] = (),
    *,
    folder: str | None = None,
    watch: bool = False,
) -> None:
    """Runs the scenarios of the fixes *names*, and looks whether what *others* concern was left alone.

    Those of *unrecognised* run behind them, if they fit this vLLM.

    *folder* holds the vLLM to import; None: the caller has seen to that.

    *watch*: when all else has been told, they are run once more with poison, and the shadow check looks at their
    replays.
    """
    results = _results()

    def say(**line: Any) -> None:
        results.write(json.dumps(line) + "\n")
        results.flush()

    if folder is not None:
        use(folder)  # not before: vLLM may log to standard output while it is imported
    import vllm_graphfix

    vllm_graphfix.register()
    say(event="registered", torch=importlib.metadata.version("torch"))
    if names or unrecognised:
        _install_kernel_stand_ins()
    for name in (*names, *unrecognised):
        try:
            scenario = scenario_of(name)
            if name in unrecognised:
                refuse_misfit(scenario)
            before = vllm_graphfix.events()[name]
            found = scenario()
            after = vllm_graphfix.events()[name]
        except Exception as error:
            traceback.print_exc()
            say(event="failed", fix=name, error=f"{type(error).__name__}: {error}")
        else:
            say(
                event="measured",
                fix=name,
                numbers=found.numbers,
                eager=list(found.eager),
                graphed=list(found.graphed),
                error=found.error,
                counted=dict(found.counted),
                events={event: count - before.get(event, 0) for event, count in after.items()},
            )
    for name in others:
        try:
            untouched(name)
        except Exception as error:
            traceback.print_exc()
            say(event="failed", fix=name, error=f"{type(error).__name__}: {error}")
    for state in vllm_graphfix.states().values():
        say(event="state", fix=state.name, state=state.state.value, reason=state.reason)
    if watch:
        for name, told in poisoned(names):
            say(event="poisoned", fix=name, told=told)
        for name, seen in watched(names):
            say(event="watched", fix=name, **asdict(seen))


if __name__ == "__main__":
    groups: list[list[str]] = [[]]
    for word in sys.argv[2:]:
        if word == "--":
            groups.append([])
        else:
            groups[-1].append(word)
    main(*groups, folder=sys.argv[1], watch=True)
