"""Writes, touches and removes the file of a record."""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from vllm_graphfix.records.folder import opened
from vllm_graphfix.records.record import LARGEST, Record


class Named(Protocol):
    """A `Record`, or the name of its file alone."""

    @property
    def file_name(self) -> str: ...


def write(base: Path, record: Record) -> Dated:
    """Replace this process's record for the engine by *record*, atomically. Raises OSError."""
    data = record.encode()
    with opened(base, "write a status record", make=True) as folder:
        if len(data) > LARGEST:
            raise OSError(errno.EFBIG, f"it has {len(data)} bytes, and at most {LARGEST} can be read")
        # Written under another name, then renamed: a reader sees the old record or the new one, never a part.
        temporary = f".{record.file_name}.{os.urandom(4).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, record.file_name, src_dir_fd=folder, dst_dir_fd=folder)
            return _date(folder, record.file_name)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise


class Dated(NamedTuple):
    """The date of a file by its folder's clock, and this machine's time before and after the call that set it."""

    mtime: float
    before: float
    after: float


def write_or_mark(base: Path, record: Record) -> Dated:
    """`write`, or mark the file that is there as outdated. Raises OSError then, too."""
    try:
        return write(base, record)
    except OSError:
        with suppress(OSError):  # on a full disk: its process lives, but a touch alone would vouch for old content
            touch_outdated(base, record)
        raise


_OUTDATED = stat.S_ISVTX
"""The mode bit of a record whose content could not be rewritten. Setting it needs no space on a full disk, the system
ignores it on a file, and so does an older reader; a recursive chmod by the owner rarely sets it."""


def is_outdated(mode: int) -> bool:
    """Tell if *mode* marks a record that its process could not rewrite."""
    return bool(mode & _OUTDATED)


def touch_outdated(base: Path, record: Named) -> None:
    """Touch the file of *record* and mark its content as outdated.

    Raises OSError, also if the file system does not store the mark: without it, the heartbeat would vouch for old
    content. The next `write` makes a new file, without the mark.
    """
    with opened(base, "touch a status record") as folder:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(record.file_name, flags, dir_fd=folder)
        try:
            os.fchmod(descriptor, 0o600 | _OUTDATED)
            # The mark before the date: a reader in between sees a mark too early, never a heartbeat without it. Read
            # back, since some file systems accept the call and do nothing.
            if not is_outdated(os.fstat(descriptor).st_mode):
                raise OSError(errno.EOPNOTSUPP, "this file system keeps no sticky bit of a file")
            os.utime(descriptor)
        finally:
            os.close(descriptor)


def touch(base: Path, record: Named) -> Dated:
    """Date the file of *record* anew: it still holds. Raises OSError; FileNotFoundError if the file is gone."""
    with opened(base, "touch a status record") as folder:
        return _date(folder, record.file_name)


def _date(folder: int, name: str) -> Dated:
    before = time.time()
    os.utime(name, dir_fd=folder, follow_symlinks=False)
    after = time.time()
    return Dated(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime, before, after)


def is_stored(base: Path, record: Named) -> bool:
    """Tell if our folder has a file of *record*; False if the folder cannot be used."""
    with suppress(OSError), opened(base, "find a status record") as folder:
        os.stat(record.file_name, dir_fd=folder, follow_symlinks=False)
        return True
    return False


def remove(base: Path, record: Named) -> None:
    """Remove the file of *record*, if it is there. Raises OSError."""
    with suppress(FileNotFoundError), opened(base, "remove a status record") as folder:
        os.unlink(record.file_name, dir_fd=folder)
