"""A new release of vLLM is added: what is written by hand, what is said of it, and what stops it.

The tools that write the manifest and the pages have tests of their own; here they are only named.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import fetch_vllm
import make_manifest
import new_release
import warm_python
from edited import before, edited
from stock import ALL_RELEASES, release_root
from vllm_files import CUTLASS_MLA, RUNNER
from vllm_graphfix import manifest
from wheels import write_wheel

NEWEST = ALL_RELEASES[-1]
NEXT = "99.0.0"


RUN_NEW_CODE = new_release.run_new_code


class Tree(NamedTuple):
    """Copies of the files that name releases, and the tools that were called."""

    fetch: Path
    about: Path
    called: list[tuple[str, ...]]
    failing: list[str]

    def written(self) -> list[str]:
        return [self.fetch.read_text(), self.about.read_text()]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    here = Tree(tmp_path / "fetch_vllm.py", tmp_path / "_about.py", [], [])
    shutil.copy(new_release.FETCH, here.fetch)
    shutil.copy(new_release.ABOUT, here.about)

    def run(tool: str, *arguments: str, check: bool = True) -> int:
        here.called.append((tool, *arguments))
        return int(tool in here.failing)

    records = shutil.copy(fetch_vllm.RECORDS, tmp_path / "release_records.json")
    names = {"FETCH": here.fetch, "ABOUT": here.about, "RECORDS": Path(records), "FRAGMENTS": tmp_path, "run": run}
    names |= {"gpus": tuple, "run_new_code": lambda root: {}}  # the tests that run the double take the real one back
    for name, value in (names | {"REPORT": tmp_path / "build" / "report.md"}).items():
        monkeypatch.setattr(new_release, name, value)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / NEWEST).symlink_to(release_root(NEWEST))
    monkeypatch.setenv("GRAPHFIX_RELEASES", str(tmp_path / "cache"))
    return here


@pytest.fixture
def add(tree: Tree, tmp_path: Path) -> Callable[..., str]:
    """Adds a release whose tree is the newest one's with an edit; its report."""

    def added(
        changes: dict[str, Callable[[str], str]] | None = None, code: int = 0, version: str = NEXT, read: str = ""
    ) -> str:
        edited((tmp_path / "cache" / NEWEST).resolve(), tmp_path / "cache" / version, changes or {})
        options = ["--no-archive", *(["--read", read] if read else [])]
        assert new_release.main([version, *options]) == code
        return new_release.REPORT.read_text()

    return added


def test_the_newest_release_is_what_both_files_name(tree: Tree) -> None:
    before = tree.written()
    assert new_release.read_releases() == list(ALL_RELEASES)
    new_release.write_releases(ALL_RELEASES[:-1])
    assert tree.written() != before
    assert f'NEWEST = "{ALL_RELEASES[-2]}"' in tree.about.read_text()
    new_release.write_releases([NEWEST, *ALL_RELEASES[:-1]])
    assert tree.written() == before


def test_a_release_whose_code_is_known_is_added(add: Callable[..., str], tree: Tree) -> None:
    report = add()
    assert new_release.read_releases() == [*ALL_RELEASES, NEXT]
    assert f'NEWEST = "{NEXT}"' in tree.about.read_text()
    steps = [("make_manifest.py", NEXT), ("update_docs.py",), ("record_evidence.py", "--release", NEXT)]
    assert tree.called == steps
    assert f"Every verdict is that of {NEWEST}." in report
    assert "- docs/shadow.md:" in report, "its reader is told which pages name the last release by hand"
    assert f"vLLM {NEXT} is known" in (tree.fetch.parent / f"releases-{NEXT.replace('.', '-')}.added.md").read_text()


def test_without_a_gpu_the_report_has_the_hunt_s_command(add: Callable[..., str]) -> None:
    assert "No hunt: this machine has no GPU." in (report := add())
    assert f"hunt-{NEXT} --cases 60 --changed-since" in report


@pytest.mark.parametrize(("has", "ended", "code"), [(NEWEST, 0, 0), (NEXT, 3, 0), (NEXT, 1, 1)])
def test_with_a_gpu_a_release_that_is_installed_is_hunted(
    add: Callable[..., str], monkeypatch: pytest.MonkeyPatch, has: str, ended: int, code: int
) -> None:
    called: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        called.append(command)
        return subprocess.CompletedProcess(command, ended, f"{has}\n")

    monkeypatch.setattr(new_release, "gpus", lambda: ("an H200",))
    monkeypatch.setattr(subprocess, "run", run)
    report = add(code=code)
    assert ("The hunt ended with exit code" in report) == (has == NEXT)
    assert any("hunt" in command for command in called) == (has == NEXT)


def test_nothing_is_written_of_a_release_that_a_fix_does_not_recognise(add: Callable[..., str], tree: Tree) -> None:
    before = tree.written()
    renamed = {RUNNER: lambda text: text.replace("_bookkeeping_sync", "_sync_bookkeeping")}
    report = add(renamed, code=3)
    assert (tree.written(), tree.called) == (before, [])
    assert not list(tree.fetch.parent.glob("*.added.md"))
    assert "**Not added**: 1 of " in report
    assert "`prompt-logprobs` was `affected`, is `unrecognised`: " in report
    assert f"/{NEXT}/{RUNNER}`" in report, "a command shows what became of the file"


def test_new_code_is_recorded_as_the_double_confirms_it(
    add: Callable[..., str], tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that stays as it is is read once more: new surroundings of a defect."""
    monkeypatch.setattr(new_release, "run_new_code", RUN_NEW_CODE)
    python = warm_python.executable()
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setenv(warm_python.SPAWNED, python)
    report = add({CUTLASS_MLA: before("if H < MAX_HEADS:", "out.sum()")})
    assert "| `cutlass-mla-padding` | affected | affected: the fix helps |" in report
    assert ("make_manifest.py", NEXT) in tree.called


@pytest.mark.parametrize(("outcome", "phrase"), [("right", "contradicts"), ("not decided", "could not run")])
def test_what_the_double_does_not_confirm_is_not_recorded_before_somebody_read_it(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str, phrase: str
) -> None:
    written = tree.written()
    monkeypatch.setattr(new_release, "run_new_code", lambda root: {"triton-mla-padding": outcome})
    edited((tmp_path / "cache" / NEWEST).resolve(), tmp_path / "cache" / NEXT, {})
    assert new_release.main([NEXT, "--no-archive"]) == 3
    report = new_release.REPORT.read_text()
    assert f"| `triton-mla-padding` | affected | {outcome} |" in report
    assert phrase in report
    assert "READ='triton-mla-padding'" in report
    assert (tree.written(), tree.called) == (written, [])
    assert new_release.main([NEXT, "--no-archive", "--read", "triton-mla-padding"]) == 0
    assert ("make_manifest.py", NEXT) in tree.called


def test_another_verdict_is_reported_with_what_has_to_be_written_by_hand() -> None:
    """0.33.0 beside 0.32.0, where upstream has put one defect right."""
    entries = json.loads(manifest.PATH.read_text())["fixes"]["compressor-skip"]
    assert [each["verdict"] for each in entries if "0.33.0" in each["releases"]] == ["fixed"]
    judged = make_manifest.look_at("0.33.0", release_root("0.33.0"))["fixes"]
    changes = new_release.changed(judged, "0.32.0")
    report = "\n".join(new_release.to_look_at(changes, "0.33.0", "0.32.0"))
    assert "- `compressor-skip` was `affected`, is `fixed`: " in report
    assert "`Releases`, `Absent` and `Removable` in vllm_graphfix/fixes/compressor_skip.md have to say so" in report
    assert "- `draft-graph-support`, `fixed`: `GPUModelRunner.capture_model`" in report
    assert "- `triton-mla-padding`, `affected`: outside of its slices" in report


@pytest.mark.parametrize("version", [NEWEST, "0.1.0", "0.34", "0.34.0rc1"])
def test_what_is_no_new_stock_release_is_refused(tree: Tree, version: str) -> None:
    before = tree.written()
    assert new_release.main([version, "--no-archive"]) == 1
    assert (tree.written(), tree.called) == (before, [])
    assert f"Not added: {version} is known already" in new_release.REPORT.read_text()


@pytest.mark.usefixtures("tree")
def test_without_a_version_the_index_is_searched_for_newer_ones(wheel_index: Path) -> None:
    """Stock releases alone; older ones that are not known are left alone."""
    for version in ("0.1.0", NEWEST, "99.1.0rc1", "99.1.0", "99.0.1"):
        write_wheel(wheel_index, {}, "vllm", version, "cp38-abi3-manylinux_2_31_x86_64")
    assert new_release.newer() == ["99.0.1", "99.1.0"]


def test_where_nothing_is_newer_nothing_is_done(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_release, "newer", list)
    before = tree.written()
    assert new_release.main(["--no-archive"]) == 0
    assert (tree.written(), tree.called) == (before, [])
    assert new_release.REPORT.read_text() == f"No release is newer than {NEWEST}.\n"


def test_the_archive_is_packed_with_the_options_and_its_readme_reported(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_release, "PROJECT", tmp_path)
    monkeypatch.setattr(new_release, "ARCHIVES", tmp_path / "gpu")
    edited((tmp_path / "cache" / NEWEST).resolve(), tmp_path / "cache" / NEXT, {})
    wheel = write_wheel(tmp_path / "cache", {}, "vllm", NEXT, "cp38-abi3-manylinux_2_31_x86_64")
    (tmp_path / "gpu" / NEXT).mkdir(parents=True)
    (tmp_path / "gpu" / NEXT / "README").write_text("sh unpack.sh there\n")
    assert new_release.main([NEXT, "--pack", "--python", "3.13"]) == 0
    assert tree.called[-1] == ("pack_gpu.py", NEXT, "--out", str(tmp_path / "gpu" / NEXT), "--python", "3.13")
    assert "    sh unpack.sh there\n" in new_release.REPORT.read_text()
    assert not wheel.exists()
    assert fetch_vllm.wheel(NEXT) is None


def test_a_failed_proof_or_archive_is_reported_and_the_release_stays_added(tree: Tree, tmp_path: Path) -> None:
    edited((tmp_path / "cache" / NEWEST).resolve(), tmp_path / "cache" / NEXT, {})
    wheel = write_wheel(tmp_path / "cache", {}, "vllm", NEXT, "cp38-abi3-manylinux_2_31_x86_64")
    tree.failing.extend(["record_evidence.py", "pack_gpu.py"])
    assert new_release.main([NEXT, "--pack", "--python", "3.13"]) == 1
    report = new_release.REPORT.read_text()
    assert "The CPU double did not prove every fix" in report
    assert f"`python tools/pack_gpu.py {NEXT} --out {new_release.ARCHIVES / NEXT} --python 3.13`" in report
    assert new_release.read_releases()[-1] == NEXT
    assert wheel.exists()
