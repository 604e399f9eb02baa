"""The folder of this user's records, which nobody else may write to.

Owner and mode are checked on an opened descriptor before the folder is used.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_graphfix.settings.environment import STATUS_DIR
from vllm_graphfix.text import printable

DEFAULT_FOLDER = "/tmp"  # noqa: S108  # the folder in it is ours alone, and checked before it is used
ENTRIES = 16 * 4096
"""Limit of names that are scanned in one folder."""
_PATH = 300
"""Characters of a path in a message."""
_BY_FS_GROUP = 0o2770
"""The mode that a folder of mode 700 gets where Kubernetes gives a volume to the `fsGroup` of a pod."""
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def base_folder(environment: Mapping[str, str]) -> Path:
    return Path(environment.get(STATUS_DIR, "").strip() or DEFAULT_FOLDER)


def own_folder(base: Path) -> Path:
    return base / f"vllm-graphfix-{os.geteuid()}"


@contextmanager
def opened(base: Path, doing: str, *, make: bool = False) -> Iterator[int]:
    """Yield a descriptor of our folder, which cannot be exchanged for another one while it is used.

    Raises OSError; one of the caller's block, too, is raised anew with *doing* and the path. The class follows from the
    errno, so callers can still catch FileNotFoundError.
    """
    path = own_folder(base)
    try:
        # Every access goes through this descriptor: the path may be replaced by a link between two calls.
        try:
            folder = os.open(path, OPEN_FOLDER)
        except FileNotFoundError:
            if not make:
                raise
            with suppress(FileExistsError):  # another process of the engine was faster
                path.mkdir(0o700)
            folder = os.open(path, OPEN_FOLDER)
        try:
            close_to_group(folder)
            check_owner(folder, os.geteuid())
            yield folder
        finally:
            os.close(folder)
    except OSError as error:
        raise OSError(error.errno, f"cannot {doing} in {path_text(path)}: {why(error)}") from error


def close_to_group(folder: int) -> None:
    """Set the opened *folder* to mode 700, if it is this user's and a pod's `fsGroup` has opened it to a group.

    Kubernetes changes the mode of everything in a volume at each mount, so a subfolder would be opened as well. From
    here on nobody in the group can reach a record in it, not even one whose own mode was opened. Any other mode was set
    by somebody, and `check_owner` refuses it. Never raises.
    """
    with suppress(OSError):
        status = os.fstat(folder)
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == _BY_FS_GROUP:
            os.fchmod(folder, 0o700)


def check_owner(folder: int, owner: int) -> None:
    """Raise PermissionError if the opened *folder* is not *owner*'s, or others may write to it."""
    status = os.fstat(folder)
    if status.st_uid != owner:
        raise PermissionError(errno.EPERM, f"it belongs to uid {status.st_uid}, not {owner}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            errno.EPERM, f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o}): chmod 700"
        )


def why(error: OSError) -> str:
    if error.errno in (errno.ENOTDIR, errno.ELOOP):
        return "it is a link or not a folder"
    return error.strerror or str(error)


def path_text(path: Path) -> str:
    """Return *path* printable and shortened, for one line of a log."""
    text = printable(str(path))
    return text if len(text) <= _PATH else f"{text[: _PATH // 2]}…{text[1 - _PATH // 2 :]}"
