"""Status records: one small file a process, and reading those of all processes together.

A folder may be hostile, full, gone or hanging. Writing raises `OSError`, reading turns what is wrong into text, and `Reporter` does both
without its caller ever waiting.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, overload

from vllm_graphfix.fix import Mode, State
from vllm_graphfix.settings import STATUS_DIR, Master, printable

SCHEMA = 1
DEFAULT_FOLDER = "/tmp"  # noqa: S108  # the folder in it is ours alone, and looked at before it is used
ROLES = ("front-end", "api-server", "engine-core", "worker")

LARGEST = 64 * 1024
"""Bytes of a record."""
FILES = 4096
"""Records that are read at once."""
_ENTRIES = 16 * FILES
"""Names that are looked at in one folder."""
_TEXT = 1500
"""Characters of a text: nine of them, of four bytes each, fit in a record."""
_PATH = 300
"""Characters of a folder's path, in what is said about it."""
_NAMES = 64
"""Fixes of a record, events of a fix."""

HEARTBEAT = 10.0
SILENT_AFTER = 60.0
PRUNED_AFTER = 3600.0
_FORGOTTEN_AFTER = 7 * 24 * 3600.0
_SLOW = 10.0
_ENGINES = 64
"""Records of one process, which may make one engine after the other."""

_FOLDER = re.compile(r"vllm-graphfix-(0|[1-9][0-9]{0,9})")
_FILE = re.compile(r"[0-9a-f]{16}-[A-Za-z0-9._-]{1,64}-[0-9]{1,10}\.json")
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}-(?P<host>[A-Za-z0-9._-]{1,64})-[0-9]{1,10}\.json\.[0-9a-f]{8}")
_ENGINE = re.compile(r"[0-9a-f]{16}")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TOKEN = re.compile(r"[!-~]{1,128}")
_WORD = re.compile(r"[!-~]{0,128}")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_MASTERS = frozenset(master.value for master in Master)
_MODES = frozenset(mode.value for mode in Mode)
_STATES = frozenset(state.value for state in State)
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class RecordError(ValueError):
    """What is not a status record, and why."""


class Rank(NamedTuple):
    rank: int
    local_rank: int | None
    world_size: int
    data_parallel_rank: int


class Decided(NamedTuple):
    """The decision of the engine, as this process has it."""

    canary: bool
    bucket: int | None
    percentage: float | None
    master: str
    inherited: bool


class FixReport(NamedTuple):
    mode: str
    state: str
    reason: str


class Agreement(NamedTuple):
    """What the comparison before the first capture came to."""

    group: str
    world_size: int
    agreeing: int
    difference: str | None


class Record(NamedTuple):
    """What one process says of itself, for one engine."""

    graphfix: str
    vllm: str
    engine: str
    host: str
    pid: int
    start_ticks: int
    boot: str
    pid_namespace: str
    role: str
    model: str | None
    rank: Rank | None
    decision: Decided
    fixes: Mapping[str, FixReport]
    events: Mapping[str, Mapping[str, int]]
    agreement: Agreement | None = None
    leader: str | None = None
    problem: str | None = None
    serves_metrics: bool = False
    """Whether /metrics of this process tells of its engine."""
    written: float = 0.0

    @property
    def file_name(self) -> str:
        return f"{self.engine}-{_reduced(self.host)}-{self.pid}.json"

    def as_json(self) -> dict[str, Any]:
        """The file's content; long texts are cut, so that it fits."""
        return {
            "schema": SCHEMA,
            "graphfix": _fitting(self.graphfix),
            "vllm": _fitting(self.vllm),
            "engine": self.engine,
            "host": _reduced(self.host),
            "pid": self.pid,
            "start_ticks": self.start_ticks,
            "boot": self.boot,
            "pid_namespace": self.pid_namespace,
            "role": self.role,
            "model": _fitting(self.model),
            "rank": self.rank and self.rank._asdict(),
            "decision": self.decision._asdict(),
            "fixes": {name: fix._replace(reason=_fitting(fix.reason))._asdict() for name, fix in self.fixes.items()},
            "events": {name: dict(events) for name, events in self.events.items()},
            "agreement": self.agreement
            and self.agreement._replace(difference=_fitting(self.agreement.difference))._asdict(),
            "leader": self.leader,
            "problem": _fitting(self.problem),
            "serves_metrics": self.serves_metrics,
            "written": self.written,
        }

    @classmethod
    def from_json(cls, value: object) -> Record:
        """The record that *value* is, text made printable. Raises RecordError; keys that this version does not know are left out."""
        given = _Object(value, "the record")
        schema = given.whole("schema")
        if schema > SCHEMA:
            raise RecordError(
                f"it has schema {schema}, and this vllm-graphfix knows {SCHEMA}: look at it with a newer one"
            )
        if schema != SCHEMA:
            given.refuse("schema")
        rank, agreement = given.maybe("rank"), given.maybe("agreement")
        decision = _Object(given.get("decision"), "decision")
        fixes = {name: _Object(fix, f"fixes.{name}") for name, fix in given.named("fixes")}
        events = {name: _Object(counts, f"events.{name}") for name, counts in given.named("events")}
        return cls(
            graphfix=given.text("graphfix"),
            vllm=given.text("vllm"),
            engine=given.name("engine", _ENGINE),
            host=given.name("host", _HOST),
            pid=given.whole("pid"),
            start_ticks=given.whole("start_ticks"),
            boot=given.name("boot", _WORD),
            pid_namespace=given.name("pid_namespace", _WORD),
            role=given.one_of("role", ROLES),
            model=given.text("model") if given.has("model") else None,
            rank=None
            if rank is None
            else Rank(
                rank.whole("rank"),
                rank.whole("local_rank") if rank.has("local_rank") else None,
                rank.whole("world_size"),
                rank.whole("data_parallel_rank"),
            ),
            decision=Decided(
                decision.truth("canary"),
                decision.whole("bucket") if decision.has("bucket") else None,
                decision.number("percentage", 100.0) if decision.has("percentage") else None,
                decision.one_of("master", _MASTERS),
                decision.truth("inherited"),
            ),
            fixes={
                name: FixReport(fix.one_of("mode", _MODES), fix.one_of("state", _STATES), fix.text("reason"))
                for name, fix in fixes.items()
            },
            events={name: {event: counts.whole(event) for event in counts.names()} for name, counts in events.items()},
            agreement=None
            if agreement is None
            else Agreement(
                agreement.name("group", _TOKEN),
                agreement.whole("world_size"),
                agreement.whole("agreeing"),
                agreement.text("difference") if agreement.has("difference") else None,
            ),
            leader=given.name("leader", _ENGINE) if given.has("leader") else None,
            problem=given.text("problem") if given.has("problem") else None,
            serves_metrics=given.truth("serves_metrics") if given.has("serves_metrics") else False,
            written=given.number("written", 1e11),
        )


class _Object:
    """A JSON object whose values are what they have to be, or RecordError says which is not."""

    __slots__ = ("_place", "_value")

    def __init__(self, value: object, place: str) -> None:
        if not isinstance(value, dict):
            raise RecordError(f"{place} is {_shown(value)}, and not an object")
        self._value: dict[str, object] = value
        self._place = "" if place == "the record" else f"{place}."

    def refuse(self, key: str, wanted: str = "") -> NoReturn:
        if key not in self._value:
            raise RecordError(f"{self._place}{key} is missing")
        raise RecordError(f"{self._place}{key} is {_shown(self._value[key])}" + (wanted and f", and not {wanted}"))

    def get(self, key: str) -> object:
        if key not in self._value:
            self.refuse(key)
        return self._value[key]

    def has(self, key: str) -> bool:
        return self._value.get(key) is not None

    def maybe(self, key: str) -> _Object | None:
        return _Object(self._value[key], f"{self._place}{key}") if self.has(key) else None

    def names(self) -> Collection[str]:
        if len(self._value) > _NAMES:
            raise RecordError(f"{self._place[:-1]} has {len(self._value)} entries, and not at most {_NAMES}")
        for name in self._value:
            if not _NAME.fullmatch(name):
                raise RecordError(f"{self._place[:-1]} has an entry named {_shown(name)}")
        return self._value.keys()

    def named(self, key: str) -> Collection[tuple[str, object]]:
        inner = _Object(self.get(key), f"{self._place}{key}")
        inner.names()
        return inner._value.items()

    def whole(self, key: str) -> int:
        value = self._value.get(key)
        if type(value) is not int or not 0 <= value < 2**63:
            self.refuse(key, "a whole number from 0 on")
        return value

    def number(self, key: str, most: float) -> float:
        value = self._value.get(key)
        if type(value) not in (int, float) or not 0 <= value <= most:  # type: ignore[operator]  # NaN compares as false
            self.refuse(key, f"a number from 0 to {most:g}")
        return float(value)  # type: ignore[arg-type]

    def truth(self, key: str) -> bool:
        value = self._value.get(key)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def text(self, key: str) -> str:
        value = self._value.get(key)
        if not isinstance(value, str) or len(value) > _TEXT:
            self.refuse(key, f"a text of at most {_TEXT} characters")
        return printable(value)

    def name(self, key: str, pattern: re.Pattern[str]) -> str:
        value = self._value.get(key)
        if not isinstance(value, str) or not pattern.fullmatch(value):
            self.refuse(key, f"of the form {pattern.pattern}")
        return value

    def one_of(self, key: str, values: Collection[str]) -> str:
        value = self._value.get(key)
        if not isinstance(value, str) or value not in values:
            self.refuse(key, f"one of {', '.join(sorted(values))}")
        return value


def _shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return f"a JSON {'object' if isinstance(value, dict) else 'array'}"
    told = ascii(value)
    return told if len(told) <= 50 else f"{told[:49]}…"


@overload
def _fitting(text: str) -> str: ...
@overload
def _fitting(text: str | None) -> str | None: ...
def _fitting(text: str | None) -> str | None:
    if text is None:
        return None
    text = printable(text)
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"


def shown_path(path: Path) -> str:
    """For one line of a log."""
    text = printable(str(path))
    return text if len(text) <= _PATH else f"{text[: _PATH // 2]}…{text[1 - _PATH // 2 :]}"


def _reduced(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", host)[:64] or "unknown"


# -- this process ------------------------------------------------------------------------------------------------


class Identity(NamedTuple):
    """Which process this is. Where there is no /proc, start_ticks is 0 and boot and pid_namespace are empty."""

    host: str
    pid: int
    start_ticks: int
    boot: str
    pid_namespace: str


def identity() -> Identity:
    pid = os.getpid()
    seen = _seen(pid)
    boot = namespace = ""
    with suppress(OSError, ValueError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return Identity(_reduced(os.uname().nodename), pid, seen.start_ticks if seen else 0, boot, namespace)


class _Seen(NamedTuple):
    state: str
    start_ticks: int


def _seen(pid: int) -> _Seen | None:
    """What /proc says of the process *pid*; None if it does not."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # The name of the program is in brackets and may hold anything, brackets and spaces included.
        fields = os.read(descriptor, 4096).rpartition(b")")[2].split()
        return _Seen(fields[0].decode("ascii"), int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None
    finally:
        os.close(descriptor)


# -- one record --------------------------------------------------------------------------------------------------


def base_folder(environment: Mapping[str, str]) -> Path:
    return Path(environment.get(STATUS_DIR, "").strip() or DEFAULT_FOLDER)


def own_folder(base: Path) -> Path:
    return base / f"vllm-graphfix-{os.geteuid()}"


def write(base: Path, record: Record) -> None:
    """Puts *record* in place of what this process said before: whole or not at all. Raises OSError."""
    data = json.dumps(record.as_json(), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    with _own(base, "write a status record", make=True) as folder:
        if len(data) > LARGEST:
            raise OSError(errno.EFBIG, f"it has {len(data)} bytes, and at most {LARGEST} are read")
        temporary = f".{record.file_name}.{os.urandom(4).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, record.file_name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise


def touch(base: Path, record: Record) -> None:
    """Says that *record* still holds. Raises OSError; FileNotFoundError if the record is gone."""
    with _own(base, "touch a status record") as folder:
        os.utime(record.file_name, dir_fd=folder, follow_symlinks=False)


def remove(base: Path, record: Record) -> None:
    """Raises OSError; a record that is gone already is none."""
    with suppress(FileNotFoundError), _own(base, "remove a status record") as folder:
        os.unlink(record.file_name, dir_fd=folder)


@contextmanager
def _own(base: Path, doing: str, *, make: bool = False) -> Iterator[int]:
    """A descriptor of our folder, which cannot be exchanged for another one while it is used."""
    path = own_folder(base)
    try:
        try:
            folder = os.open(path, _OPEN_FOLDER)
        except FileNotFoundError:
            if not make:
                raise
            with suppress(FileExistsError):  # another process of the engine was faster
                path.mkdir(0o700)
            folder = os.open(path, _OPEN_FOLDER)
        try:
            _check(folder, os.geteuid())
            yield folder
        finally:
            os.close(folder)
    except OSError as error:
        raise OSError(error.errno, f"cannot {doing} in {shown_path(path)}: {_why(error)}") from error


def _check(folder: int, owner: int) -> None:
    """Raises OSError if the opened *folder* is not *owner*'s alone."""
    found = os.fstat(folder)
    if found.st_uid != owner:
        raise PermissionError(errno.EPERM, f"it belongs to uid {found.st_uid}, not {owner}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            errno.EPERM, f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o}): chmod 700"
        )


def _why(error: OSError) -> str:
    if error.errno in (errno.ENOTDIR, errno.ELOOP):
        return "it is a link, or no folder"
    return error.strerror or str(error)


# -- all records -------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """A record that was read."""

    record: Record
    heartbeat: float
    """When it was last written or touched, in seconds of the epoch."""
    path: Path
    inode: int = 0
    """Of the file: another one whenever the record was written anew, the same when it was touched."""


class Reading(NamedTuple):
    found: tuple[Found, ...]
    problems: tuple[str, ...]
    """What could not be read, a line for each folder."""


def read(base: Path, *, own: bool = False, first: str = "", skip: Collection[tuple[str, int]] = frozenset()) -> Reading:
    """The records in every `vllm-graphfix-<uid>` below *base* that this user may read, its own ones first. Never raises.

    With *own*, this user's only: nobody else can have written these. Those of the engine *first* are read before all others, those
    in *skip*, by name and inode, not at all.
    """
    found: list[Found] = []
    problems: list[str] = []
    mine = own_folder(base)
    folders = [mine]
    if not own:
        try:
            with os.scandir(base) as entries:
                seen = [entry.name for entry in islice(entries, _ENTRIES + 1)]
            if len(seen) > _ENTRIES:
                problems.append(f"{shown_path(base)}: only its first {_ENTRIES} entries were looked at")
            folders += sorted(base / name for name in seen if _FOLDER.fullmatch(name) and name != mine.name)
        except OSError as error:
            problems.append(f"{shown_path(base)}: {_why(error)}")
    refused: list[str] = []
    for path in folders:
        try:
            folder = os.open(path, _OPEN_FOLDER)
        except FileNotFoundError:
            continue
        except PermissionError:
            refused.append(f"{shown_path(path)} is not for this user to read")
            continue
        except OSError as error:
            refused.append(f"{shown_path(path)}: {_why(error)}")
            continue
        try:
            uid = int(path.name.rpartition("-")[2])
            _check(folder, uid)
            _read_folder(folder, path, uid, found, problems, first, skip)
        except OSError as error:
            refused.append(f"{shown_path(path)}: {_why(error)}")
        finally:
            os.close(folder)
    problems += _in_one_line(refused, "folders")
    return Reading(tuple(found), tuple(problems))


def _read_folder(
    folder: int,
    path: Path,
    uid: int,
    found: list[Found],
    problems: list[str],
    first: str,
    skip: Collection[tuple[str, int]],
) -> None:
    wrong: list[str] = []
    with os.scandir(folder) as entries:
        names = [
            entry.name
            for entry in islice(entries, _ENTRIES)
            if not entry.name.startswith(".") and (not skip or (entry.name, entry.inode()) not in skip)
        ]
    names.sort(key=lambda name: (not (first and name.startswith(first)), name))
    for number, name in enumerate(names):
        if len(found) + len(wrong) >= FILES:
            problems.append(
                f"{shown_path(path)}: {len(names) - number} files were not looked at, since at most {FILES} are read"
            )
            break
        try:
            found.append(_read_record(folder, path, name, uid))
        except FileNotFoundError:
            continue  # its process has ended since
        except RecordError as error:
            wrong.append(f"{printable(name)}: {error}")
        except OSError as error:
            wrong.append(f"{printable(name)}: {_why(error)}")
    problems += [f"{shown_path(path)}: {line}" for line in _in_one_line(wrong, "files")]


def _in_one_line(wrong: list[str], what: str) -> list[str]:
    if len(wrong) < 2:
        return wrong
    return [f"{len(wrong)} {what} are no records or cannot be read; the first: {wrong[0]}"]


def _read_record(folder: int, path: Path, name: str, uid: int) -> Found:
    if not _FILE.fullmatch(name):
        raise RecordError("no record has such a name")
    # Not blocking: the other end of a FIFO may never come.
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=folder)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise RecordError("it is no regular file")
        if about.st_uid != uid:
            raise RecordError(f"it belongs to uid {about.st_uid}, and its folder to {uid}")
        if about.st_size > LARGEST:
            raise RecordError(f"it has {about.st_size} bytes, and a record at most {LARGEST}")
        data = os.read(descriptor, LARGEST)
    finally:
        os.close(descriptor)
    try:
        record = Record.from_json(json.loads(data))
    except RecordError:
        raise
    except (ValueError, RecursionError) as error:  # broken UTF-8 and numbers of a thousand digits are a ValueError too
        raise RecordError(f"it is no JSON ({type(error).__name__})") from error
    if record.file_name != name:
        raise RecordError("its content is that of another one")
    return Found(record, about.st_mtime, path / name, about.st_ino)


# -- alive, dead, silent -----------------------------------------------------------------------------------------


class Liveness(str, Enum):
    ALIVE = "alive"
    DEAD = "dead"
    SILENT = "silent"
    """It runs where this process cannot look, and has not been heard of."""


def liveness(found: Found, now: float, here: Identity, among: Collection[Found] = ()) -> Liveness:
    """Whether the process of *found* runs, at *now* in seconds of the epoch.

    *among* are the records it was found with: elsewhere, a process without a rank has no heartbeat of its own, and is as alive as its engine on
    its host.
    """
    record = found.record
    if record.boot and record.boot == here.boot and record.pid_namespace and record.pid_namespace == here.pid_namespace:
        seen = _seen(record.pid)
        if seen is not None:
            same = seen.start_ticks == record.start_ticks and seen.state not in ("Z", "X", "x")
            return Liveness.ALIVE if same else Liveness.DEAD
        if not _exists(record.pid):
            return Liveness.DEAD
    heartbeat = found.heartbeat
    if record.rank is None:
        heartbeat = max(
            [heartbeat]
            + [
                other.heartbeat
                for other in among
                if (other.record.engine, other.record.host) == (record.engine, record.host)
                and other.path.parent == found.path.parent
            ]
        )
    return Liveness.ALIVE if now - heartbeat < SILENT_AFTER else Liveness.SILENT


def all_liveness(found: Collection[Found], now: float, here: Identity) -> list[Liveness]:
    """`liveness` of each of *found*, among all of them: there may be thousands."""
    last: dict[tuple[str, str, Path], Found] = {}
    places = [(one.record.engine, one.record.host, one.path.parent) for one in found]
    for place, one in zip(places, found, strict=True):
        if place not in last or last[place].heartbeat < one.heartbeat:
            last[place] = one
    return [liveness(one, now, here, (last[place],)) for place, one in zip(places, found, strict=True)]


def _exists(pid: int) -> bool:
    """Also of a process that /proc hides (hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def prune(base: Path) -> None:
    """Removes what this user's ended processes have left: an hour after, where it is sure that they have; else after a week. Never raises."""
    with suppress(Exception):
        now, here = time.time(), identity()
        found = read(base, own=True).found
        freshest: dict[str, float] = {}
        for one in found:
            freshest[one.record.engine] = max(freshest.get(one.record.engine, 0.0), one.heartbeat)
        with _own(base, "remove status records") as folder:
            for one, state in zip(found, all_liveness(found, now, here), strict=True):
                rebooted = one.record.host == here.host and "" != one.record.boot != here.boot != ""
                ended = state is Liveness.DEAD or (rebooted and freshest[one.record.engine] < now - PRUNED_AFTER)
                forgotten = state is Liveness.SILENT and freshest[one.record.engine] < now - _FORGOTTEN_AFTER
                if (ended and one.heartbeat < now - PRUNED_AFTER) or forgotten:
                    with suppress(OSError):
                        os.unlink(one.path.name, dir_fd=folder)
            with os.scandir(folder) as entries:
                names = [entry.name for entry in islice(entries, _ENTRIES)]
            for name in names:
                # A process ended while it wrote; nobody takes an hour for that.
                if _TEMPORARY.fullmatch(name):
                    with suppress(OSError):
                        if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < now - PRUNED_AFTER:
                            os.unlink(name, dir_fd=folder)


# -- keeping it --------------------------------------------------------------------------------------------------


class Reporter:
    """Keeps this process's records on disk. No call waits for the disk, `close` for a moment aside.

    What touches the disk is a daemon thread that ends when there is nothing left to write: a process that is about to fork has no thread.
    The first failure is a warning; later ones are silent, and the next record is tried again. A forked child starts with nothing.
    """

    def __init__(self, base: Path, warn: Callable[[str], None]) -> None:
        self._base = base
        self._warn = warn
        self._start_afresh()
        afresh = weakref.WeakMethod(self._start_afresh)
        os.register_at_fork(after_in_child=lambda: (method := afresh()) and method())

    def _start_afresh(self) -> None:
        self._lock = threading.Lock()  # never held while the disk is waited for
        self._pending: dict[str, Record] = {}
        self._on_disk: dict[str, Record] = {}
        """What was written and not found to be gone since."""
        self._tried: dict[str, Record] = {}
        self._newest: Record | None = None
        self._writer: threading.Thread | None = None
        self._busy_since: float | None = None
        self._keeper: threading.Thread | None = None
        self._refresh: Callable[[], Record | None] = lambda: None
        self._every = HEARTBEAT
        self._ended = threading.Event()
        self._pruned = False
        self._warned = False

    def publish(self, record: Record) -> None:
        """Has *record* written soon; of several for one engine, the last one is."""
        with self._lock:
            if self._ended.is_set():
                return
            self._pending[record.file_name] = self._newest = record
            busy_since = self._busy_since
        if busy_since is not None and time.monotonic() - busy_since > _SLOW:
            self._complain(
                f"{shown_path(own_folder(self._base))} has not answered for {time.monotonic() - busy_since:.0f} seconds"
            )
        self._have_written()

    def keep(self, refresh: Callable[[], Record | None], every: float = HEARTBEAT) -> None:
        """Asks *refresh* now and every so many seconds, in a daemon thread; a record that is as before, or None, is a heartbeat."""
        with self._lock:
            self._refresh, self._every = refresh, every
            if self._keeper is not None or self._ended.is_set():
                return
            self._keeper = threading.Thread(
                target=self._keep, args=(self._ended,), name="graphfix-heartbeat", daemon=True
            )
        try:
            self._keeper.start()
        except RuntimeError as error:  # no more threads
            self._keeper = None
            self._complain(str(error))

    def flush(self, timeout: float = 1.0) -> None:
        """Waits until what was published is on disk, in at most *timeout* seconds: for a process that is about to end."""
        writer = self._writer
        if writer is not None and writer is not threading.current_thread():
            with suppress(RuntimeError):  # it could not be started, and is not to be waited for
                writer.join(timeout)

    def close(self, timeout: float = 1.0) -> None:
        """Removes the records at a clean end, in at most *timeout* seconds; one with a problem stays, to be seen.

        Python 3.12.0 to 3.12.2 starts no thread in an interpreter that shuts down: there the thread of `keep` does it, and without one they stay,
        for `prune`.
        """
        with self._lock:
            if self._ended.is_set():
                return
            self._pending = {name: record for name, record in self._pending.items() if record.problem is not None}
            self._writer = self._writer or self._keeper
            self._ended.set()
        self._have_written()
        self.flush(timeout)

    def _keep(self, ended: threading.Event) -> None:
        while True:
            try:
                record = self._refresh() or self._newest
                if record is not None:
                    self.publish(record)
            except Exception as error:
                self._complain(f"{type(error).__name__}: {error}")
            if ended.wait(self._every):
                break
        with self._lock:
            if self._writer is not threading.current_thread():
                return
        self._write()

    def _have_written(self) -> None:
        with self._lock:
            if self._writer is not None or not (self._pending or (self._ended.is_set() and self._tried)):
                return
            self._writer = threading.Thread(target=self._write, name="graphfix-record", daemon=True)
        try:
            self._writer.start()
        except RuntimeError as error:
            self._writer = None
            if not self._ended.is_set():  # at the end it is not written here: the disk may hang
                self._complain(str(error))

    def _write(self) -> None:
        while True:
            with self._lock:
                self._busy_since = time.monotonic()
                if self._pending:
                    act, (name, record) = self._put, self._pending.popitem()
                elif self._ended.is_set() and self._tried:
                    act, (name, record) = self._clear, self._tried.popitem()
                else:
                    self._writer = self._busy_since = None
                    return
            try:
                act(name, record)
            except Exception as error:
                self._complain(getattr(error, "strerror", None) or f"{type(error).__name__}: {error}")

    def _put(self, name: str, record: Record) -> None:
        self._tried[name] = record
        before = self._on_disk.pop(name, None)
        if before is not None and before._replace(written=record.written) == record:
            with suppress(FileNotFoundError):  # somebody has cleaned up
                touch(self._base, record)
                self._on_disk[name] = before
                return
        write(self._base, record)
        self._on_disk[name] = record
        while len(self._tried) > _ENGINES:
            oldest = next(iter(self._tried))
            self._on_disk.pop(oldest, None)
            self._clear(oldest, self._tried.pop(oldest))
        if not self._pruned:
            self._pruned = True
            prune(self._base)

    def _clear(self, name: str, record: Record) -> None:
        if record.problem is None:
            remove(self._base, record)

    def _complain(self, what: str) -> None:
        with self._lock:
            if self._warned:
                return
            self._warned = True
        with suppress(Exception):
            self._warn(
                f"the status record of this process is not kept: {what}. Nothing else is concerned; `vllm-graphfix fleet` and the metrics miss "
                f"this process. {STATUS_DIR} names another folder"
            )
