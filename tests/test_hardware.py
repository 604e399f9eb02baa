"""GPUs: the generation that a name tells, and those that the driver tells of."""

from __future__ import annotations

from pathlib import Path

import pytest

from served_models import AMPERE, BLACKWELL, HOPPER
from vllm_graphfix.deployment import hardware


@pytest.mark.parametrize(
    ("name", "major"),
    [
        (HOPPER, 9), (AMPERE, 8), (BLACKWELL, 10), ("NVIDIA GH200 480GB", 9), ("NVIDIA H20", 9), ("NVIDIA GB200", 10),
        ("NVIDIA L40S", 8), ("NVIDIA A10G", 8), ("NVIDIA GeForce RTX 4090", 8), ("NVIDIA GeForce RTX 5090", 12),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 12), ("Tesla T4", 7), ("Tesla V100-SXM2-16GB", 7),
        ("AMD Instinct MI300X", 0), ("9.0", 9), ("sm_100", 10), ("sm90a", 9), ("", None), ("a GPU", None),
    ],
)  # fmt: skip
def test_a_gpus_name_tells_its_generation(name: str, major: int | None) -> None:
    assert hardware.capability(name) == major


def test_gpus_are_those_that_the_driver_tells_of(tmp_path: Path) -> None:
    for number, name in enumerate((HOPPER, AMPERE)):
        folder = tmp_path / "gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 42\n")
    (tmp_path / "gpus" / "broken").mkdir()
    assert hardware.gpus(tmp_path) == (HOPPER, AMPERE)
    assert hardware.gpus(tmp_path / "nowhere") == ()
