"""Status records: one small file for each process, and reading those of all processes.

A folder may be hostile, full, gone or hanging. Writing raises `OSError`, reading turns errors into text, and `Reporter`
writes without its caller waiting for the disk.
"""

from __future__ import annotations

from vllm_graphfix.records.clock import CLOCKS_DIFFER, HeartbeatWatch, by_this_clock
from vllm_graphfix.records.folder import base_folder, own_folder, path_text
from vllm_graphfix.records.liveness import Liveness, all_liveness, liveness_of, may_run, visible
from vllm_graphfix.records.process_identity import Identity, exists, identity
from vllm_graphfix.records.pruning import PRUNED_AFTER, prune
from vllm_graphfix.records.reading import FILES, Reading, StoredRecord, Unreadable, read
from vllm_graphfix.records.record import (
    FILE_NAME,
    LARGEST,
    MOST_FOLLOWERS,
    AgreementReport,
    Decided,
    FalseClaim,
    FixReport,
    MovedTensor,
    OtherMetadata,
    OverwrittenBlock,
    Rank,
    Record,
    RecordError,
    TracedArgument,
    Wrong,
)
from vllm_graphfix.records.reporter import HEARTBEAT, Reporter
from vllm_graphfix.records.writing import is_stored, remove, touch, touch_outdated, write, write_or_mark

__all__ = [
    "CLOCKS_DIFFER",
    "FILES",
    "FILE_NAME",
    "HEARTBEAT",
    "LARGEST",
    "MOST_FOLLOWERS",
    "PRUNED_AFTER",
    "AgreementReport",
    "Decided",
    "FalseClaim",
    "FixReport",
    "HeartbeatWatch",
    "Identity",
    "Liveness",
    "MovedTensor",
    "OtherMetadata",
    "OverwrittenBlock",
    "Rank",
    "Reading",
    "Record",
    "RecordError",
    "Reporter",
    "StoredRecord",
    "TracedArgument",
    "Unreadable",
    "Wrong",
    "all_liveness",
    "base_folder",
    "by_this_clock",
    "exists",
    "identity",
    "is_stored",
    "liveness_of",
    "may_run",
    "own_folder",
    "path_text",
    "prune",
    "read",
    "remove",
    "touch",
    "touch_outdated",
    "visible",
    "write",
    "write_or_mark",
]
