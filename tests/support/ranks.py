"""Ranks that leave their reports in one store, and what each of them finds there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from vllm_graphfix.engine.rank_agreement import Agreement, compare, publish
from vllm_graphfix.engine.rank_report import RankReport, new_token

STAGE = "start"


def report(host: str = "node-a", **changed: Any) -> RankReport:
    rank_report = RankReport(
        host=host,
        pid=1,
        engine="e" * 16,
        graphfix="0.1.0",
        vllm="0.21.0",
        canary=True,
        master="on",
        modes={"mamba-padding": "auto", "capture-state": "auto"},
        states={"mamba-padding": "active", "capture-state": "active"},
        token=new_token(),
    )
    return rank_report._replace(**changed)


def compared(
    reports: dict[int, RankReport], world_size: int, timeout: float = 20.0
) -> tuple[dict[int, Agreement], list[str]]:
    """Return the agreement that each of the ranks in *reports* reached, and the warnings of all.

    Each rank has a connection of its own to one store.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stores = [TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))]
    stores += [TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30)) for _ in reports][1:]
    agreements: dict[int, Agreement] = {}
    warnings: list[str] = []

    def run(store: TCPStore, rank: int, rank_report: RankReport) -> None:
        mine = PrefixStore("vllm_graphfix", store)
        hosts: Callable[[int], str | None] = {3: "10.0.0.3"}.get
        place = publish(mine, STAGE, rank, rank_report)
        agreements[rank] = compare(
            mine, place, rank, world_size, rank_report, warnings.append, host_of=hosts, timeout=timeout
        )

    threads = [
        threading.Thread(target=run, args=(store, rank, rank_report))
        for store, (rank, rank_report) in zip(stores, reports.items(), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout + 30)
    return agreements, warnings
