"""Stands in for ``benchmarks/measuring/engine_worker.py``: keeps to its side of the pipe, without a vLLM.

Which engine it is, it reads off the name of its compile cache. ENGINE_WORKER_STAND_IN is JSON: what the engines of that
name do.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

NAME = Path(os.environ["VLLM_CACHE_ROOT"]).name.removeprefix("cache-")
BEHAVIOUR: str = json.loads(os.environ["ENGINE_WORKER_STAND_IN"]).get(NAME, "")
SECONDS = {"eager": 4.0, "piecewise": 3.0, "fixed": 1.0} | dict.fromkeys(
    ("stock", "stock-again", "patched", "observed"), 2.0
)
MIB = 1 << 20


def main(parent: Any) -> None:
    order = parent.recv()
    graphs = order["arguments"].get("compilation_config", {"mode": 0, "cudagraph_mode": "NONE"})
    if BEHAVIOUR == "does not compile" and graphs["mode"]:
        parent.send({"error": "RuntimeError: no compiler here"})
        return
    if BEHAVIOUR == "hangs":
        signal.pause()
    patched = order["plugin"]
    parent.send(time.monotonic())
    parent.send(
        {
            "vllm": "0",
            "torch": "0",
            "compilation_mode": str(graphs["mode"]),
            "cudagraph_mode": graphs["cudagraph_mode"],
            "cpu_seconds": 1.0,
            "capture_seconds": 2.0 if patched else 1.0,
            "reserved_bytes": (108 if patched else 100) * MIB,
            "active": ["capture-state", "draft-prefill-state"] if patched else [],
        }
    )
    while True:
        request = parent.recv()
        if "in_turns" in request:
            with_wrappers = 2.0 if BEHAVIOUR == "slow with wrappers" and not request["control"] else 1.0
            parent.send([with_wrappers, 1.0, 1.0, with_wrappers] * (request["steps"] // 4))
            continue
        if BEHAVIOUR == "crashes at batch 8" and request["batch"] == 8:
            sys.stderr.write("terminate called\n  what():  CUDA error: an illegal memory access was encountered\n")
            os.kill(os.getpid(), signal.SIGABRT)
        parent.send(SECONDS[NAME.partition("-")[2]] * request["batch"])


if __name__ == "__main__":
    try:
        main(Connection(int(sys.argv[1])))
    except EOFError:
        sys.exit(0)
