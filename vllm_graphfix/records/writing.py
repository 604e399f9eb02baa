"""Puts a record where the others are, says that it still holds, and takes it away."""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from vllm_graphfix.records.folder import opened
from vllm_graphfix.records.record import LARGEST, Record


def write(base: Path, record: Record) -> Dated:
    """Puts *record* in place of what this process said before: whole or not at all. Raises OSError."""
    data = record.encode()
    with opened(base, "write a status record", make=True) as folder:
        if len(data) > LARGEST:
            raise OSError(errno.EFBIG, f"it has {len(data)} bytes, and at most {LARGEST} can be read")
        # Under another name, then renamed: a reader sees the record before or this one, never a part of one.
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
    """The date of a file, by the clock that dates files there, and between when it was set, by this machine's."""

    mtime: float
    before: float
    after: float


_OUTDATED = stat.S_ISVTX
"""The mode bit of a record whose content could not be renewed. Changing it needs no space on a full disk, it means
nothing to the system on a file, and an older reader skips it; an owner's own chmod of a folder rarely sets it."""


def is_outdated(mode: int) -> bool:
    """Tell if the file of this *mode* says that its process could not renew it."""
    return bool(mode & _OUTDATED)


def touch_outdated(base: Path, record: Record) -> None:
    """Say that the process of *record* lives, and that what its file says is no longer all that there is to say.

    Raises OSError, also where the file system does not take the mark: without it, a heartbeat would vouch for content
    that is old. The next `write` makes another file, which does not have the mark.
    """
    with opened(base, "touch a status record") as folder:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(record.file_name, flags, dir_fd=folder)
        try:
            os.fchmod(descriptor, 0o600 | _OUTDATED)
            # Before the time: a reader in between sees a mark too early, never a heartbeat without it. Some file
            # systems take the call and do nothing.
            if not is_outdated(os.fstat(descriptor).st_mode):
                raise OSError(errno.EOPNOTSUPP, "this file system keeps no sticky bit of a file")
            os.utime(descriptor)
        finally:
            os.close(descriptor)


def touch(base: Path, record: Record) -> Dated:
    """Says that *record* still holds. Raises OSError; FileNotFoundError if the record is gone."""
    with opened(base, "touch a status record") as folder:
        return _date(folder, record.file_name)


def _date(folder: int, name: str) -> Dated:
    before = time.time()
    os.utime(name, dir_fd=folder, follow_symlinks=False)
    after = time.time()
    return Dated(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime, before, after)


def remove(base: Path, record: Record) -> None:
    """Raises OSError; a record that is gone already is none."""
    with suppress(FileNotFoundError), opened(base, "remove a status record") as folder:
        os.unlink(record.file_name, dir_fd=folder)
