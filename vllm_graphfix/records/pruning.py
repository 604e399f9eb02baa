"""Removal of records whose processes ended without removing them."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path

from vllm_graphfix.records.folder import ENTRIES, opened
from vllm_graphfix.records.liveness import Liveness, all_liveness
from vllm_graphfix.records.process_identity import identity
from vllm_graphfix.records.reading import read
from vllm_graphfix.records.record import FILE_NAME

PRUNED_AFTER = 3600.0
"""Seconds after the last heartbeat of a process that has ended."""
_FORGOTTEN_AFTER = 7 * 24 * 3600.0
"""Seconds after the last heartbeat of an engine whose processes may have ended."""
_TEMPORARY = re.compile(rf"\.{FILE_NAME}\.[0-9a-f]{{8}}")


def prune(base: Path, offset: float = 0.0) -> None:
    """Remove records and temporary files of this user's ended processes. Never raises.

    A record goes an hour after its process has ended, if that is certain, and after a week of silence otherwise.
    *offset*: seconds that the clock which dates files there is ahead of this machine's.
    """
    with suppress(Exception):
        # By the clock that dates these files: against a clock ahead of it, a file that is being written would look old.
        now, here = time.time() + offset, identity()
        records = read(base, own=True).found
        freshest: dict[str, float] = {}
        for one in records:
            freshest[one.record.engine] = max(freshest.get(one.record.engine, 0.0), one.heartbeat)
        with opened(base, "remove status records") as folder:
            for one, state in zip(records, all_liveness(records, now, here), strict=True):
                boots = {one.record.boot, here.boot}
                rebooted = one.record.host == here.host and len(boots) == 2 and "" not in boots
                ended = state is Liveness.DEAD or (rebooted and freshest[one.record.engine] < now - PRUNED_AFTER)
                forgotten = state is Liveness.SILENT and freshest[one.record.engine] < now - _FORGOTTEN_AFTER
                if (ended and one.heartbeat < now - PRUNED_AFTER) or forgotten:
                    with suppress(OSError):
                        # Its process, or another with its PID, may have written it again since it was read.
                        if os.stat(one.path.name, dir_fd=folder, follow_symlinks=False).st_mtime == one.heartbeat:
                            os.unlink(one.path.name, dir_fd=folder)
            with os.scandir(folder) as entries:
                names = [entry.name for entry in islice(entries, ENTRIES)]
            for name in names:
                # Its process ended while it wrote: no write takes an hour.
                if _TEMPORARY.fullmatch(name):
                    with suppress(OSError):
                        if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < now - PRUNED_AFTER:
                            os.unlink(name, dir_fd=folder)
