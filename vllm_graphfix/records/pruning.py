"""Removes the records of processes that ended without doing so."""

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

PRUNED_AFTER = 3600.0
_FORGOTTEN_AFTER = 7 * 24 * 3600.0
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}-[A-Za-z0-9._-]{1,64}-[0-9]{1,10}\.json\.[0-9a-f]{8}")


def prune(base: Path, offset: float = 0.0) -> None:
    """Removes what this user's ended processes have left.

    The clock that dates files there is *offset* seconds ahead of this machine's.
    It goes an hour after they have ended, where it is sure that they have; else after a week. Never raises.
    """
    with suppress(Exception):
        # By the clock that dates these files: by one that is ahead, what is being written would look forgotten.
        now, here = time.time() + offset, identity()
        found = read(base, own=True).found
        freshest: dict[str, float] = {}
        for one in found:
            freshest[one.record.engine] = max(freshest.get(one.record.engine, 0.0), one.heartbeat)
        with opened(base, "remove status records") as folder:
            for one, state in zip(found, all_liveness(found, now, here), strict=True):
                rebooted = one.record.host == here.host and "" != one.record.boot != here.boot != ""
                ended = state is Liveness.DEAD or (rebooted and freshest[one.record.engine] < now - PRUNED_AFTER)
                forgotten = state is Liveness.SILENT and freshest[one.record.engine] < now - _FORGOTTEN_AFTER
                if (ended and one.heartbeat < now - PRUNED_AFTER) or forgotten:
                    with suppress(OSError):
                        os.unlink(one.path.name, dir_fd=folder)
            with os.scandir(folder) as entries:
                names = [entry.name for entry in islice(entries, ENTRIES)]
            for name in names:
                # A process ended while it wrote; nobody takes an hour for that.
                if _TEMPORARY.fullmatch(name):
                    with suppress(OSError):
                        if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < now - PRUNED_AFTER:
                            os.unlink(name, dir_fd=folder)
