"""What the processes of all engines say of themselves, put together: who agrees, who is gone, and who says nothing."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_graphfix import __version__
from vllm_graphfix.fix import State
from vllm_graphfix.records import (
    PRUNED_AFTER,
    Found,
    Identity,
    Liveness,
    Record,
    all_liveness,
    base_folder,
    identity,
    read,
    shown_path,
)
from vllm_graphfix.rollout import BUCKETS
from vllm_graphfix.settings import STATUS_DIR

if TYPE_CHECKING:
    import psutil
    from rich.console import Console, RenderableType

SCHEMA = 1
IN_ORDER, NOT_IN_ORDER, NOTHING = 0, 1, 3
_STOPPED_LATELY = PRUNED_AFTER
_STARTING = 120.0
"""Seconds in which a process of vLLM may not have come to its plugins: it imports torch first."""
_COUNTING = frozenset({State.ACTIVE.value, State.OBSERVING.value})
_BAD = frozenset({State.FAILED.value, State.CONFLICT.value, State.INCOMPATIBLE.value})
_MOST_MISSING = 1024
"""Ranks of one world that are told to be missing: a file may claim a world of any size, and another user's too."""
_SHORTEST_LOOK, _LONGEST_LOOK = 0.1, 86400.0


class FleetError(Exception):
    """There is nothing to look at, and what to do about it."""


@dataclass(frozen=True)
class Member:
    """A process that left a record."""

    found: Found
    liveness: Liveness
    age: float
    """Seconds since its record was last written or touched."""

    @property
    def record(self) -> Record:
        return self.found.record

    @property
    def live(self) -> bool:
        return self.liveness is Liveness.ALIVE

    @property
    def world(self) -> str:
        """Names the ranks that this one was compared with."""
        record = self.record
        if record.agreement is not None:
            return record.agreement.group
        return f"{record.rank.world_size}" if record.rank is not None else ""


@dataclass(frozen=True)
class Engine:
    """The processes that serve one model together, on however many hosts."""

    name: str
    members: tuple[Member, ...]
    live: bool = field(init=False)
    wrong: tuple[str, ...] = field(init=False)
    """What somebody has to see to."""
    notes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        wrong, notes = _judged(self)
        object.__setattr__(self, "live", any(member.live for member in self.members))
        object.__setattr__(self, "wrong", tuple(dict.fromkeys(wrong)))
        object.__setattr__(self, "notes", tuple(dict.fromkeys(notes)))

    @property
    def status(self) -> str:
        if any(member.record.problem is not None for member in self.members):
            return "stopped"
        if not self.live:
            return "ended" if any(member.liveness is Liveness.DEAD for member in self.members) else "silent"
        return "not in order" if self.wrong else "in order"

    @property
    def ranked(self) -> tuple[Member, ...]:
        """The ranks; live ones only, if any is."""
        ranked = [member for member in self.members if member.record.rank is not None]
        return tuple([member for member in ranked if member.live] or ranked)

    @property
    def tellers(self) -> tuple[Member, ...]:
        """The processes whose fixes count: the ranks, or before there are any, all."""
        return self.ranked or tuple([member for member in self.members if member.live] or self.members)

    @cached_property
    def _several_worlds(self) -> bool:
        return len({member.world for member in self.members if member.record.rank is not None}) > 1

    def name_of(self, member: Member) -> str:
        rank = member.record.rank
        if rank is None:
            return f"{member.record.role} {member.record.pid} on {member.record.host}"
        return f"rank {rank.rank}" + (f" of DP {rank.data_parallel_rank}" if self._several_worlds else "")

    def several(self, members: Iterable[Member]) -> str:
        """The *members* by name, ranks as ``ranks 0-3``."""
        names: list[str] = []
        ranks: dict[str, list[int]] = {}
        for member in members:
            if member.record.rank is None:
                names.append(self.name_of(member))
            else:
                ranks.setdefault(self.name_of(member).partition(" of ")[2], []).append(member.record.rank.rank)
        return ", ".join(
            [_ranks(numbers) + (f" of {world}" if world else "") for world, numbers in ranks.items()] + names
        )

    def told(self, key: str) -> tuple[Any, ...]:
        """The values of *key* in the records, live ones first; without None."""
        members = sorted(self.members, key=lambda member: not member.live)
        return tuple(dict.fromkeys(v for member in members if (v := getattr(member.record, key)) is not None))

    def states(self, fix: str) -> dict[str, list[Member]]:
        """State to the processes in it."""
        found: dict[str, list[Member]] = {}
        for member in self.tellers:
            if fix in member.record.fixes:
                found.setdefault(member.record.fixes[fix].state, []).append(member)
        return found

    def counts(self, fix: str) -> dict[str, int]:
        """How often each event of *fix* happened, over the ranks."""
        found: dict[str, int] = {}
        for member in self.tellers:
            for event, count in member.record.events.get(fix, {}).items():
                found[event] = found.get(event, 0) + count
        return found

    @property
    def fixes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for member in self.tellers for name in member.record.fixes))

    @property
    def expected(self) -> int:
        """Ranks of the worlds that are known here."""
        return sum(size for _, size in self._worlds().values())

    @property
    def agreeing(self) -> int | None:
        """Of these; None as long as none was compared."""
        compared = {m.world: m.record.agreement for m in self.ranked if m.record.agreement is not None}
        return sum(agreement.agreeing for agreement in compared.values()) if compared else None

    def missing(self) -> list[tuple[list[int], bool]]:
        """Ranks without a record, of each world, and whether the ranks that have one agreed with them."""
        found = []
        for members, size in self._worlds().values():
            there = {member.record.rank.rank for member in members if member.record.rank is not None}
            compared = [member.record.agreement for member in members if member.record.agreement is not None]
            absent = list(islice((rank for rank in range(size) if rank not in there), _MOST_MISSING))
            if absent:
                found.append((absent, any(agreement.agreeing == agreement.world_size for agreement in compared)))
        return found

    def _worlds(self) -> dict[tuple[str, int], tuple[list[Member], int]]:
        """The ranks that were compared with each other, dead ones included, and how many there should be."""
        ranked = [(member, member.record.rank) for member in self.members if member.record.rank is not None]
        # Before the comparison, worlds of one size are told apart by their ranks of data parallelism, if they have to be.
        uncompared = [rank.rank for member, rank in ranked if member.record.agreement is None]
        split = len(set(uncompared)) < len(uncompared)
        found: dict[tuple[str, int], tuple[list[Member], int]] = {}
        for member, rank in ranked:
            apart = split and member.record.agreement is None
            key = (member.world, rank.data_parallel_rank if apart else 0)
            members, size = found.get(key, ([], 0))
            found[key] = ([*members, member], max(size, rank.world_size))
        return found


@dataclass(frozen=True)
class Unrecorded:
    """A process of vLLM on this machine that has left no record here."""

    pid: int
    user: str
    command: str
    age: float
    reason: str
    elsewhere: bool
    """Its records go to another folder; who looks there is told about it."""


@dataclass(frozen=True)
class Fleet:
    """All that is seen from here."""

    folder: Path
    here: Identity
    engines: tuple[Engine, ...]
    unrecorded: tuple[Unrecorded, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    """Records that cannot be read."""

    @property
    def exit_code(self) -> int:
        if any(engine.wrong for engine in self.engines) or any(not one.elsewhere for one in self.unrecorded):
            return NOT_IN_ORDER
        return IN_ORDER if any(engine.live for engine in self.engines) else NOTHING


def look(folder: Path | None = None) -> Fleet:
    """The engines whose records are below *folder*, or where the environment says. Raises FleetError if there is no such folder."""
    base = folder if folder is not None else base_folder(os.environ)
    if re.fullmatch(r"vllm-graphfix-\d+", base.name) and _is_folder(base):
        base = base.parent
    if not _is_folder(base):
        source = "--dir" if folder is not None else STATUS_DIR
        place = shown_path(base)
        raise FleetError(
            f"{source}={place!r} is no folder that this user can look into; name the one that {STATUS_DIR} names for the engines"
        )
    if not os.access(base, os.R_OK | os.X_OK):
        raise FleetError(f"{shown_path(base)!r} is not for this user to read")
    reading, now, here = read(base), time.time(), identity()
    members = [
        Member(found, state, max(now - found.heartbeat, 0.0))
        for found, state in zip(reading.found, all_liveness(reading.found, now, here), strict=True)
    ]
    unrecorded, notes = _unrecorded(base, here, members, now)
    return Fleet(base, here, _engines(_without_left_engines(members)), unrecorded, notes, reading.problems)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long, a folder of somebody else
        return False


def _without_left_engines(members: Sequence[Member]) -> list[Member]:
    """Less the front-ends that have gone on to another engine, as a program does that makes one after the other.

    Their process lives and so does its record; an engine with a rank that lives is kept, since a program may have two at once.
    """
    latest: dict[tuple[str, int, int], float] = {}
    for member in members:
        process = member.record.host, member.record.pid, member.record.start_ticks
        latest[process] = max(latest.get(process, 0.0), member.record.written)
    serving = {member.record.engine for member in members if member.live and member.record.rank is not None}
    return [
        member
        for member in members
        if member.record.role != "front-end"
        or member.record.engine in serving
        or member.record.problem is not None
        or member.record.written >= latest[member.record.host, member.record.pid, member.record.start_ticks]
    ]


def _engines(members: Iterable[Member]) -> tuple[Engine, ...]:
    members = list(members)
    # Whose folder it is, too: other users may write what they like.
    leaders = {(m.found.path.parent, m.record.engine): m.record.leader for m in members if m.record.leader is not None}
    joined: dict[tuple[Path, str], list[Member]] = {}
    for member in members:
        place = member.found.path.parent
        name = leaders.get((place, member.record.engine)) or member.record.engine
        joined.setdefault((place, name), []).append(member)
    engines = [Engine(name, tuple(sorted(found, key=_order))) for (_, name), found in joined.items()]
    return tuple(sorted(engines, key=lambda engine: (not engine.live, engine.name)))


_ROLES = {"front-end": 0, "api-server": 1, "engine-core": 2, "worker": 3}


def _order(member: Member) -> tuple[int, int, int, str, int]:
    record = member.record
    rank = (record.rank.data_parallel_rank, record.rank.rank) if record.rank is not None else (-1, -1)
    return (_ROLES[record.role], *rank, record.host, record.pid)


# -- what is wrong -----------------------------------------------------------------------------------------------


def _judged(engine: Engine) -> tuple[list[str], list[str]]:
    """What somebody has to see to, and what is worth knowing, of one engine."""
    wrong: list[str] = []
    notes: list[str] = []
    for member in engine.members:
        if member.record.problem is not None:
            what = (
                f"stopped by vllm-graphfix {_ago(member.age)}, says {engine.name_of(member)}: {member.record.problem}"
            )
            (wrong if member.age <= _STOPPED_LATELY else notes).append(what)
    if not any(member.live for member in engine.members):
        return wrong, notes
    gone = [m for m in engine.members if m.liveness is Liveness.DEAD and m.record.problem is None]
    silent = [m for m in engine.members if m.liveness is Liveness.SILENT]
    if gone:
        wrong.append(f"dead: {engine.several(gone)}")
    if silent:
        wrong.append(f"not heard of for {min(m.age for m in silent):.0f} s: {engine.several(silent)}")
    if not any(member.record.rank is not None for member in engine.members):
        wrong.append(
            f"no rank has said anything: they are starting, or on machines whose records are not here ({STATUS_DIR} on shared storage)"
        )
    for absent, agreed in engine.missing():
        if agreed:
            verb = "is on a machine" if len(absent) == 1 else "are on machines"
            notes.append(
                f"{_ranks(absent)} {verb} whose records are not here: set {STATUS_DIR} to shared storage to see them; they agreed"
            )
        else:
            wrong.append(
                f"no record of {_ranks(absent)}: starting, without the plugin, or on machines whose records are not here: set {STATUS_DIR} to shared storage"
            )
    uncompared = [member for member in engine.ranked if member.record.agreement is None]
    if uncompared:
        notes.append(f"not compared with the others: {engine.several(uncompared)}")
    for member in engine.ranked:
        agreement = member.record.agreement
        if agreement is not None and agreement.difference is not None:
            wrong.append(f"the ranks do not agree. {agreement.difference}")
    for fix in engine.fixes:
        states = engine.states(fix)
        for state in sorted(_BAD & states.keys()):
            reason = states[state][0].record.fixes[fix].reason
            wrong.append(f"{fix} is {state} on {engine.several(states[state])}: {reason}")
        # `waiting` is a rank that does not run what the fix concerns, as a drafter.
        if len(states.keys() - {State.WAITING.value}) > 1:
            wrong.append(f"{fix} differs: {_by_name(engine, states)}")
    live = [member for member in engine.members if member.live]
    for what, value in (
        ("vLLM", lambda record: record.vllm),
        ("vllm-graphfix", lambda record: record.graphfix),
        ("in the rollout", lambda record: "yes" if record.decision.canary else "no"),
    ):
        values: dict[str, list[Member]] = {}
        for member in live:
            values.setdefault(value(member.record), []).append(member)
        if len(values) > 1:
            wrong.append(f"{what} differs: {_by_name(engine, values)}")
    return wrong, notes


def _by_name(engine: Engine, values: Mapping[str, Sequence[Member]]) -> str:
    return "; ".join(f"{value} on {engine.several(members)}" for value, members in values.items())


def _ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 2-5``."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    told = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {told}" if len(ordered) == 1 else f"ranks {told}"


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.0f} h ago"


# -- processes without a record ----------------------------------------------------------------------------------

_TITLE = re.compile(r"(\w+)::(APIServer|EngineCore|Worker)|ray::(RayWorker|EngineCore)|VLLM::")
"""What vLLM calls its processes (VLLM_PROCESS_NAME_PREFIX is the word in front), and Ray the actors that vLLM makes."""
_NO_PLUGINS = re.compile(r"\w+::DPCoordinator|multiprocessing\.(resource_tracker|forkserver)")
_SERVE = re.compile(r"^\S*python\S* (-m vllm\.entrypoints\.cli\.main|\S*/vllm) ")
"""How the operator's `vllm serve` reads in a list of processes."""
_PYTHON = re.compile(r"(python|pypy)[0-9.]*|vllm")


def _engine_command(command: Sequence[str]) -> bool:
    """Whether a command line is that of a server of vLLM: `vllm serve`, or a module of its entry points."""
    if not command or not _PYTHON.fullmatch(Path(command[0]).name):
        return False
    rest = list(command) if Path(command[0]).name == "vllm" else list(command[1:])
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        rest = rest[2 if rest[0] in ("-X", "-W") else 1 :]
    if not rest or {"-h", "--help", "--help=all"} & set(rest):
        return False
    module = rest[1] if rest[0] == "-m" and len(rest) > 1 else ""
    if module in ("vllm", "vllm.entrypoints.cli.main") or Path(rest[0]).name == "vllm":
        return rest[2 if module else 1 :][:1] in (["serve"], ["run-batch"])
    return module.startswith("vllm.entrypoints.")


def _unrecorded(
    base: Path, here: Identity, members: Iterable[Member], now: float
) -> tuple[tuple[Unrecorded, ...], tuple[str, ...]]:
    import psutil

    recorded = {(m.record.pid_namespace, m.record.pid) for m in members if m.live and m.record.boot == here.boot}
    processes: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["ppid", "cmdline", "create_time", "uids"]):
        process.info["cmdline"] = [
            word for word in process.info["cmdline"] or () if word
        ]  # a title is followed by empty ones
        processes[process.pid] = process
    vllm = {pid for pid, process in processes.items() if _is_vllm(process.info["cmdline"])}
    known = {pid for pid in vllm if _inside(pid, here) in recorded}
    for pid, process in processes.items():
        # A child that has no title yet, of a server that is without the plugin; other servers have helpers that need none.
        if process.info["ppid"] in vllm - known and "from multiprocessing.spawn" in " ".join(process.info["cmdline"]):
            vllm.add(pid)
    mine = [
        processes[pid]
        for pid in sorted(vllm - known)
        if os.geteuid() in (0, getattr(processes[pid].info["uids"], "effective", None))
    ]
    foreign = len(vllm - known) - len(mine)
    notes = (f"{foreign} processes of vLLM belong to other users, whose records are theirs to read",) if foreign else ()
    found = []
    for process in mine:
        age = max(now - (process.info["create_time"] or now), 0.0)
        environment, command = _started_with(process, processes)
        folder = base_folder(environment)
        elsewhere = bool(environment) and _resolved(folder) != _resolved(base)
        reason = (
            f"its records go to {folder}: vllm-graphfix fleet --dir {shlex.quote(str(folder))}"
            if elsewhere
            else _reason(process.pid, environment, command, age)
        )
        told = _shortened(" ".join(process.info["cmdline"]))
        found.append(Unrecorded(process.pid, _user(process), told, age, _shortened(reason), elsewhere))
    return tuple(found), notes


def _is_vllm(command: Sequence[str]) -> bool:
    told = " ".join(command)
    return not _NO_PLUGINS.search(told) and (bool(_TITLE.match(told)) or _engine_command(command))


def _inside(pid: int, here: Identity) -> tuple[str, int]:
    """A process as it sees itself: its namespace of process ids, and its id there."""
    try:
        namespace = str(Path(f"/proc/{pid}/ns/pid").readlink())
        told = re.search(r"^NSpid:.*\s(\d+)$", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, ValueError):
        return here.pid_namespace, pid
    return namespace, int(told[1]) if told else pid


def _reason(pid: int, environment: Mapping[str, str], command: Sequence[str], age: float) -> str:
    """Why the process *pid* has no record, as far as can be seen from outside."""
    from vllm_graphfix.status import filtered_out

    filtered = filtered_out(environment)
    if filtered is not None:
        return filtered
    if _file_systems(pid) not in (None, _file_systems(os.getpid())):
        return f"it has file systems of its own, as in a container or under systemd's PrivateTmp: look from inside, or set {STATUS_DIR} to a folder that it shares with you"
    if command and "PYTHONPATH" not in environment and _lacks_us(Path(command[0])):
        return f"vllm-graphfix is not installed for {command[0]}"
    if age < _STARTING:
        return "it has just started, and may not have loaded its plugins"
    return "vllm-graphfix is not loaded, or could not write its record: the log of this process says which"


def _started_with(process: psutil.Process, processes: Mapping[int, psutil.Process]) -> tuple[dict[str, str], list[str]]:
    """Environment and command line; a process that has given itself a title has lost both, and its parent's are as good."""
    import psutil

    current: psutil.Process | None = process
    for _ in range(10):
        if current is None:
            break
        try:
            environment = current.environ()
        except (psutil.Error, OSError):
            break
        if environment:
            return environment, current.info["cmdline"]
        current = processes.get(current.info["ppid"])
    return {}, []


def _file_systems(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/mnt").readlink())
    except OSError:
        return None


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path


def _lacks_us(python: Path) -> bool:
    """Whether the installation of *python* can be looked at and this package is not in it."""
    prefix = python.parent.parent
    if not python.is_absolute() or prefix == Path(sys.prefix):
        return False
    try:
        sites = list(prefix.glob("lib/python3*/site-packages"))
        return any((site / "vllm").is_dir() for site in sites) and not any(
            next(site.glob("vllm_graphfix-*.dist-info"), None) for site in sites
        )
    except (OSError, ValueError):  # a process may call itself by any name
        return False


def _user(process: psutil.Process) -> str:
    import psutil

    try:
        return process.username()
    except (psutil.Error, KeyError, OSError):
        return "?"


def _shortened(command: str) -> str:
    told = "".join(letter if letter.isprintable() else "?" for letter in command)
    return told if len(told) <= 200 else f"{told[:199]}…"


# -- for machines ------------------------------------------------------------------------------------------------


def as_json(fleet: Fleet) -> dict[str, Any]:
    """The stable interface; `SCHEMA` changes with it."""
    return {
        "schema": SCHEMA,
        "graphfix": __version__,
        "host": fleet.here.host,
        "folder": str(fleet.folder),
        "exit_code": fleet.exit_code,
        "engines": [_engine_json(engine) for engine in fleet.engines],
        "unrecorded": [
            {
                "pid": one.pid,
                "user": one.user,
                "command": one.command,
                "age": round(one.age, 1),
                "reason": one.reason,
                "elsewhere": one.elsewhere,
            }
            for one in fleet.unrecorded
        ],
        "notes": list(fleet.notes),
        "problems": list(fleet.problems),
    }


def _engine_json(engine: Engine) -> dict[str, Any]:
    decided = engine.tellers[0].record.decision
    return {
        "engine": engine.name,
        "status": engine.status,
        "live": engine.live,
        "wrong": list(engine.wrong),
        "notes": list(engine.notes),
        "model": next(iter(engine.told("model")), None),
        "vllm": list(engine.told("vllm")),
        "graphfix": list(engine.told("graphfix")),
        "canary": decided.canary,
        "bucket": decided.bucket,
        "percentage": decided.percentage,
        "master": decided.master,
        "hosts": list(engine.told("host")),
        "ranks": {
            "expected": engine.expected,
            "recorded": len(engine.ranked),
            "agreeing": engine.agreeing,
            "missing": [{"ranks": absent, "agreed": agreed} for absent, agreed in engine.missing()],
        },
        "processes": [
            {
                "engine": member.record.engine,
                "role": member.record.role,
                "rank": member.record.rank._asdict() if member.record.rank is not None else None,
                "host": member.record.host,
                "pid": member.record.pid,
                "liveness": member.liveness.value,
                "age": round(member.age, 1),
                "problem": member.record.problem,
            }
            for member in engine.members
        ],
        "fixes": {
            fix: {
                "states": {
                    state: [engine.name_of(member) for member in members]
                    for state, members in engine.states(fix).items()
                },
                "mode": _first(engine, fix).mode,
                "reason": _first(engine, fix).reason,
                "events": engine.counts(fix),
            }
            for fix in engine.fixes
        },
    }


def _first(engine: Engine, fix: str) -> Any:
    """The report of the first process in the state that matters most."""
    states = engine.states(fix)
    bad = sorted(states, key=lambda state: (state not in _BAD, state == State.WAITING.value))
    return states[bad[0]][0].record.fixes[fix]


# -- for eyes ----------------------------------------------------------------------------------------------------

_STATUS_COLOURS = {
    "in order": "green",
    "not in order": "bold red",
    "stopped": "bold red",
    "ended": "dim",
    "silent": "dim",
}
_STATE_COLOURS = {
    State.ACTIVE.value: "bold green",
    State.OBSERVING.value: "cyan",
    State.OFF.value: "yellow",
    State.NOT_IN_CANARY.value: "yellow",
    State.NOT_NEEDED.value: "dim",
    State.WAITING.value: "dim",
    **dict.fromkeys(_BAD, "bold red"),
}
_LIVENESS_COLOURS = {Liveness.ALIVE: "green", Liveness.DEAD: "red", Liveness.SILENT: "yellow"}


def shown(fleet: Fleet) -> RenderableType:
    from rich.console import Group
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    for engine in fleet.engines:
        parts += [*_engine_shown(engine), Text()]
    if fleet.unrecorded:
        parts.append(Text.from_markup("[bold]processes of vLLM without a record[/]"))
        reasons: dict[str, list[Unrecorded]] = {}
        for one in fleet.unrecorded:
            reasons.setdefault(one.reason, []).append(one)
        for reason, processes in reasons.items():
            mark = "[yellow]![/]" if all(one.elsewhere for one in processes) else "[red]✗[/]"
            table = Table("pid", "user", "started", box=None, pad_edge=False, expand=True)
            table.add_column("command", ratio=1, no_wrap=True)  # the others keep their width
            for one in processes:
                table.add_row(str(one.pid), escape(one.user), _ago(one.age), escape(_SERVE.sub("vllm ", one.command)))
            parts += [Padding(Text.from_markup(f"{mark} {escape(reason)}"), (0, 0, 0, 2)), Padding(table, (0, 0, 0, 4))]
        parts.append(Text())
    if not fleet.engines and not fleet.unrecorded:
        parts.append(
            Text.from_markup(
                f"No records in {escape(shown_path(fleet.folder))}, and no process of vLLM on {escape(fleet.here.host)}. Engines elsewhere are seen "
                f"if {STATUS_DIR} is a folder of shared storage, for them and here."
            )
        )
    parts += [Text.from_markup(f"[yellow]![/] {escape(note)}") for note in (*fleet.notes, *fleet.problems)]
    return Group(*parts)


def _engine_shown(engine: Engine) -> list[RenderableType]:
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    decided = engine.tellers[0].record.decision
    model = escape(next(iter(engine.told("model")), "model not known yet"))
    dim = "" if engine.live else "dim"
    rollout = "in the rollout" if decided.canary else "[yellow]not in the rollout[/]"
    if decided.bucket is not None and decided.percentage is not None:
        rollout += f" of {decided.percentage:g} % (bucket {decided.bucket} of {BUCKETS:,})"
    chosen = decided.percentage is not None or not decided.canary
    facts = [
        f"vLLM {escape(', '.join(engine.told('vllm')))}",
        f"vllm-graphfix {escape(', '.join(engine.told('graphfix')))}",
        *([f"VLLM_GRAPHFIX={escape(decided.master)}"] if decided.master != "on" else []),
        *([rollout] if chosen else []),
        f"on {escape(', '.join(engine.told('host')))}",
    ]
    head = f"[bold]{model}[/]  engine {engine.name}  [{_STATUS_COLOURS[engine.status]}]{engine.status}[/]"
    parts: list[RenderableType] = [
        Text.from_markup(head, style=dim),
        Padding(Text.from_markup(", ".join(facts), style=dim), (0, 0, 0, 2)),
    ]
    if engine.live and engine.agreeing is not None and engine.expected > 1:
        colour = "green" if engine.agreeing == engine.expected else "red"
        agree = f"[{colour}]{engine.agreeing} of {engine.expected} ranks agree[/]"
        parts.append(Padding(Text.from_markup(agree), (0, 0, 0, 2)))
    parts += [Padding(Text.from_markup(f"[red]✗ {escape(what)}[/]"), (0, 0, 0, 2)) for what in engine.wrong]
    parts += [Padding(Text.from_markup(f"[yellow]![/] {escape(what)}"), (0, 0, 0, 2)) for what in engine.notes]
    if not engine.live:
        for what in (Liveness.DEAD, Liveness.SILENT):
            if left := [member for member in engine.members if member.liveness is what]:
                heard = [member.age for member in left if member.record.rank is not None]
                told = f"{what.value}: {engine.several(left)}" + (f", heard of {_ago(min(heard))}" if heard else "")
                parts.append(Padding(Text(told, style="dim"), (0, 0, 0, 2)))
        return parts
    processes = Table("process", "rank", "host", "pid", "", "heard of", box=None, pad_edge=False)
    for member in engine.members:
        record = member.record
        processes.add_row(
            record.role,
            engine.name_of(member).removeprefix("rank ") if record.rank is not None else "",
            escape(record.host),
            str(record.pid),
            f"[{_LIVENESS_COLOURS[member.liveness]}]{member.liveness.value}[/]",
            # Ranks are heard of every few seconds. The others have nothing more to say after their start.
            _ago(member.age) if record.rank is not None or not member.live else "",
        )
    fixes = Table("fix", "mode", "state", "events", "because", box=None, pad_edge=False)
    fixes.columns[-1].overflow = "fold"  # names of modules are long words
    alike: dict[tuple[str, ...], list[str]] = {}
    for fix in engine.fixes:
        states, first = engine.states(fix), _first(engine, fix)
        several = len(states) > 1
        counts = bool(_COUNTING & states.keys())
        account: tuple[str, ...] = (
            first.mode,
            "\n".join(
                f"[{_STATE_COLOURS[state]}]{state}[/]" + (f" ({escape(engine.several(members))})" if several else "")
                for state, members in states.items()
            ),
            "\n".join(f"{escape(event)} {count}" for event, count in engine.counts(fix).items() if counts or count),
            escape(first.reason),
        )
        alike.setdefault(account, []).append(f"[bold]{escape(fix)}[/]")
    for account, names in alike.items():
        fixes.add_row("\n".join(names), *account)
    return [*parts, Padding(processes, (0, 0, 0, 2)), Padding(fixes, (0, 0, 0, 2))]


def watch(folder: Path | None, seconds: float, console: Console) -> None:
    """Looks again every so many *seconds*, until it is interrupted. Raises FleetError as `look` does."""
    from rich.live import Live

    if not _SHORTEST_LOOK <= seconds <= _LONGEST_LOOK:
        raise FleetError(f"--watch looks every {_SHORTEST_LOOK:g} to {_LONGEST_LOOK:g} seconds, not every {seconds:g}")
    try:
        if not console.is_terminal:
            while True:
                console.print(shown(look(folder)))
                time.sleep(seconds)
        with Live(shown(look(folder)), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(seconds)
                live.update(shown(look(folder)), refresh=True)
    except KeyboardInterrupt:
        return
