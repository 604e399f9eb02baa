"""A fault in each call that the plugin makes into vLLM and the system.

The calls are found by counting; faults are injected one at a time, each in a process of its own.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from logging import WARNING
from pathlib import Path
from typing import Any, NamedTuple

from fault_engine import ENDED, INTERRUPTS
from fault_files import damaged_packages, damaged_releases
from stock import release_root
from table import ALL_APPLIED, affected_by
from vllm_graphfix.fixes import BY_NAME, FIXES
from warm_release import run_in_fork

WATCHED = ("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
"""Modules that the plugin hooks besides the targets; others, such as the engine core's, are there before the plugin
is."""
NINTH = 9
"""Of the damages to files a sample has every ninth: no divisor of the number of kinds, so that each kind is there."""
_ONLY_TELLS = ("engine/status_record.py", "records/", "engine/metrics.py", "engine/metrics_snapshot.py", "log.py")
"""Beginnings of paths. What fails there must leave every fix as it is."""
ENDS = ("active", "stock", "stopped", "interrupted", "not made")
"""What came of a fault: all fixes as without it; vLLM as without the plugin, wholly or for some fix; an engine that did
not start …"""
_MISSING = ("failed", "incompatible", "conflict", "waiting")
_STOPS = "GraphfixError: vllm-graphfix stops this engine before it captures its CUDA graphs: "
_CANNOT_START = "RuntimeError: vllm-graphfix could not start ("


class Fault(NamedTuple):
    mode: str
    place: str
    """Thread, file, function, line, instruction and callee."""
    number: int
    """Which of the calls from there."""
    error: str
    callee: str
    """Its module."""

    @property
    def file(self) -> str:
        return self.place.split(":")[1]

    @property
    def only_tells(self) -> bool:
        """Return whether what fails is a thread of ours, or a function that tells others what was done."""
        thread, file, function, *_ = self.place.split(":")
        return thread != "MainThread" or (file.startswith(_ONLY_TELLS) and function != "<module>")

    @property
    def loads_package(self) -> bool:
        """Before `register` is there. vLLM guards the loading of a plugin, and says itself that it failed."""
        return self.place.startswith("MainThread:__init__.py:<module>:")

    @property
    def of_stock(self) -> bool:
        """Return whether vLLM's own function fails, below a wrapper of ours."""
        return self.callee.startswith(
            ("vllm.", "fault_engine", "torch.utils._contextlib")
        )  # the last is a decorator of vLLM's functions


class Outcome(NamedTuple):
    fault: Fault
    result: Mapping[str, Any] | None
    """None if the process died, or hung."""


class Faults:
    """The faults of one release: calls that fail, either all that there are or every nth, and damaged files."""

    def __init__(self, release: str, every: int = 1) -> None:
        root = release_root(release)
        self.needed = affected_by(release)
        targets = sorted({module for name in self.needed for module in BY_NAME[name].modules})
        environments = {
            "stock": {"VLLM_PLUGINS": ""},
            "auto": ALL_APPLIED,
            "strict": ALL_APPLIED | {"VLLM_GRAPHFIX": "strict"},
            "on": {BY_NAME[name].variable: "on" for name in self.needed},
            "refusing": ALL_APPLIED,
            "forked": ALL_APPLIED | {"forked": "yes"},
        }
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="vllm-graphfix-") as folder:
            results = Path(folder) / "results"
            trees = damaged_releases(root, self.needed, Path(folder), 1 if every == 1 else NINTH)
            packages = damaged_packages(Path(folder))
            read = sorted(
                {f"{root / path}" for fix in FIXES for path in fix.inspected_files if (root / path).is_file()}
            )
            call = (
                f"fault_engine.main({[*targets, *WATCHED]!r}, {environments!r}, {str(results)!r}, {every}, "
                f"{trees!r}, {packages!r}, {read!r})"
            )
            here = str(Path(__file__).parent)
            code = f"import sys\nsys.path.append({here!r})\nimport fault_engine\n{call}\n"
            # Other tests of the warm process have made the folder of its records; here the plugin makes it.
            run_in_fork(release, code, {"VLLM_GRAPHFIX_STATUS_DIR": folder}, timeout=4 * 3600)
            first, *rest = map(json.loads, results.read_text().splitlines())
        self.seconds = time.monotonic() - started
        self.planned: int = first["planned"]
        self.counted: dict[str, Any] = first["counted"]
        self.targets: dict[str, list[tuple[str, str]]] = self.counted["auto"]["targets"]
        self.stock: dict[str, str | None] = self.counted.pop("stock")["ends"]
        """How each stage ends without the plugin."""
        self.outcomes = [Outcome(Fault(**fault), result) for fault, result in rest if "place" in fault]
        self.trees = {fault["tree"]: result for fault, result in rest if "tree" in fault}
        """What a process told, by damage and mode: `stock`, `auto`, `strict`. A whole set has them all, another one
        every ninth, in `auto` or `strict`."""
        self.packages = {fault["package"]: result for fault, result in rest if "package" in fault}

    @property
    def places(self) -> dict[str, int]:
        """Every place that calls something, and the number of its calls."""
        numbers: dict[str, int] = {}
        for result in self.counted.values():
            for place, number, _ in result["calls"]:
                numbers.setdefault(place, number)
        return numbers

    # -- what must hold ------------------------------------------------------------------------------------------

    def complaints(self, outcome: Outcome) -> list[str]:
        """Return what did not hold after a fault; nothing, if all is well."""
        fault, result = outcome.fault, outcome.result
        if result is None:
            return ["the process died or hung"]
        if not result["fired"]:  # how far a thread is at that time is not always the same
            return [] if fault.only_tells else ["this call was not made"]
        if isinstance(result["states"], str):
            return [f"states() raised {result['states']}"]
        if fault.error in INTERRUPTS:
            swallowed = not any((end or "").startswith(fault.error) for end in result["ends"].values())
            return [*self._whole(result), *(["the interrupt was swallowed"] if swallowed else [])]
        if fault.of_stock:
            other = self._other_ends(result, self.stock)
            return [] if len(other) == 1 else [f"an error of vLLM's own is not what it was: {other}"]
        complaints = [*self._whole(result), *self._of_ends(fault.mode, result, self.stock, guarded=fault.loads_package)]
        if not fault.loads_package:
            complaints += self._of_states(result, quiet=fault.mode == "refusing")
            complaints += [f"{name} is waiting" for name in self.needed if result["states"][name][0] == "waiting"]
        if fault.only_tells and not self.active(result):
            complaints.append("a fault where something is only told took a fix away")
        return complaints

    def complaints_about_files(self, results: Mapping[str, Any]) -> list[str]:
        """The same of a damage: what a process told, by mode."""
        complaints: list[str] = []
        stock = results["stock"]["ends"] if "stock" in results else self.stock
        for mode in sorted(results.keys() - {"stock"}):
            word = results[mode]
            if word is None:
                complaints.append(f"{mode}: the process died or hung")
                continue
            of_mode = [*self._whole(word), *self._of_states(word), *self._of_ends(mode, word, stock)]
            complaints += [f"{mode}: {complaint}" for complaint in of_mode]
        return complaints

    def active(self, result: Mapping[str, Any]) -> bool:
        """Return whether all fixes that this release needs are on all of their targets."""
        return all(all(result["layers"][name]) for name in self.needed)

    def _whole(self, result: Mapping[str, Any]) -> Iterator[str]:
        """Each fix is on all targets that were imported or on none."""
        for name in self.needed:
            there = self._there(result, name)
            if any(there) and not all(there):
                yield f"{name} is half applied: {there}"

    def _there(self, result: Mapping[str, Any], name: str) -> list[bool]:
        """By target that was imported; nothing for a fix that is not needed."""
        imported = {stage.removeprefix("import ") for stage, end in result["ends"].items() if end is None}
        return [
            there
            for (module, _), there in zip(self.targets.get(name, ()), result["layers"].get(name, ()), strict=True)
            if module in imported
        ]

    def _of_states(self, result: Mapping[str, Any], *, quiet: bool = False) -> Iterator[str]:
        """The states are what was done, with a reason; and if something was not done, the log says so."""
        for name, (state, reason, verdict) in result["states"].items():
            there = self._there(result, name)
            if not reason:
                yield f"{name} has no reason"
            if there and (state == "active") != all(there):
                yield f"{name} says {state}, with layers {there} ({reason})"
            if state not in ("active", "failed", "incompatible", "conflict", "waiting", "unknown") and verdict not in (
                "fixed",
                "absent",
            ):
                yield f"{name} is {state} ({reason})"
            if (
                state in ("failed", "incompatible", "conflict")
                and not quiet
                and not any(level >= WARNING for level, _ in result["log"])
            ):
                yield f"{name} is {state}, and the log does not say so"

    @staticmethod
    def _other_ends(result: Mapping[str, Any], stock: Mapping[str, str | None]) -> dict[str, str | None]:
        return {stage: end for stage, end in result["ends"].items() if end != stock.get(stage)}

    def _of_ends(
        self, mode: str, result: Mapping[str, Any], stock: Mapping[str, str | None], *, guarded: bool = False
    ) -> Iterator[str]:
        """vLLM goes the way that it goes without the plugin, or who insists is stopped, with one message."""
        other = self._other_ends(result, stock)
        other.pop("states", None)  # who asks is told
        if mode not in ("strict", "on"):
            if other:
                yield f"vLLM went another way: {other}"
            return
        missing = {name for name, (state, _, _) in result["states"].items() if state in _MISSING}
        if not other:
            if stock.get(f"import {WATCHED[0]}") is not None:
                return  # without a worker nothing is captured
            # Whose code this process has not imported, it does not need.
            if not guarded and (needed := [name for name in sorted(missing) if self._there(result, name)]):
                yield f"not stopped, without {needed}"
            return
        stage, message = list(other.items())[-1]
        if len(other) > 1:
            yield f"more than one error: {other}"
        if stage == "load plugins" and (message or "").startswith(_CANNOT_START):
            return
        if stage not in ("measure", "capture") or not (message or "").startswith(_STOPS):
            yield f"stopped in the wrong way: {stage}: {message}"
        elif not missing and "not known" not in (message or ""):
            yield f"stopped although all is there: {message}"

    def ended(self, outcome: Outcome) -> str:
        """One of `ENDS`."""
        result = outcome.result
        if result is None or not result["fired"]:
            return "not made"
        if outcome.fault.error in INTERRUPTS:
            return "interrupted"
        if any(ENDED.match(end or "") for end in result["ends"].values()):
            return "stopped"
        return "active" if self.active(result) else "stock"


def table(faults: Faults) -> str:
    """Return a table of the calls, and the faults injected, by file of the plugin."""
    columns = ("sites", "calls", "faults", *ENDS)
    rows: dict[str, Counter[str]] = {}
    for place, number in faults.places.items():
        rows.setdefault(place.split(":")[1], Counter()).update({"sites": 1, "calls": number})
    for outcome in faults.outcomes:
        rows.setdefault(outcome.fault.file, Counter()).update(["faults", faults.ended(outcome)])
    rows = dict(sorted(rows.items())) | {"all": sum(rows.values(), Counter())}
    lines = [f"{'':30}" + "".join(f"{column:>12}" for column in columns)]
    lines += [f"{file:30}" + "".join(f"{row[column]:12}" for column in columns) for file, row in rows.items()]
    return "\n".join(lines)


if __name__ == "__main__":  # python tests/support/faults.py RELEASE [EVERY]
    injected = Faults(sys.argv[1], int((*sys.argv, "1")[2]))
    sys.stdout.write(
        f"{table(injected)}\n"
        f"{len(injected.trees)} damaged files, {len(injected.packages)} damaged manifests, {injected.seconds:.0f} s\n"
    )
