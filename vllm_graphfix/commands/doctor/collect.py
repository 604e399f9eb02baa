"""Parts of doctor's report, each gathered by itself: an error in one becomes the content of that part."""

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
from vllm_graphfix.commands.redaction import VARIABLES, WITHHELD, Mask, hosts_in
from vllm_graphfix.deployment import hardware
from vllm_graphfix.deployment.secrets import HIDDEN
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
_MAX_LISTED = 40
"""Limit of engines, plugins and errors that are listed."""
_MAX_ENDED = 5
"""Limit of ended engines that are listed, the latest first."""


class Doctor(NamedTuple):
    """Parts of the report by name, each a JSON object; one that could not be gathered has an `error`."""

    verdict: str
    """Defects of this vLLM, and engines that run here, in a sentence or two."""
    parts: Mapping[str, Mapping[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """Return the stable interface, versioned by `SCHEMA`."""
        return {"schema": SCHEMA, "graphfix": __version__, "verdict": self.verdict, **self.parts}


def examine(
    vllm: Path | None = None, environment: Mapping[str, str] = os.environ, without: Container[str] = ()
) -> Doctor:
    """Gather the report on this machine and the vLLM at *vllm*, or the installed one. Never raises.

    Parts named in *without* are not gathered.
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
    parts: dict[str, Any] = {name: _part_or_error(gather) for name, gather in gathered.items() if name not in without}
    parts["errors"] = {"last": parts["fleet"].pop("errors", [])}
    verdicts = [parts[part].pop("verdict", f"{part} not known.") for part in ("status", "fleet")]
    mask = Mask(environment, parts["fleet"].pop("hosts", ()), parts["fleet"].pop("models", ()))
    return Doctor(mask.text(" ".join(verdicts)), {name: mask.everywhere(part) for name, part in parts.items()})


def _part_or_error(gather: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return gather()
    except Exception as error:
        with suppress(Exception):
            return {"error": f"{type(error).__name__}: {error}"}
        return {"error": type(error).__name__}


def _versions(vllm: Path | None) -> dict[str, Any]:
    versions: dict[str, Any] = {
        "vllm-graphfix": __version__,
        "python": f"{sys.version.split()[0]} ({sys.implementation.name})",
        "vllm": _vllm(vllm),
    }
    return versions | {name: _version(name) for name in _PEERS}


def _vllm(vllm: Path | None) -> str:
    try:
        source = open_source(vllm)
    except SourceError as error:
        return f"not found: {error}"
    return f"{source.version or 'version unknown'} in {source.label}"


def _version(distribution: str) -> str | None:
    """Return the version in the metadata of *distribution*, or None if it is not installed."""
    from importlib import metadata

    try:
        return str(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None
    except Exception as error:  # damaged metadata
        return f"unreadable ({type(error).__name__})"


def _gpu(environment: Mapping[str, str]) -> dict[str, Any]:
    driver = re.search(r"^NVRM version:\s*(.+)$", hardware.small_text(hardware.PROC / "version") or "", re.MULTILINE)
    part: dict[str, Any] = {"driver": driver[1] if driver else None, "gpus": list(hardware.gpus())}
    program = shutil.which("nvidia-smi", path=environment.get("PATH", os.defpath))
    if program is None or not os.path.isabs(program):  # noqa: PTH117 - still text
        return part | {"nvidia-smi": "not found"}
    answered, output = ask(program)
    rows = [line.split(",") for line in output.splitlines()]
    seen = [
        dict(zip(("name", "driver", "memory", "compute_capability"), (cell.strip() for cell in row), strict=True))
        for row in rows
        if len(row) == 4
    ]
    return part | {"nvidia-smi": answered, "seen": seen[:_MAX_LISTED]}


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
    """Predict whether vLLM loads this plugin: it loads the entry points of its group that VLLM_PLUGINS names."""
    from importlib import metadata

    points = list(metadata.entry_points(group=GROUP))
    ours = [point.value for point in points if point.name == ENTRY_POINT]
    names = {point.name for point in points}
    value = environment.get("VLLM_PLUGINS")
    named = None if value is None else [name.strip() for name in value.split(",")][:_MAX_LISTED]
    part = {
        "entry_point": ours[0]
        if ours
        else "not found: vllm-graphfix is not properly installed in this Python; reinstall it",
        "times_found": len(ours),
        "others": sorted(names - {ENTRY_POINT})[:_MAX_LISTED],
        "VLLM_PLUGINS": None if named is None else [name if name in names else WITHHELD for name in named if name],
        "loaded": "yes",
    }
    if not ours:
        part["loaded"] = "no: the entry point is not found"
    elif named is not None and ENTRY_POINT not in named:
        part["loaded"] = f"no: VLLM_PLUGINS does not name it; add {ENTRY_POINT} to it"
    return part


def _variables(environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the variables that are set: ours, and those in `VARIABLES`.

    Unknown names with our prefix are only counted, since even such a name may be private.
    """
    variables: list[dict[str, Any]] = []
    if several := environment.get(settings.FIXES, "").strip().lower():
        _, unusable = settings.expanded({settings.FIXES: several}, [fix.name for fix in FIXES])
        entries = [[part.strip() for part in entry.split("=", 1)] for entry in several.split(",") if entry.strip()]
        words = {mode.value for mode in Mode}
        printable = (
            None if unusable else ",".join(f"{fix}={mode if mode in words else HIDDEN}" for fix, mode in entries)
        )
        variables.append(_variable(settings.FIXES, printable))
    environment, _ = settings.expanded(environment, ())  # actions beside rates
    modes = {variable(fix.name): [mode.value for mode in Mode] for fix in FIXES}
    actions = [action.value for action in shadow_rate.Action]
    watches = [watch.value for watch in settings.Addresses]
    choices = {settings.PREFIX: [master.value for master in settings.Master], **modes}
    choices |= {settings.SHADOW_ACTION: actions, settings.ADDRESSES: watches}
    choices[settings.SHADOW_GRAPHS] = [graphs.value for graphs in shadow_rate.ShadowGraphs]
    choices[settings.CLAIMS] = [check.value for check in settings.Claims]
    choices[settings.BYPASS] = [watch.value for watch in settings.Bypass]
    choices[settings.METADATA] = [check.value for check in settings.Metadata]
    choices[settings.TRACED] = [check.value for check in settings.Traced]
    choices[settings.KV_MARKS_ACTION] = [action.value for action in shadow_rate.MarksAction]
    switches = ("1", "0", "true", "false", "yes", "no")
    for name, values in choices.items():
        if name in environment:
            word = environment[name].strip().lower()
            variables.append(_variable(name, word if word in (*values, *switches, "") else None))
    parsers: dict[str, Callable[[str], object]] = {
        settings.SHADOW: shadow_rate.normal,
        settings.KV_MARKS: shadow_rate.normal_fraction,
        settings.AGREEMENT_TIMEOUT: settings.seconds,
    }
    for name, parse in parsers.items():
        if value := environment.get(name, "").strip():
            try:
                parse(value)
                variables.append(_variable(name, value))
            except ValueError:
                variables.append(_variable(name, None))
    if settings.ROLLOUT in environment:
        percentage = environment[settings.ROLLOUT].strip()
        try:
            variables.append(_variable(settings.ROLLOUT, rollout.as_percentage(rollout.buckets_of(percentage))))
        except ValueError:
            variables.append(_variable(settings.ROLLOUT, None if percentage else ""))
    if settings.ROLLOUT_KEY in environment:
        key = environment[settings.ROLLOUT_KEY].strip()
        variables.append(_variable(settings.ROLLOUT_KEY, f"{WITHHELD}, bucket {rollout.bucket(key)}" if key else ""))
    if settings.STATUS_DIR in environment:
        folder = environment[settings.STATUS_DIR]
        variables.append(_variable(settings.STATUS_DIR, folder if re.fullmatch(r"/[\w./-]{0,120}", folder) else None))
    if settings.DECISION in environment:
        decision = rollout.decode(environment[settings.DECISION])
        variables.append(_variable(settings.DECISION, "made by an engine" if decision else None))
    known = settings.names(fix.name for fix in FIXES)
    strangers = sum(settings.is_ours(name) and name not in known for name in environment)
    if strangers:
        variables.append(_variable(f"{settings.PREFIX}…", f"{strangers} unknown names (not shown)"))
    for each in VARIABLES:
        if each.name in environment:
            value = environment[each.name]
            variables.append(_variable(each.name, value if re.fullmatch(each.form, value) else None))
    return variables


def _variable(name: str, value: str | None) -> dict[str, Any]:
    return {"name": name, "value": WITHHELD if value is None else value}


def _status(vllm: Path | None, environment: Mapping[str, str]) -> dict[str, Any]:
    from vllm_graphfix.commands.status import status
    from vllm_graphfix.commands.status_table import verdict

    # Messages on invalid values quote them, and one on the rollout quotes the key, so neither may reach `status`. A
    # withheld value is invalid and stays so under its placeholder: without it the status would differ.
    printed = {each["name"]: each["value"] for each in _variables(environment)}
    known = settings.names(fix.name for fix in FIXES)
    clean = {name: value for name, value in printed.items() if name in environment or name in known}
    if settings.ROLLOUT_KEY in environment:
        clean[settings.ROLLOUT_KEY] = environment[settings.ROLLOUT_KEY]
    for name, value in environment.items():
        if name not in known and settings.is_ours(name) and (value.strip() or settings.asks_for_less(name, value)):
            # Neither is printed, but one that counts as off decides about all fixes.
            which = (
                f"{settings.ROLLOUT}_OR_OFF" if settings.asks_for_less(name, value) else f"{settings.PREFIX}_UNKNOWN"
            )
            clean[which] = HIDDEN
    if "VLLM_PLUGINS" in environment:
        clean["VLLM_PLUGINS"] = ",".join(_plugin(environment)["VLLM_PLUGINS"])
    source = open_source(vllm)
    report = status(source, clean)
    withheld = rollout.decide(settings.read(environment, [fix.name for fix in FIXES]), source.version or "").key
    fields = report.as_json()
    fields["notes"] = [note.replace(repr(withheld), HIDDEN) if withheld else note for note in fields["notes"]]
    return {key: fields[key] for key in ("vllm", "source", "misconfigured", "notes", "fixes")} | {
        "verdict": f"vLLM {source.version or '(version unknown)'}: {verdict(report)}"
    }


_COUNTING = frozenset({State.ACTIVE.value, State.OBSERVING.value})


def _settings(engine: Engine) -> dict[str, str]:
    """Return the settings of an engine from its records, not from the environment of this process."""
    record = engine.reporting_members[0].record
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
    """Return the number of engines that run here, and of those with the fixes, in a sentence."""
    from vllm_graphfix.commands.fleet import kind

    live = sum(engine.live for engine in engines)
    kinds = Counter(kind(engine) for engine in engines)
    kinds_text = ", ".join(f"{number} {each}" for each, number in kinds.items() if each != "ended")
    running = f"{live or 'No'} engine{'s' if live > 1 else ''} running here"
    return f"{running}: {kinds_text}." if kinds_text else f"{running}."


def _fleet(environment: Mapping[str, str]) -> dict[str, Any]:
    from vllm_graphfix import records
    from vllm_graphfix.commands import fleet

    try:
        survey = fleet.look(records.base_folder(environment))
    except fleet.FleetError as error:
        return {"error": str(error)}
    gone = sorted(
        (engine for engine in survey.engines if not engine.live),
        key=lambda engine: min(each.age for each in engine.members),
    )
    listed = [*[engine for engine in survey.engines if engine.live][:_MAX_LISTED], *gone[:_MAX_ENDED]]
    return {
        "verdict": _sentence_on_engines(survey.engines),
        "engines": [_engine(engine) for engine in listed],
        "more_engines": len(survey.engines) - len(listed),
        "without_a_record": len(survey.unrecorded),
        "because": sorted({each.reason for each in survey.unrecorded})[:_MAX_LISTED],
        "notes": [*map(_without_hosts, survey.wrong), *survey.notes, *survey.problems][:_MAX_LISTED],
        "errors": _errors(survey),
        "hosts": sorted(hosts_of(survey) | {os.uname().nodename}),
        "models": sorted(models_of(survey)),
    }


def _engine(engine: Engine) -> dict[str, Any]:
    return {
        "engine": engine.name,
        "status": engine.status,
        "settings": _settings(engine),
        "graphs": engine.graphs,
        "vllm": list(engine.values_of("vllm")),
        "vllm-graphfix": list(engine.values_of("graphfix")),
        "processes": len(engine.members),
        "ranks": (
            f"{engine.agreeing if engine.agreeing is not None else 'none'} of {engine.expected} compared and agreeing"
        ),
        "states": {
            fix: {state: len(members) for state, members in engine.states(fix).items()}
            for fix in engine.fixes[:_MAX_LISTED]
        },
        # Zeros too where a fix counts: that nothing happened is information.
        "events": {
            fix: counts
            for fix in engine.fixes[:_MAX_LISTED]
            if (counts := engine.counts(fix)) and (any(counts.values()) or _COUNTING & engine.states(fix).keys())
        },
        "wrong": list(engine.wrong[:_MAX_LISTED]),
        "notes": list(engine.notes[:_MAX_LISTED]),
    }


def _errors(fleet: Fleet) -> list[dict[str, str]]:
    """Return the last errors of fixes and engines, each once."""
    from vllm_graphfix.commands.fleet.engine import BAD

    errors: dict[tuple[str, str, str], None] = {}
    for record in (member.record for engine in fleet.engines for member in engine.members):
        for name, fix in record.fixes.items():
            if fix.state in BAD:
                errors[name, fix.state, fix.reason] = None
        if record.problem is not None:
            errors["engine", "stopped", record.problem] = None
    return [dict(zip(("of", "state", "reason"), each, strict=True)) for each in list(errors)[-_MAX_LISTED:]]


def _without_hosts(lost: str) -> str:
    """Return a sentence of `Fleet.wrong` without its end: hosts and files may have names too short for a mask."""
    return f"{lost.partition(', on ')[0]}, whose records cannot be read"


def hosts_of(fleet: Fleet) -> set[str]:
    """Return the hosts of all records, and the hosts of other ranks that they name."""
    named = {fleet.here.host, *(one.host for one in fleet.unreadable)}
    for record in (member.record for engine in fleet.engines for member in engine.members):
        difference = record.agreement.difference if record.agreement is not None else None
        reasons = (fix.reason for fix in record.fixes.values())
        named.add(record.host)
        named.update(*(hosts_in(text) for text in (record.problem, record.unchecked, difference, *reasons) if text))
    return named


def models_of(fleet: Fleet) -> set[str]:
    """Return the models of the engines, by the names or folders with which they were started."""
    return {name for engine in fleet.engines for name in engine.values_of("model")}
