"""Sums up the records of all engines' processes: who agrees, who is gone, and who is silent."""

from __future__ import annotations

from vllm_graphfix.commands.fleet.engine import Engine
from vllm_graphfix.commands.fleet.json_report import as_json
from vllm_graphfix.commands.fleet.member import Member
from vllm_graphfix.commands.fleet.prometheus import Source, look_at
from vllm_graphfix.commands.fleet.survey import Fleet, FleetError, look
from vllm_graphfix.commands.fleet.table import kind, render, watch
from vllm_graphfix.commands.fleet.unrecorded import Unrecorded

__all__ = [
    "Engine",
    "Fleet",
    "FleetError",
    "Member",
    "Source",
    "Unrecorded",
    "as_json",
    "kind",
    "look",
    "look_at",
    "render",
    "watch",
]
