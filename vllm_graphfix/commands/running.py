"""The servers of vLLM that run on this machine: flags, environment and model files, read from /proc.

The command may run as root, and the processes be anybody's: no link leads out of the root of a process, nothing but
regular files is opened, and nothing that may be a secret is printed.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from vllm_graphfix.commands.fleet.unrecorded import TITLE, is_engine_command
from vllm_graphfix.commands.redaction import command_line
from vllm_graphfix.deployment.hardware import first_bytes
from vllm_graphfix.deployment.secrets import quoted_value

_MOST_LINKS = 40
_MOST_SERVERS = 64
_LARGEST_LINE = 64 * 1024
_LARGEST_ENVIRONMENT = 1024 * 1024
"""Characters of a server's command line and of its environment."""
_FIRST_WORDS, _LONGEST_WORD = 32, 256
"""The part of a longer command line that shows if it is a server's."""
_LARGEST_MAPS = 16 * 1024 * 1024
"""Bytes; an engine has a few thousand mapped regions."""
_KERNELS = re.compile(r"^(?:[^\s/]+ +){5}(/[^\n]*)/vllm/[^/\n]*\.so$", re.MULTILINE)
"""A mapped file of vLLM. From the beginning of its line on: a search from each blank would take minutes where somebody
has mapped thousands of files with long names full of blanks."""


class Server(NamedTuple):
    """One `vllm serve` on this machine."""

    pid: int
    line: str
    """Its command line, quoted for a shell; it may hold secrets."""
    environment: Mapping[str, str]
    read: Callable[[Path, int], bytes | None]
    """Returns the first bytes of a regular file in its root."""

    @property
    def visible_line(self) -> str:
        return command_line(shlex.split(self.line))


def servers() -> tuple[list[Server], list[str]]:
    """Return the running servers, and notes on processes of vLLM whose flags cannot be read."""
    import psutil

    servers: list[Server] = []
    notes: list[str] = []
    commands: dict[int, Mapping[str, Any]] = {}
    for each in psutil.process_iter(["pid", "ppid", "cmdline", "uids"]):
        words = [word for word in each.info["cmdline"] or () if word]  # a title is followed by empty ones
        if too_long := sum(map(len, words)) > _LARGEST_LINE:  # cut at once: any user may have thousands of them
            words = [word[:_LONGEST_WORD] for word in words[:_FIRST_WORDS]]
        each.info["cmdline"], each.info["too_long"] = words, too_long
        commands[each.pid] = each.info
    users = {pid: info["uids"] for pid, info in commands.items() if is_engine_command(info["cmdline"])}
    examined = _examined(users)
    for pid, info in sorted(commands.items()):
        words = info["cmdline"]
        if TITLE.match(" ".join(words)):
            if not _has_server_above(pid, commands):
                notes.append(
                    f"process {pid} has given itself the title {quoted_value(words[0])} in place of its command line, "
                    "and no `vllm serve` has started it: give its flags with --for"
                )
        elif pid in examined:
            try:
                environment = psutil.Process(pid).environ()
            except (psutil.Error, OSError):
                notes.append(f"process {pid} belongs to another user or has ended: run this as its user, or as root")
                continue
            if info["too_long"] or sum(map(len, (*environment, *environment.values()))) > _LARGEST_ENVIRONMENT:
                notes.append(f"process {pid} has a command line or an environment that is too large to be examined")
                continue
            servers.append(Server(pid, shlex.join(words), environment, _reader(pid)))
    if others := users.keys() - examined:
        notes.append(
            f"only {_MOST_SERVERS} servers are examined, of each user a share; not {len(others)} others, such as "
            f"process {min(others)}"
        )
    return servers, notes


def _examined(users: Mapping[int, Any]) -> set[int]:
    """Choose `_MOST_SERVERS` of the processes in *users*, each user's in turn: none displaces another's."""
    turns: Counter[Any] = Counter()
    order = []
    for pid in sorted(users):
        turns[users[pid]] += 1
        order.append((turns[users[pid]], pid))
    return {pid for _, pid in sorted(order)[:_MOST_SERVERS]}


def why_another_vllm(pid: int, folder: Path | None) -> str | None:
    """Return why the process *pid* does not run the vLLM in *folder*, as far as that can be seen; None if it may."""
    try:
        own, its = (Path(f"/proc/{each}/ns/mnt").readlink() for each in ("self", pid))
    except OSError:
        return None
    if own != its:
        return "has its own file systems, as in a container: run this inside, or name its vLLM with --vllm"
    loaded = loaded_vllm((first_bytes(Path(f"/proc/{pid}/maps"), _LARGEST_MAPS) or b"").decode("utf-8", "replace"))
    if loaded is None or folder is None or loaded == folder.resolve():
        return None
    return f"runs another vLLM: vllm-graphfix status --running --vllm {shlex.quote(str(loaded))}"


def loaded_vllm(maps: str) -> Path | None:
    """Return the folder that contains the vLLM whose kernels are mapped, by the text of /proc/PID/maps."""
    match = _KERNELS.search(maps)
    return Path(match[1]) if match else None


def _has_server_above(pid: int, commands: Mapping[int, Mapping[str, Any]]) -> bool:
    for _ in range(10):
        info = commands.get(pid)
        if info is None:
            return False
        if is_engine_command(info["cmdline"]):
            return True
        pid = info["ppid"]
    return False


def _reader(pid: int) -> Callable[[Path, int], bytes | None]:
    """Return a function that reads the first bytes of a regular file as the process *pid* would find it."""

    def read(path: Path, most: int) -> bytes | None:
        try:
            folder = Path(f"/proc/{pid}/cwd").readlink()
            descriptor = open_beneath(Path(f"/proc/{pid}/root"), folder / path)
        except (OSError, ValueError):
            return None
        with os.fdopen(descriptor, "rb") as file, suppress(OSError):
            return file.read(most)
        return None

    return read


def open_beneath(root: Path, path: Path) -> int:
    """Open the regular file *path*, for which *root* is the root folder: links and ``..`` do not lead out of it.

    Returns a descriptor. Raises OSError.
    """
    # By descriptors, one part at a time: whoever owns these folders may replace a part by a link at any moment.
    through = os.O_PATH | os.O_CLOEXEC
    folders = [os.open(root, through | os.O_DIRECTORY)]
    parts = deque(path.parts[1:] if path.is_absolute() else path.parts)
    links = 0
    try:
        while parts:
            name = parts.popleft()
            if name in ("", "."):
                continue
            if name == "..":
                if len(folders) > 1:
                    os.close(folders.pop())
                continue
            try:
                target = os.readlink(name, dir_fd=folders[-1])
            except OSError as error:
                if error.errno != errno.EINVAL:  # it is no link
                    raise
            else:
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                while target.startswith("/") and len(folders) > 1:
                    os.close(folders.pop())
                parts.extendleft(reversed(target.split("/")))
                continue
            if not parts:
                return _open_regular(name, folders[-1])
            folders.append(os.open(name, through | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folders[-1]))
    finally:
        for folder in folders:
            os.close(folder)
    raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))


def _open_regular(name: str, folder: int) -> int:
    """Open the regular file *name* of *folder*; opening a device or a FIFO could have an effect."""
    place = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(place)
