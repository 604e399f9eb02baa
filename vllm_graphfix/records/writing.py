"""Puts a record where the others are, says that it still holds, and takes it away."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from vllm_graphfix.records.folder import opened
from vllm_graphfix.records.record import LARGEST, Record


def write(base: Path, record: Record) -> None:
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
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise


def touch(base: Path, record: Record) -> None:
    """Says that *record* still holds. Raises OSError; FileNotFoundError if the record is gone."""
    with opened(base, "touch a status record") as folder:
        os.utime(record.file_name, dir_fd=folder, follow_symlinks=False)


def remove(base: Path, record: Record) -> None:
    """Raises OSError; a record that is gone already is none."""
    with suppress(FileNotFoundError), opened(base, "remove a status record") as folder:
        os.unlink(record.file_name, dir_fd=folder)
