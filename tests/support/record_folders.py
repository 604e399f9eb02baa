"""Status folders that somebody else may have a hand in."""

from __future__ import annotations

import os
from pathlib import Path


def a_link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to("elsewhere")


def a_dangling_link(folder: Path) -> None:
    folder.symlink_to("nowhere")


def a_file(folder: Path) -> None:
    folder.touch()


def writable_by_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def writable_by_a_group(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)


def of_another_user(folder: Path) -> None:
    folder.mkdir(0o700)
    os.chown(folder, 12345, 12345)
