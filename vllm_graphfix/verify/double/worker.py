"""One process of `verify`: runs scenarios on one vLLM, and writes a line of JSON for each.

The environment switches the fixes on or off, as in production.
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
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TextIO

from vllm_graphfix.verify import trial as trials
from vllm_graphfix.verify.measurement import Watch

if TYPE_CHECKING:
    from vllm_graphfix.verify.measurement import Measurement
    from vllm_graphfix.verify.trial import Scenario


_WRITE_LAYERS = ("vllm_graphfix.authoring", "vllm_graphfix.fixes.")
"""Modules in which wrappers of fixes are written. What the double puts in the place of kernels is written elsewhere."""


def _take_standard_output() -> TextIO:
    """Take standard output for results alone, and send vLLM's logs to standard error."""
    sys.stdout.flush()
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return results


def load_scenario(fix: str) -> Scenario:
    """Return the scenario of *fix*.

    Imports the modules that the fix patches first, so that its state is not `waiting` when the scenario runs.
    """
    _import_targets(fix)
    scenario: Scenario = _resolve(trials.scenario_place(fix))
    return scenario


def _resolve(place: str) -> Any:
    """Return the object at ``module:function``."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _install_kernel_stand_ins() -> None:
    """Install FlashMLA's stand-ins before a scenario makes vLLM look for the kernels.

    Raises:
        ImportError: torch is not installed.
    """
    from vllm_graphfix.verify.double.flashmla import install_flashmla_stand_ins

    try:
        install_flashmla_stand_ins()
    except Exception:  # this vLLM has no FlashMLA, or another one; the scenarios that use it fail with that error
        traceback.print_exc()


def _import_targets(fix: str) -> list[ModuleType]:
    """Import the modules that a patch of *fix* may touch and that this vLLM has."""
    from vllm_graphfix.fixes import BY_NAME

    return _import_existing(BY_NAME[fix].modules)


def _import_existing(modules: Sequence[str]) -> list[ModuleType]:
    """Import those of *modules* that this vLLM has with all that they import: one of 0.19 needs one its wheel lacks."""
    from vllm_graphfix.verify.double.image_processors import install_image_processor_stand_ins

    install_image_processor_stand_ins()
    imported = []
    for name in modules:
        try:
            imported.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if not error.name or not (name.startswith(error.name) or error.name.startswith("vllm.")):
                raise
    return imported


def refuse_patched(fix: str) -> None:
    """Import the modules that *fix* concerns in this vLLM.

    Raises:
        AssertionError: the fix has patched one of their functions or methods.
    """
    for module in _import_targets(fix):
        owners = [module, *(value for value in vars(module).values() if isinstance(value, type))]
        for owner in owners:
            for attribute, value in list(vars(owner).items()):
                if any(_is_layer_of(fix, function) for function in _functions_in(value)):
                    raise AssertionError(f"{module.__name__}: {attribute} is patched")


def _functions_in(value: object) -> Iterator[FunctionType]:
    """Yield *value*, if it is a function, and the functions that it is wrapped around."""
    while isinstance(value, (FunctionType, staticmethod, classmethod)):
        if isinstance(value, FunctionType):
            yield value
        value = getattr(value, "__wrapped__", None)


def _is_layer_of(fix: str, function: FunctionType) -> bool:
    """Tell if *function* is a wrapper of *fix*, or one of the plugin's that was never recorded as another fix's."""
    from vllm_graphfix.patching.sites import fix_of_layer

    written_in = function.__globals__.get("__name__", "")
    return written_in.startswith(_WRITE_LAYERS) and fix_of_layer.get(function, fix) == fix


def use_vllm_in(folder: str) -> None:
    """Make the vLLM in *folder* the one that is imported.

    Raises:
        ImportError: another vLLM is imported all the same.
    """
    sys.path[0] = folder  # in place of the working directory, which may be another vLLM's checkout
    import vllm

    if Path(folder) not in Path(str(vllm.__file__)).parents:
        raise ImportError(f"vllm was imported from {vllm.__file__}, not from {folder}")


def shadow_checks(names: Sequence[str], *, trigger: bool = True) -> Iterator[tuple[str, Watch]]:
    """Shadow-check every replay in the scenarios of the fixes *names*, and yield a verdict for each kind of graphs.

    Fixes without a scenario for the check, and graphs that it cannot wrap in this vLLM, are skipped. The check stays
    wrapped around vLLM's functions afterwards, even if the environment switches every fix off.
    """
    from vllm_graphfix.fix import Mode, State
    from vllm_graphfix.patching.manager import FixManager, Policy
    from vllm_graphfix.settings.environment import Master
    from vllm_graphfix.settings.shadow_rate import Action, Rate
    from vllm_graphfix.shadow import process
    from vllm_graphfix.shadow.runners import RUNNERS
    from vllm_graphfix.shadow.verdict import Results

    scenarios = [
        (name, each)
        for name in names
        for trial in [trials.trial_of(name)]
        for each in (trial.watched, *trial.watched_further)
        if each
    ]
    if not scenarios:
        return
    policy = Policy(Master.ON, {each.name: Mode.AUTO for each in RUNNERS})
    wrapped = FixManager(RUNNERS, policy)
    wrapped.start(policy)
    modules = {each.name: each.modules for each in RUNNERS}
    for name, scenario in scenarios:
        run_scenario = _resolve(scenario.scenario)
        # A scenario may import these modules late, and the check's state is `waiting` until they are imported.
        _import_existing(modules[scenario.graphs])
        if wrapped.states()[scenario.graphs].state is not State.ACTIVE:
            continue
        process.start(Rate(every=1), Action.REPORT)
        error = None
        try:
            if run_scenario(trigger=trigger) is False:
                continue
        except Exception as raised:
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
        state = process.state(wrapped.states()).state
        results = process.SHADOW.results if process.SHADOW is not None else Results()
        first = results.first_mismatches[0].check if results.first_mismatches else None
        yield name, Watch(results.checks, results.mismatches, first, state.value, error, scenario.graphs)
    process.start(Rate(), Action.REPORT)


def poison_effects(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the effects of poison on the scenarios of the fixes *names*, of those that announce their steps."""
    from vllm_graphfix.verify.double.poisoned import NotPoisonedError, effects_of_poison

    for name in names:
        try:
            yield name, effects_of_poison(load_scenario(name))
        except NotPoisonedError:
            continue
        except Exception as error:
            traceback.print_exc()
            yield name, [f"{type(error).__name__}: {error}".splitlines()[0]]


def refuse_misfit(scenario: Scenario) -> None:
    """Run *scenario* without the condition of its defect.

    Raises:
        ValueError: the runs with and without graphs differ all the same. The scenario was written for other code, and
            a difference with that condition would not be the defect.
    """
    from vllm_graphfix.verify.proof import differing

    measured = scenario(trigger=False)
    if measured.error or not measured.eager or differing(measured.eager, measured.graphed):
        why = measured.error or "runs with and without graphs differ"
        raise ValueError(f"the scenario does not fit this vLLM: without the defect's condition {why}")


def run_on_stock(fix: str, *, trigger: bool = True) -> Measurement:
    """Run the scenario of *fix* on the vLLM of this environment, unpatched, as `report --defect` drafts it."""
    os.environ["VLLM_GRAPHFIX"] = "off"  # vLLM may load its plugins
    _install_kernel_stand_ins()
    return load_scenario(fix)(trigger=trigger)


def _measure(fix: str, *, has_to_fit: bool) -> dict[str, Any]:
    """Run the scenario of *fix*. Returns its measurement and the events that the fix counted meanwhile, for JSON.

    With *has_to_fit*, `refuse_misfit` comes first.
    """
    import vllm_graphfix

    scenario = load_scenario(fix)
    if has_to_fit:
        refuse_misfit(scenario)
    before = vllm_graphfix.events()[fix]
    measured = scenario()
    after = vllm_graphfix.events()[fix]
    return asdict(measured) | {"events": {event: count - before.get(event, 0) for event, count in after.items()}}


def main(
    names: list[str],
    others: Sequence[str] = (),
    unrecognised: Sequence[str] = (),
    *,
    folder: str | None = None,
    recheck: bool = False,
) -> None:
    """Run the scenarios of the fixes *names*, and check that the modules of *others* are not patched.

    Those of *unrecognised* run afterwards, if they fit this vLLM. *folder* holds the vLLM to import; with None the
    caller has put it on the import path. With *recheck*, the scenarios run again with poison and under the shadow check
    when all other results have been written.
    """
    results = _take_standard_output()

    def say(**line: Any) -> None:
        results.write(json.dumps(line) + "\n")
        results.flush()

    def fail(name: str, error: Exception) -> None:
        traceback.print_exc()
        say(event="failed", fix=name, error=f"{type(error).__name__}: {error}")

    if folder is not None:
        use_vllm_in(folder)  # after `_take_standard_output`, for vLLM may log to standard output on import
    import vllm_graphfix

    vllm_graphfix.register()
    say(event="registered", torch=importlib.metadata.version("torch"))
    if names or unrecognised:
        _install_kernel_stand_ins()
    for name in (*names, *unrecognised):
        try:
            measured = _measure(name, has_to_fit=name in unrecognised)
        except Exception as error:
            fail(name, error)
        else:
            say(event="measured", fix=name, **measured)
    for name in others:
        try:
            refuse_patched(name)
        except Exception as error:
            fail(name, error)
    for state in vllm_graphfix.states().values():
        say(event="state", fix=state.name, state=state.state.value, reason=state.reason)
    if recheck:
        for name, effects in poison_effects(names):
            say(event="poisoned", fix=name, effects=effects)
        for name, seen in shadow_checks(names):
            say(event="watched", fix=name, **asdict(seen))
