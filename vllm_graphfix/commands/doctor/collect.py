"""The parts of a report, each gathered on its own: what goes wrong in one is what that part says."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graphfix._version import __version__
from vllm_graphfix.commands.doctor.nvidia_smi import ask
from vllm_graphfix.commands.doctor.redaction import HIDDEN, NOT_SHOWN, VARIABLES, Mask, hosts_in
from vllm_graphfix.deployment import hardware
from vllm_graphfix.fix import Mode, State, variable
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.settings import decision as rollout
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.settings import shadow_rate
from vllm_graphfix.source.files import SourceError, open_source

if TYPE_CHECKING:
    from vllm_graphfix.commands.fleet import Engine, Fleet

SCHEMA = 1
GROUP = "vllm.general_plugins"
ENTRY_POINT = "graphfix"
_PEERS = (
    "torch",
    "triton",
    "flashinfer-python",
    "flash-attn",
    "transformers",
    "ray",
    "wrapt",
    "psutil",
)
_MOST = 40
"""Engines, plugins, errors that are told one by one."""
_LAST = 5
"""Engines that do not run any more and are told one by one, the last ones."""


class Doctor(NamedTuple):
    """What was found: parts by name, each a JSON object, `error` in it where the part could not be gathered."""

    verdict: str
    """What is in this vLLM, and what runs here, in a sentence or two."""
    parts: Mapping[str, Mapping[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """The stable interface; `SCHEMA` changes with it."""
        return {"schema": SCHEMA, "graphfix": __version__, "verdict": self.verdict, **self.parts}


def examine(
    vllm: Path | None = None, environment: Mapping[str, str] = os.environ, without: Container[str] = ()
) -> Doctor:
    """Gathers all there is about this machine and the vLLM at *vllm*, or the installed one. Never raises.

    The parts named in *without* are left out, and what they ask for is not asked for.
    """
    gathered: dict[str, Callable[[], dict[str, Any]]] = {
        "versions": lambda: _versions(vllm),
        "gpu": lambda: _gpu(environment),
        "platform": lambda: _platform(environment),
        "plugin": lambda: _plugin(environment),
        "environment": lambda: {"variables": _variables(environment)},
        "status": lambda: _status(vllm, environment),
        "fleet": lambda: _fleet(environment),
    }
    found: dict[str, Any] = {
        name: _gathered_or_error(gather) for name, gather in gathered.items() if name not in without
    }
    found["errors"] = {"last": found["fleet"].pop("errors", [])}
    said = [found[part].pop("verdict", f"{part} not known") for part in ("status", "fleet")]
    mask = Mask(environment, found["fleet"].pop("hosts", ()), found["fleet"].pop("models", ()))
    return Doctor(mask.text(" ".join(said)), {name: mask.everywhere(part) for name, part in found.items()})


def _gathered_or_error(gather: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return gather()
    except Exception as error:
        with suppress(Exception):
            return {"error": f"{type(error).__name__}: {error}"}
        return {"error": type(error).__name__}


def _versions(vllm: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "vllm-graphfix": __version__,
        "python": f"{sys.version.split()[0]} ({sys.implementation.name})",
        "vllm": _vllm(vllm),
    }
    return found | {name: _version(name) for name in _PEERS}


def _vllm(vllm: Path | None) -> str:
    try:
        source = open_source(vllm)
    except SourceError as error:
        return f"not found: {error}"
    return f"{source.version or 'version unknown'} in {source.label}"


def _version(distribution: str) -> str | None:
    """The version that the metadata name; None where the distribution is not installed."""
    from importlib import metadata

    try:
        return str(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None
    except Exception as error:  # metadata that are damaged
        return f"unreadable ({type(error).__name__})"


def _gpu(environment: Mapping[str, str]) -> dict[str, Any]:
    driver = re.search(r"^NVRM version:\s*(.+)$", hardware.small_text(hardware.PROC / "version") or "", re.MULTILINE)
    found: dict[str, Any] = {"driver": driver[1] if driver else None, "gpus": list(hardware.gpus())}
    program = shutil.which("nvidia-smi", path=environment.get("PATH", os.defpath))
    if program is None or not os.path.isabs(program):  # noqa: PTH117 - a word, not a file yet
        return found | {"nvidia-smi": "not found"}
    answered, said = ask(program)
    rows = [line.split(",") for line in said.splitlines()]
    seen = [
        dict(zip(("name", "driver", "memory", "compute_capability"), (cell.strip() for cell in row), strict=True))
        for row in rows
        if len(row) == 4
    ]
    return found | {"nvidia-smi": answered, "seen": seen[:_MOST]}


_CONTAINERS = (("/.dockerenv", "Docker"), ("/run/.containerenv", "Podman"))


def _platform(environment: Mapping[str, str]) -> dict[str, Any]:
    system = os.uname()
    named = re.search(r"^PRETTY_NAME=\"?([^\"\n]*)", hardware.small_text(Path("/etc/os-release")) or "", re.MULTILINE)
    libc = None
    with suppress(ValueError, OSError):
        libc = os.confstr("CS_GNU_LIBC_VERSION")
    return {
        "system": f"{system.sysname} {system.release} {system.machine}",
        "distribution": named[1] if named else None,
        "libc": libc or "not glibc",
        "container": _container(environment),
        "processors": os.cpu_count(),
    }


def _container(environment: Mapping[str, str]) -> str:
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "yes (Kubernetes)"
    for place, what in _CONTAINERS:
        with suppress(OSError):
            if os.access(place, os.F_OK):
                return f"yes ({what})"
    groups = hardware.small_text(Path("/proc/1/cgroup")) or ""
    return "yes" if re.search(r"docker|kubepods|containerd|lxc|libpod", groups) else "no sign of one"


def _plugin(environment: Mapping[str, str]) -> dict[str, Any]:
    """Whether vLLM loads us: it takes the entry points of its group, and of those the ones that VLLM_PLUGINS names."""
    from importlib import metadata

    points = list(metadata.entry_points(group=GROUP))
    ours = [point.value for point in points if point.name == ENTRY_POINT]
    names = {point.name for point in points}
    given = environment.get("VLLM_PLUGINS")
    named = None if given is None else [name.strip() for name in given.split(",")][:_MOST]
    found = {
        "entry_point": ours[0]
        if ours
        else "not found: vllm-graphfix is not properly installed in this Python; reinstall it",
        "times_found": len(ours),
        "others": sorted(names - {ENTRY_POINT})[:_MOST],
        "VLLM_PLUGINS": None if named is None else [name if name in names else NOT_SHOWN for name in named if name],
        "loaded": "yes",
    }
    if not ours:
        found["loaded"] = "no: the entry point is not found"
    elif named is not None and ENTRY_POINT not in named:
        found["loaded"] = f"no: VLLM_PLUGINS does not name it; add {ENTRY_POINT} to it"
    return found


def _variables(environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """The variables that are set, by name: ours, and those in `VARIABLES`.

    If a name of ours is not known, not even the name is sure to be harmless.
    """
    found: list[dict[str, Any]] = []
    modes = {variable(fix.name): [mode.value for mode in Mode] for fix in FIXES}
    actions = [action.value for action in shadow_rate.Action]
    watches = [watch.value for watch in settings.Addresses]
    choices = {settings.PREFIX: [master.value for master in settings.Master], **modes}
    choices |= {settings.SHADOW_ACTION: actions, settings.ADDRESSES: watches}
    choices[settings.KV_MARKS_ACTION] = [action.value for action in shadow_rate.MarksAction]
    switches = ("1", "0", "true", "false", "yes", "no")
    for name, values in choices.items():
        if name in environment:
            word = environment[name].strip().lower()
            found.append(_variable(name, word if word in (*values, *switches, "") else None))
    parsers: dict[str, Callable[[str], object]] = {
        settings.SHADOW: shadow_rate.normal,
        settings.KV_MARKS: shadow_rate.normal_fraction,
        settings.AGREEMENT_TIMEOUT: settings.seconds,
    }
    for name, parse in parsers.items():
        if given := environment.get(name, "").strip():
            try:
                parse(given)
                found.append(_variable(name, given))
            except ValueError:
                found.append(_variable(name, None))
    if settings.ROLLOUT in environment:
        percentage = environment[settings.ROLLOUT].strip()
        try:
            found.append(_variable(settings.ROLLOUT, rollout.as_percentage(rollout.buckets_of(percentage))))
        except ValueError:
            found.append(_variable(settings.ROLLOUT, None if percentage else ""))
    if settings.ROLLOUT_KEY in environment:
        key = environment[settings.ROLLOUT_KEY].strip()
        found.append(_variable(settings.ROLLOUT_KEY, f"{NOT_SHOWN}, bucket {rollout.bucket(key)}" if key else ""))
    if settings.STATUS_DIR in environment:
        folder = environment[settings.STATUS_DIR]
        found.append(_variable(settings.STATUS_DIR, folder if re.fullmatch(r"/[\w./-]{0,120}", folder) else None))
    if settings.DECISION in environment:
        decision = rollout.decode(environment[settings.DECISION])
        found.append(_variable(settings.DECISION, "made by an engine" if decision else None))
    known = settings.names(fix.name for fix in FIXES)
    strangers = sum(settings.is_ours(name) and name not in known for name in environment)
    if strangers:
        found.append(_variable(f"{settings.PREFIX}…", f"{strangers} unknown names (not shown)"))
    for each in VARIABLES:
        if each.name in environment:
            value = environment[each.name]
            found.append(_variable(each.name, value if re.fullmatch(each.form, value) else None))
    return found


def _variable(name: str, value: str | None) -> dict[str, Any]:
    return {"name": name, "value": NOT_SHOWN if value is None else value}


def _status(vllm: Path | None, environment: Mapping[str, str]) -> dict[str, Any]:
    from vllm_graphfix.commands.status import status
    from vllm_graphfix.commands.status_table import verdict

    # What is wrong with a value is told with the value, and who is outside a rollout with the key: neither is asked
    # for. A value that is not shown is none that means anything, and counts as such: without it the status would be
    # that of another environment.
    shown = {each["name"]: each["value"] for each in _variables(environment)}
    clean = {name: shown[name] for name in environment if name in shown}
    if settings.ROLLOUT_KEY in environment:
        clean[settings.ROLLOUT_KEY] = environment[settings.ROLLOUT_KEY]
    known = settings.names(fix.name for fix in FIXES)
    for name, value in environment.items():
        if name not in known and settings.is_ours(name) and (value.strip() or settings.asks_for_less(name, value)):
            # Neither is shown, but one that counts as off decides about all fixes.
            which = (
                f"{settings.ROLLOUT}_OR_OFF" if settings.asks_for_less(name, value) else f"{settings.PREFIX}_UNKNOWN"
            )
            clean[which] = HIDDEN
    if "VLLM_PLUGINS" in environment:
        clean["VLLM_PLUGINS"] = ",".join(_plugin(environment)["VLLM_PLUGINS"])
    source = open_source(vllm)
    found = status(source, clean)
    withheld = rollout.decide(settings.read(environment, [fix.name for fix in FIXES]), source.version or "").key
    told = found.as_json()
    told["notes"] = [note.replace(repr(withheld), HIDDEN) if withheld else note for note in told["notes"]]
    return {key: told[key] for key in ("vllm", "source", "misconfigured", "notes", "fixes")} | {
        "verdict": f"vLLM {source.version or '(version unknown)'}: {verdict(found)}"
    }


_COUNTING = frozenset({State.ACTIVE.value, State.OBSERVING.value})


def _settings(engine: Engine) -> dict[str, str]:
    """What an engine was started with, as its ranks have it: not what the environment of this process says."""
    record = engine.tellers[0].record
    decided = record.decision
    modes: dict[str, list[str]] = {}
    for name, fix in record.fixes.items():
        modes.setdefault(fix.mode, []).append(name)
    rollout = "in" if decided.canary else "not in"
    if decided.percentage is not None:
        rollout += f", of {decided.percentage:g} %"
    several = {mode: ", ".join(names) for mode, names in modes.items() if mode != Mode.AUTO.value}
    return {settings.PREFIX: decided.master, "rollout": rollout, **several}


def _sentence_on_engines(engines: Sequence[Engine]) -> str:
    """How many engines run here, and how many of them have the fixes."""
    from vllm_graphfix.commands.fleet import kind

    live = sum(engine.live for engine in engines)
    kinds = Counter(kind(engine) for engine in engines)
    told = ", ".join(f"{number} {each}" for each, number in kinds.items() if each != "ended")
    running = f"{live or 'No'} engine{'s' if live > 1 else ''} running here"
    return f"{running}: {told}." if told else f"{running}."


def _fleet(environment: Mapping[str, str]) -> dict[str, Any]:
    from vllm_graphfix import records
    from vllm_graphfix.commands import fleet

    try:
        found = fleet.look(records.base_folder(environment))
    except fleet.FleetError as error:
        return {"error": str(error)}
    gone = sorted(
        (engine for engine in found.engines if not engine.live),
        key=lambda engine: min(each.age for each in engine.members),
    )
    told = [*[engine for engine in found.engines if engine.live][:_MOST], *gone[:_LAST]]
    bad = (State.FAILED.value, State.CONFLICT.value, State.INCOMPATIBLE.value)
    engines = [
        {
            "engine": engine.name,
            "status": engine.status,
            "settings": _settings(engine),
            "graphs": engine.graphs,
            "vllm": list(engine.values_of("vllm")),
            "vllm-graphfix": list(engine.values_of("graphfix")),
            "processes": len(engine.members),
            "ranks": (
                f"{engine.agreeing if engine.agreeing is not None else 'none'} of {engine.expected} "
                "compared and agreeing"
            ),
            "states": {
                fix: {state: len(members) for state, members in engine.states(fix).items()}
                for fix in engine.fixes[:_MOST]
            },
            # Zeros too, where something counts: that nothing happened is news.
            "events": {
                fix: counts
                for fix in engine.fixes[:_MOST]
                if (counts := engine.counts(fix)) and (any(counts.values()) or _COUNTING & engine.states(fix).keys())
            },
            "wrong": list(engine.wrong[:_MOST]),
            "notes": list(engine.notes[:_MOST]),
        }
        for engine in told
    ]
    errors: dict[tuple[str, str, str], None] = {}
    for engine in found.engines:
        for member in engine.members:
            record = member.record
            for name, fix in record.fixes.items():
                if fix.state in bad:
                    errors[name, fix.state, fix.reason] = None
            if record.problem is not None:
                errors["engine", "stopped", record.problem] = None
    return {
        "verdict": _sentence_on_engines(found.engines),
        "engines": engines,
        "more_engines": len(found.engines) - len(told),
        "without_a_record": len(found.unrecorded),
        "because": sorted({each.reason for each in found.unrecorded})[:_MOST],
        "notes": [*found.notes, *found.problems][:_MOST],
        "errors": [dict(zip(("of", "state", "reason"), each, strict=True)) for each in list(errors)[-_MOST:]],
        "hosts": sorted(hosts_of(found) | {os.uname().nodename}),
        "models": sorted(models_of(found)),
    }


def hosts_of(fleet: Fleet) -> set[str]:
    """Return the hosts of all records, and those that the records name for other ranks."""
    named = {fleet.here.host, *(one.host for engine in fleet.engines for one in engine.unreadable)}
    for record in (member.record for engine in fleet.engines for member in engine.members):
        difference = record.agreement.difference if record.agreement is not None else None
        reasons = (fix.reason for fix in record.fixes.values())
        named.add(record.host)
        named.update(*(hosts_in(text) for text in (record.problem, record.unchecked, difference, *reasons) if text))
    return named


def models_of(fleet: Fleet) -> set[str]:
    """Return the models that the engines serve, by the name or folder that they were started with."""
    return {name for engine in fleet.engines for name in engine.values_of("model")}
