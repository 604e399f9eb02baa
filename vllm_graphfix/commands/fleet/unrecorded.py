"""Processes of vLLM on this machine without a record, and why, as far as can be seen from outside."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_graphfix.commands.fleet.engine import YOUNG, user_name
from vllm_graphfix.commands.fleet.member import Member
from vllm_graphfix.commands.redaction import command_line
from vllm_graphfix.records import Identity, base_folder
from vllm_graphfix.settings.environment import STATUS_DIR

if TYPE_CHECKING:
    import psutil

TITLE = re.compile(r"(\w+)::(APIServer|EngineCore|Worker)|ray::(RayWorker|EngineCore)|VLLM::")
"""What vLLM calls its processes (VLLM_PROCESS_NAME_PREFIX is the word in front), and Ray the actors that vLLM makes."""
# Searched in every user's command lines: `\w+` would take quadratic time, minutes for a long argument.
_NO_PLUGINS = re.compile(r"\w::DPCoordinator|multiprocessing\.(resource_tracker|forkserver)")
_PYTHON = re.compile(r"(python|pypy)[0-9.]*|vllm")
_JUST_STARTED = "it has just started and may not have loaded its plugins yet"


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
    starting: bool = False
    """It is too young to be missed."""


def is_engine_command(command: Sequence[str]) -> bool:
    """Return True for the command line of a server of vLLM: `vllm serve`, or a module of its entry points."""
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


def without_record(
    base: Path, here: Identity, members: Iterable[Member], now: float
) -> tuple[tuple[Unrecorded, ...], tuple[str, ...]]:
    import psutil

    recorded: dict[tuple[str, int], list[Member]] = {}
    for member in members:
        if member.record.boot == here.boot:
            recorded.setdefault((member.record.pid_namespace, member.record.pid), []).append(member)
    processes: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["ppid", "cmdline", "create_time", "uids"]):
        process.info["cmdline"] = [
            word for word in process.info["cmdline"] or () if word
        ]  # a title is followed by empty ones
        processes[process.pid] = process
    vllm = {pid for pid, process in processes.items() if _is_vllm(process.info["cmdline"])}
    known = {
        pid
        for pid in vllm
        if any(m.live and _is_own(m, processes[pid]) for m in recorded.get(_own_view(pid, here), ()))
    }
    for pid, process in processes.items():
        # A child that has no title yet, of a server that is without the plugin; other servers have helpers that need
        # none.
        if process.info["ppid"] in vllm - known and "from multiprocessing.spawn" in " ".join(process.info["cmdline"]):
            vllm.add(pid)
    mine = [
        processes[pid]
        for pid in sorted(vllm - known)
        if os.geteuid() in (0, getattr(processes[pid].info["uids"], "effective", None))
    ]
    foreign = len(vllm - known) - len(mine)
    notes = (
        (f"{foreign} vLLM processes belong to other users, and only those users (or root) can read their records",)
        if foreign
        else ()
    )
    unrecorded = []
    for process in mine:
        age = max(now - (process.info["create_time"] or now), 0.0)
        environment, command = _environment_and_command(process, processes)
        folder = base_folder(environment)
        elsewhere = bool(environment) and _resolved(folder) != _resolved(base)
        reason = (
            f"its records are in {folder}: vllm-graphfix fleet --dir {shlex.quote(str(folder))}"
            if elsewhere
            else _reason(process.pid, environment, command, age)
        )
        others = [m for m in recorded.get(_own_view(process.pid, here), ()) if not _is_own(m, process)]
        if others:
            users = sorted({user_name(m.found.owner) for m in others if m.found.owner is not None})
            reason += f"; a record of {', '.join(users)} names it, and is not its own"
        command_text = _printable_and_cut(command_line(process.info["cmdline"]))
        starting = reason.startswith(_JUST_STARTED)
        unrecorded.append(
            Unrecorded(process.pid, _user(process), command_text, age, _printable_and_cut(reason), elsewhere, starting)
        )
    return tuple(unrecorded), notes


def _is_own(member: Member, process: psutil.Process) -> bool:
    """Tell if the user of *process* wrote the record. Another user may write one that names its process."""
    return member.found.owner in (None, getattr(process.info["uids"], "effective", member.found.owner))


def _is_vllm(command: Sequence[str]) -> bool:
    text = " ".join(command)
    return not _NO_PLUGINS.search(text) and (bool(TITLE.match(text)) or is_engine_command(command))


def _own_view(pid: int, here: Identity) -> tuple[str, int]:
    """A process as it sees itself: its namespace of process ids, and its id there."""
    try:
        namespace = str(Path(f"/proc/{pid}/ns/pid").readlink())
        match = re.search(r"^NSpid:.*\s(\d+)$", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, ValueError):
        return here.pid_namespace, pid
    return namespace, int(match[1]) if match else pid


def _reason(pid: int, environment: Mapping[str, str], command: Sequence[str], age: float) -> str:
    """Return why the process *pid* has no record, as far as that shows from outside."""
    from vllm_graphfix.commands.status import why_not_loaded

    filtered = why_not_loaded(environment)
    if filtered is not None:
        return filtered
    if _file_systems(pid) not in (None, _file_systems(os.getpid())):
        return (
            "it has its own file systems, as in a container or under systemd's PrivateTmp: run `vllm-graphfix fleet` "
            f"inside, or set {STATUS_DIR} to a folder that both sides share"
        )
    if command and "PYTHONPATH" not in environment and _lacks_plugin(Path(command[0])):
        return f"vllm-graphfix is not installed for {command[0]}"
    if age < YOUNG:
        return _JUST_STARTED
    return "vllm-graphfix is not loaded, or could not write its record: see the log of this process"


def _environment_and_command(
    process: psutil.Process, processes: Mapping[int, psutil.Process]
) -> tuple[dict[str, str], list[str]]:
    """The environment and the command line of *process*.

    A process that has given itself a title has lost both, and its parent's are as good.
    """
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


def _lacks_plugin(python: Path) -> bool:
    """Return True if the installation of *python* can be read and lacks this package."""
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


def _printable_and_cut(command: str) -> str:
    text = "".join(letter if letter.isprintable() else "?" for letter in command)
    return text if len(text) <= 200 else f"{text[:199]}…"
