"""Reads the records of all processes. Files that are not records are reported, and never trusted."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from vllm_graphfix.records.folder import (
    ENTRIES,
    OPEN_FOLDER,
    check_owner,
    close_to_group,
    own_folder,
    path_text,
    why,
)
from vllm_graphfix.records.record import FILE_NAME, LARGEST, Record, RecordError
from vllm_graphfix.records.writing import is_outdated
from vllm_graphfix.text import printable

FILES = 4 * 4096
"""Limit of records in one reading, of which each folder gets its share."""
_FOLDER = re.compile(r"vllm-graphfix-(0|[1-9][0-9]{0,9})")
_FILE = re.compile(FILE_NAME)


class StoredRecord(NamedTuple):
    """A record that was read."""

    record: Record
    heartbeat: float
    """The time of the last write or touch, in epoch seconds."""
    path: Path
    outdated: bool = False
    """Its process could not rewrite it since `Record.written`: the heartbeat is valid, the content may be old."""

    @property
    def owner(self) -> int | None:
        """The user whose folder it is in, and who alone can have written it; None outside such a folder."""
        named = _FOLDER.fullmatch(self.path.parent.name)
        return int(named[1]) if named else None


class Unreadable(NamedTuple):
    """A file that is named like a record and could not be read as one."""

    engine: str
    host: str
    pid: int
    path: Path
    why: str
    heartbeat: float
    """The date of the file, which its process renews without reading it; infinite if that is not known."""


class Reading(NamedTuple):
    """The result of reading all folders."""

    found: tuple[StoredRecord, ...]
    problems: tuple[str, ...]
    """Errors, a line for each folder."""
    skipped: int = 0
    """Files beyond `FILES`, names beyond `ENTRIES`, and folders that are refused: engines may be missing."""
    unreadable: tuple[Unreadable, ...] = ()


def read(base: Path, *, own: bool = False, engines: Collection[str] | None = None) -> Reading:
    """Read the records in every `vllm-graphfix-<uid>` below *base* that is readable, this user's first. Never raises.

    *own*: read only this user's, which nobody else can have written. *engines*: read only the records of these, by file
    name, since opening all files on shared storage would read a whole fleet's.
    """
    records: list[StoredRecord] = []
    problems: list[str] = []
    unreadable: list[Unreadable] = []
    skipped = 0
    mine = own_folder(base)
    folders = [mine]
    if not own:
        try:
            with os.scandir(base) as entries:
                seen = [entry.name for entry in islice(entries, ENTRIES + 1)]
            if len(seen) > ENTRIES:
                problems.append(f"{path_text(base)}: only its first {ENTRIES} entries were examined")
                skipped += 1
            folders += sorted(base / name for name in seen if _FOLDER.fullmatch(name) and name != mine.name)
        except OSError as error:
            problems.append(f"{path_text(base)}: {why(error)}")
    closed: list[str] = []
    refused: list[str] = []
    shares = _shares(folders, engines)
    for path in folders:
        try:
            folder = os.open(path, OPEN_FOLDER)
        except FileNotFoundError:
            continue
        except PermissionError:
            (refused if path == mine else closed).append(f"{path_text(path)} cannot be read by this user")
            continue
        except OSError as error:
            refused.append(f"{path_text(path)}: {why(error)}")
            continue
        try:
            uid = _checked_owner(folder, path)
            skipped += _read_folder(folder, path, uid, shares.get(path, 0), records, problems, unreadable, engines)
        except OSError as error:
            refused.append(f"{path_text(path)}: {why(error)}")
        finally:
            os.close(folder)
    for lines in (closed, refused):
        problems += _summed_in_one_line(lines, "folders")
    return Reading(tuple(records), tuple(problems), skipped + len(refused), tuple(unreadable))


def _checked_owner(folder: int, path: Path) -> int:
    """Return the user whose records the opened *folder* has. Raises PermissionError if others may have written them."""
    uid = int(path.name.rpartition("-")[2])
    close_to_group(folder)
    check_owner(folder, uid)
    return uid


def _shares(folders: Sequence[Path], engines: Collection[str] | None) -> dict[Path, int]:
    """Return how many files to read in each of *folders*, `FILES` in all.

    Folders with few are read as a whole, and the others share the rest alike: no user's files displace another's.
    """
    if len(folders) == 1:
        return {folders[0]: FILES}
    counts: dict[Path, int] = {}
    for path in folders:
        with suppress(OSError):  # reported when it is read
            folder = os.open(path, OPEN_FOLDER)
            try:
                _checked_owner(folder, path)
                counts[path] = len(_names(folder, engines)[0])
            finally:
                os.close(folder)
    shares: dict[Path, int] = {}
    remaining = FILES
    for number, path in enumerate(sorted(counts, key=counts.__getitem__)):
        shares[path] = remaining // (len(counts) - number)
        remaining -= min(counts[path], shares[path])
    return shares


def _names(folder: int, engines: Collection[str] | None) -> tuple[list[str], bool]:
    """Return the names of the files to read in *folder*, and True if it has more entries than are examined."""
    names, number = [], 0
    with os.scandir(folder) as entries:
        # Not all names first: each step of the scan lets other threads run, such as the event loop of a front-end.
        for number, entry in enumerate(islice(entries, ENTRIES + 1), 1):
            wanted = engines is None or entry.name.partition("-")[0] in engines
            if wanted and number <= ENTRIES and not entry.name.startswith("."):
                names.append(entry.name)
    return sorted(names), number > ENTRIES


def _read_folder(
    folder: int,
    path: Path,
    uid: int,
    share: int,
    records: list[StoredRecord],
    problems: list[str],
    unreadable: list[Unreadable],
    engines: Collection[str] | None,
) -> int:
    """Append to *records*, *problems* and *unreadable*; return the number of files that were skipped, at least.

    At most *share* are read. Names beyond the first `ENTRIES` are not counted: together they are one file.
    """
    wrong: list[tuple[str, str]] = []
    names, has_more = _names(folder, engines)
    skipped = max(len(names) - share, 0)
    if skipped:
        most = f"{FILES} are read" if share == FILES else f"{share} of it are read, and {FILES} of all folders"
        problems.append(f"{path_text(path)}: {skipped} files were skipped, since at most {most}")
    if has_more:
        problems.append(f"{path_text(path)}: only its first {ENTRIES} entries were examined")
    for name in names[:share]:
        try:
            records.append(_read_record(folder, path, name, uid))
        except FileNotFoundError:
            continue  # its process has ended since
        except RecordError as error:
            wrong.append((name, str(error)))
        except OSError as error:
            wrong.append((name, why(error)))
    lines = [f"{printable(name)}: {reason}" for name, reason in wrong]
    problems += [f"{path_text(path)}: {line}" for line in _summed_in_one_line(lines, "files")]
    for name, reason in wrong:
        if parts := _FILE.fullmatch(name):
            unreadable.append(Unreadable(parts[1], parts[2], int(parts[3]), path / name, reason, _date(folder, name)))
    return skipped + has_more


def _date(folder: int, name: str) -> float:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
    except OSError:
        return math.inf


def _summed_in_one_line(wrong: list[str], what: str) -> list[str]:
    if len(wrong) < 2:
        return wrong
    return [f"{len(wrong)} {what} are not records or cannot be read; the first: {wrong[0]}"]


def _read_record(folder: int, path: Path, name: str, uid: int) -> StoredRecord:
    if not _FILE.fullmatch(name):
        raise RecordError("its name is not a record's")
    # Not blocking: nobody may ever open the other end of a FIFO.
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=folder)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise RecordError("it is not a regular file")
        if about.st_uid != uid:
            raise RecordError(f"it belongs to uid {about.st_uid}, and its folder to {uid}")
        if about.st_size > LARGEST:
            raise RecordError(f"it has {about.st_size} bytes; a record has at most {LARGEST}")
        data = os.read(descriptor, LARGEST)
    finally:
        os.close(descriptor)
    try:
        record = Record.from_json(json.loads(data))
    except RecordError:
        raise
    except (ValueError, RecursionError) as error:  # broken UTF-8 and numbers of a thousand digits are a ValueError too
        raise RecordError(f"it is not JSON ({type(error).__name__})") from error
    if record.file_name != name:
        raise RecordError("its content belongs to another record")
    return StoredRecord(record, about.st_mtime, path / name, is_outdated(about.st_mode))
