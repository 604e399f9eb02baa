"""The folder of this user's records, which nobody else may write to.

It is found, made, opened and looked at before it is used.
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

DEFAULT_FOLDER = "/tmp"  # noqa: S108  # the folder in it is ours alone, and looked at before it is used
ENTRIES = 16 * 4096
"""Names that are looked at in one folder: sixteen times the records that are read."""
_PATH = 300
"""Characters of a folder's path, in what is said about it."""
_BY_FS_GROUP = 0o2770
"""The mode that a folder of mode 700 gets where Kubernetes gives a volume to the `fsGroup` of a pod."""
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def base_folder(environment: Mapping[str, str]) -> Path:
    return Path(environment.get(STATUS_DIR, "").strip() or DEFAULT_FOLDER)


def own_folder(base: Path) -> Path:
    return base / f"vllm-graphfix-{os.geteuid()}"


@contextmanager
def opened(base: Path, doing: str, *, make: bool = False) -> Iterator[int]:
    """A descriptor of our folder, which cannot be exchanged for another one while it is used."""
    path = own_folder(base)
    try:
        # Everything in it goes by this descriptor: the path may be exchanged for a link between two calls.
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
        raise OSError(error.errno, f"cannot {doing} in {shown_path(path)}: {why(error)}") from error


def close_to_group(folder: int) -> None:
    """Make the opened *folder*, if it is this user's, mode 700 again where a pod's `fsGroup` has opened it to a group.

    Kubernetes does so with all that is in a volume, each time that it mounts it: a folder of a mode of its own, inside,
    would be opened likewise. Nobody in the group gets at a record in it from here on, not even at one that was opened
    with it. Any other mode is somebody's doing, and is refused. Never raises: `check_owner` says what is still wrong.
    """
    with suppress(OSError):
        found = os.fstat(folder)
        if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == _BY_FS_GROUP:
            os.fchmod(folder, 0o700)


def check_owner(folder: int, owner: int) -> None:
    """Raises OSError if the opened *folder* is not *owner*'s alone."""
    found = os.fstat(folder)
    if found.st_uid != owner:
        raise PermissionError(errno.EPERM, f"it belongs to uid {found.st_uid}, not {owner}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            errno.EPERM, f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o}): chmod 700"
        )


def why(error: OSError) -> str:
    if error.errno in (errno.ENOTDIR, errno.ELOOP):
        return "it is a link or not a folder"
    return error.strerror or str(error)


def shown_path(path: Path) -> str:
    """For one line of a log."""
    text = printable(str(path))
    return text if len(text) <= _PATH else f"{text[: _PATH // 2]}…{text[1 - _PATH // 2 :]}"
