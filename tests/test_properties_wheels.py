"""Whatever a wheel holds, or our manifest has become: `status` says what it is, in time, and runs nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostile import JSON, METADATA, READ, TEXT, Files, changed, dumped, made, metadata, share, stock_files, zipped
from vllm_files import RUNNER
from vllm_graphfix import manifest
from watched import Answer, answer, judged, watched

MB = 1 << 20


@pytest.fixture(scope="module")
def stock() -> Files:
    return stock_files()


members = (
    st.sampled_from([*READ, "vllm/__init__.py", METADATA, "../../canary", "/canary", "..\\canary", "a//b", "C:\\x"])
    | st.builds("{}.dist-info/METADATA".format, TEXT)
    | TEXT
).map(lambda name: name.encode("utf-8", "replace").decode().replace("\0", ""))


@given(st.lists(st.tuples(members, st.binary(max_size=60) | metadata), max_size=8), st.sampled_from([0, 8, 12, 14]))
@share(30)
def test_a_wheel_of_any_members_is_a_verdict_or_one_error(
    stock: Files, added_members: list[tuple[str, bytes]], compression: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        wheel = zipped(Path(name) / "vllm.whl", stock)
        with warnings.catch_warnings(), zipfile.ZipFile(wheel, "a", compression) as archive:
            warnings.simplefilter("ignore", UserWarning)  # a name for the second time
            for member, content in [*added_members, *added_members]:  # each twice
                archive.writestr(member or "x", content)
        judged(wheel)
        assert list(Path(name).iterdir()) == [wheel]


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40), st.binary(max_size=40)), min_size=1, max_size=4),
    st.booleans(),
)
@share(60)
def test_a_damaged_wheel_is_a_verdict_or_one_error(
    stock: Files, cuts: list[tuple[float, int, bytes]], at_the_end: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        small = {path: content[:500] for path, content in stock.items()}
        data = zipped(Path(name) / "vllm.whl", small).read_bytes()
        for where, removed, put in cuts:
            place = int(len(data) * (1 - where / 5 if at_the_end else where))  # where the list of members is
            data = data[:place] + put + data[place + removed :]
        (Path(name) / "vllm.whl").write_bytes(data)
        judged(Path(name) / "vllm.whl")


@given(st.binary(max_size=300) | st.binary(max_size=100).map(lambda data: b"PK\x05\x06" + data))
@share(30)
def test_a_file_of_any_bytes_is_one_error(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "x.whl").write_bytes(content)
        assert judged(Path(name) / "x.whl").value.code == 2


def a_bomb(path: Path, compression: int) -> None:
    """128 MB in one member, which claims 1,000 bytes."""
    with zipfile.ZipFile(path, "w", compression, compresslevel=9) as archive:
        archive.writestr("vllm/__init__.py", "")
        with archive.open(RUNNER, "w") as member:
            for _ in range(128):
                member.write(bytes(MB))
            member.write(bytes(12_345))  # so that the size is a number that stands nowhere else
    data = path.read_bytes().replace((128 * MB + 12_345).to_bytes(4, "little"), (1000).to_bytes(4, "little"))
    path.write_bytes(data)


def deflated(stock: Files, path: Path) -> None:
    a_bomb(path, zipfile.ZIP_DEFLATED)


def bzipped(stock: Files, path: Path) -> None:
    a_bomb(path, zipfile.ZIP_BZIP2)


def a_large_claim(stock: Files, path: Path) -> None:
    zipped(path, {"vllm/__init__.py": b"", RUNNER: b"x" * 1000}, zipfile.ZIP_STORED)
    path.write_bytes(path.read_bytes().replace((1000).to_bytes(4, "little"), (0xFFFFFFF0).to_bytes(4, "little")))


def many_members(stock: Files, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        for number in range(30_000):
            archive.writestr(f"{number}", "")


def a_huge_list_of_members(stock: Files, path: Path) -> None:
    """A sparse file of 4 GB, all of it the list of members."""
    size = 0xFFFFFF00
    end = b"PK\x05\x06" + bytes(4) + (65535).to_bytes(2, "little") * 2 + size.to_bytes(4, "little") + bytes(4 + 2)
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(0, os.SEEK_END)
        file.write(end)


def overlapping(stock: Files, path: Path) -> None:
    """All members are one: the list names the same place a thousand times."""
    zipped(path, {f"{name}": b"x" * 1000 for name in ("vllm/__init__.py", RUNNER)})
    data = path.read_bytes()
    start = data.rindex(b"PK\x01\x02")
    again = data[start : data.rindex(b"PK\x05\x06")]
    end = bytearray(data[data.rindex(b"PK\x05\x06") :])
    end[8:12] = (1002).to_bytes(2, "little") * 2
    size = int.from_bytes(end[12:16], "little") + 1000 * len(again)
    end[12:16] = size.to_bytes(4, "little")
    path.write_bytes(data[: data.rindex(b"PK\x05\x06")] + again * 1000 + bytes(end))


def encrypted(stock: Files, path: Path) -> None:
    data = bytearray(zipped(path, stock).read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = data.find(signature)
        while place >= 0:
            data[place + flags] |= 1
            place = data.find(signature, place + 4)
    path.write_bytes(data)


def of_an_unknown_version(stock: Files, path: Path) -> None:
    data = bytearray(zipped(path, stock).read_bytes())
    data[data.rindex(b"PK\x01\x02") + 6] = 99
    path.write_bytes(data)


def with_a_name_that_is_no_text(stock: Files, path: Path) -> None:
    path.write_bytes(zipped(path, stock | {"é": b""}).read_bytes().replace("é".encode(), b"\xff\xff"))


BAD_WHEELS = [deflated, a_large_claim, many_members, a_huge_list_of_members, overlapping, encrypted]
BAD_WHEELS += [bzipped, of_an_unknown_version, with_a_name_that_is_no_text]


@pytest.mark.parametrize("make", BAD_WHEELS)
def test_a_wheel_made_to_exhaust_a_reader_is_judged_within_limits(stock: Files, tmp_path: Path, make: Any) -> None:
    path = tmp_path / "vllm.whl"
    make(stock, path)
    seen = judged(path, seconds=10, memory=80 << 20)
    # Many members are no harm, and that members overlap newer Pythons find.
    assert seen.value.code == 2 or make in (many_members, overlapping), seen.value
    assert list(tmp_path.iterdir()) == [path]


def test_a_bomb_for_bzip2_is_refused_before_it_is_opened(stock: Files, tmp_path: Path) -> None:
    judged(zipped(tmp_path / "vllm.whl", stock, zipfile.ZIP_BZIP2))
    assert "uses a compression that no vLLM wheel uses" in judged(tmp_path / "vllm.whl").value.err


# -- a terminal ------------------------------------------------------------------------------------------------------


def test_a_terminal_that_knows_ascii_only_and_a_path_that_is_no_text_are_served(stock: Files, tmp_path: Path) -> None:
    few = {path: stock[path] for path in ("vllm/__init__.py", METADATA, RUNNER)}  # whose judgement takes less time
    root = made(tmp_path / os.fsdecode(b"\xff\xc3\xa9\x1b[2J"), few)
    for encoding in ("ascii", "utf-8"):
        for path in (root, root / "nowhere"):
            done = subprocess.run(
                [sys.executable, "-m", "vllm_graphfix", "status", "--vllm", str(path)],
                env=os.environ | {"PYTHONIOENCODING": f"{encoding}:strict"},
                capture_output=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == (0 if path == root else 2), done.stderr
            assert b"Traceback" not in done.stderr
            assert b"\x1b" not in done.stdout + done.stderr


# -- our manifest ------------------------------------------------------------------------------------------------

ENTRY = {
    "verdict": "affected",
    "reason": "a",
    "where": "b",
    "shape": "c",
    "evidence": {"d": "e"},
    "releases": ["0.18.1"],
}
MANIFEST = {"schema": 1, "files": {RUNNER: {"0" * 24: "0.18.1"}}, "fixes": {"mamba-padding": ENTRY}}


def of_lists(value: Any) -> Any:
    """A value in the form of a manifest: a list of entries for a fix."""
    fixes = value.get("fixes")
    if isinstance(fixes, dict):
        value["fixes"] = {name: [entry] for name, entry in fixes.items()}
    return value


@given(
    st.binary(max_size=100)
    | JSON.map(lambda value: dumped(value).encode())
    | changed(MANIFEST).map(lambda value: dumped(of_lists(value)).encode())
)
@share(50)
def test_whatever_our_manifest_has_become_it_is_a_verdict_or_one_error(stock: Files, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = made(Path(name) / "site", {path: content[:2000] for path, content in stock.items() if path != RUNNER})
        spoilt = Path(name) / "manifest.json"
        spoilt.write_bytes(content)

        def run_status() -> Answer:
            manifest.PATH = spoilt
            manifest.load.cache_clear()
            return answer("status", f"--vllm={root}")

        outcome = watched(run_status, seconds=10, memory=64 << 20).value
        assert outcome.code in (0, 2)
        assert (
            outcome.code == 0 or "reinstall vllm-graphfix" in outcome.err or "not readable Python source" in outcome.err
        )
