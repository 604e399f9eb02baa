"""Shared by the tests of benchmarks: their folder on the path, a double of a GPU, and sites of stock releases."""

from __future__ import annotations

import sys
from pathlib import Path

from stock import release_root

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from measuring.engine_cases import Site, find_sites
from vllm_graphfix.verify.engine.device import Device

GPU = Device("Double of a GPU", "", (9, 0), 100.0, 139.0, "0", "0", "0", "0")


def sites(*releases: str) -> tuple[Site, ...]:
    return find_sites([f"{release}={release_root(release)}" for release in releases])
