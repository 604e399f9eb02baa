"""Diagnoses of the source of a vLLM: all stock releases against the table, and shapes rather than versions."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from edited import changes, edited, edited_source, stock_source, swap
from stock import ALL_RELEASES, release_root
from table import SAMPLE, affected_by, slow_but_for, verdict
from trial_rows import Edit, edits_of
from vllm_files import CUDAGRAPHS, FLASHMLA, RUNNER
from vllm_graphfix import manifest
from vllm_graphfix.fix import Diagnosis, Fix, Verdict
from vllm_graphfix.fixes import BY_NAME, FIXES
from vllm_graphfix.manifest import Evidence
from vllm_graphfix.source.files import Source, open_source

if TYPE_CHECKING:
    from vllm_graphfix.fix import Patchable


def test_every_stock_release_is_judged_as_the_table_says(release: str) -> None:
    source = stock_source(release_root(release))
    for fix in FIXES:
        diagnosis = manifest.diagnose(fix, source)
        assert (fix.name, diagnosis.verdict.value) == (fix.name, verdict(fix.name, release))
        assert diagnosis.known
        assert source.version == release


# One process of pytest does all of these, and looks at the structure of a release once.
by_structure = pytest.mark.xdist_group("manifest")
by_shape = slow_but_for(SAMPLE, ALL_RELEASES)
_examine = manifest.examine
_examined: dict[str, list[tuple[dict[str, str | None], tuple[Diagnosis, Evidence]]]] = {}
"""By fix: the digests of the files that were read, and what came of them: a quarter is the same in the next release."""
_digests: dict[tuple[str, str], str | None] = {}


def examined(fix: Patchable, source: Source) -> tuple[Diagnosis, Evidence]:
    return _read_and_examined(fix, source)[1]


def _read_and_examined(fix: Patchable, source: Source) -> tuple[dict[str, str | None], tuple[Diagnosis, Evidence]]:
    """Examine these files for *fix* once, and note which ones that reads, those included that others have read."""
    known = _examined.setdefault(fix.name, [])
    for entry in reversed(known):
        if all(_digest(source, path) == digest for path, digest in entry[0].items()):
            return entry
    requested: dict[str, str | None] = {}

    def read(path: str) -> bytes | None:
        requested[path] = _digest(source, path)
        return source.read(path)

    known.append((requested, _examine(fix, Source(source.label, read, lambda: None))))
    return known[-1]


def _digest(source: Source, path: str) -> str | None:
    if (source.label, path) not in _digests:
        _digests[source.label, path] = source.digest(path)
    return _digests[source.label, path]


@by_structure
@pytest.mark.parametrize("release", by_shape)
def test_structure_alone_comes_to_what_the_manifest_says(release: str) -> None:
    source = stock_source(release_root(release))
    for fix in FIXES:
        diagnosis, _ = examined(fix, source)
        assert diagnosis == manifest.diagnose(fix, source)._replace(known=False)


@pytest.mark.slow
@by_structure
def test_the_shipped_manifest_is_what_the_releases_give(monkeypatch: pytest.MonkeyPatch) -> None:
    import make_manifest

    monkeypatch.setattr(manifest, "examine", examined)
    looked_at = {version: make_manifest.look_at(version, release_root(version)) for version in ALL_RELEASES}
    shipped = json.loads(manifest.PATH.read_text())
    made = make_manifest.merged(looked_at, {"files": {}, "fixes": {}})
    assert made == {name: shipped[name] for name in made}


@by_structure
def test_looking_at_releases_again_changes_nothing_in_the_shipped_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    import make_manifest

    monkeypatch.setattr(manifest, "examine", examined)
    looked_at = {version: make_manifest.look_at(version, release_root(version)) for version in sorted(SAMPLE)}
    shipped = json.loads(manifest.PATH.read_text())
    made = make_manifest.merged(looked_at, shipped)
    assert made == {name: shipped[name] for name in made}


def test_a_diagnosis_that_raises_is_an_error_of_one_line_and_writes_no_manifest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import make_manifest

    fix = import_module("vllm_graphfix.fixes.capture_state").FIX._replace(diagnose=lambda source: source.nothing)
    monkeypatch.setattr("vllm_graphfix.fixes.capture_state.FIX", fix)
    monkeypatch.setattr(manifest, "PATH", tmp_path / "manifest.json")
    monkeypatch.setattr("sys.argv", ["make_manifest.py", "0.33.0"])
    assert make_manifest.main() == 1
    error = capsys.readouterr().err
    assert error.startswith("make_manifest: capture-state: diagnose() raises on vLLM 0.33.0: AttributeError: ")
    assert error.count("\n") == 1
    assert not manifest.PATH.exists()


@by_structure
@pytest.mark.parametrize("release", by_shape)
def test_a_diagnosis_reads_only_the_files_that_it_declares(release: str) -> None:
    stock = stock_source(release_root(release))
    for fix in FIXES:
        requested, _ = _read_and_examined(fix, stock)
        assert requested
        # A package of the module's name would be imported instead.
        assert {path for path in requested if not path.endswith("/__init__.py")} <= set(fix.inspected_files)


def test_the_place_is_in_the_source(release: str) -> None:
    root = release_root(release)
    for fix in FIXES:
        diagnosis = manifest.diagnose(fix, stock_source(root))
        if diagnosis.verdict is Verdict.AFFECTED:
            assert diagnosis.where is not None
            path, line = diagnosis.where.rsplit(":", 1)
            assert (root / path).read_text().splitlines()[int(line) - 1].strip()


def test_comments_and_formatting_do_not_make_a_shape_unknown(tmp_path: Path) -> None:
    root = edited(
        release_root("0.18.1"),
        tmp_path / "vllm",
        {FLASHMLA: lambda text: "# a fork's header\n\n" + text.replace("# MQA for the decode path", "")},
    )
    assert manifest.diagnose(BY_NAME["flashmla-fp8"], open_source(root)).known


def test_an_anonymous_release_is_judged_as_the_named_one(tmp_path: Path) -> None:
    root = edited(release_root("0.21.0"), tmp_path / "vllm", {CUDAGRAPHS: lambda text: text + "\n# local change\n"})
    source = open_source(root)
    assert source.version is None
    assert affected_by("0.21.0") == tuple(
        fix.name for fix in FIXES if manifest.diagnose(fix, source).verdict is Verdict.AFFECTED
    )


def test_an_import_that_stands_deeper_is_still_seen(tmp_path: Path) -> None:
    change = {
        FLASHMLA: swap(
            r"^from vllm\.v1\.attention\.ops\.flashmla import \(\n((?: .*\n)+)\)",
            r"if True:\n    from vllm.v1.attention.ops.flashmla import (\n\1    )",
        )
    }
    source = open_source(edited(release_root("0.18.1"), tmp_path / "vllm", change))
    assert {name: manifest.diagnose(BY_NAME[name], source).verdict for name in affected_by("0.18.1")} == dict.fromkeys(
        affected_by("0.18.1"), Verdict.AFFECTED
    )


def _kind(fix: Fix, edit: Edit) -> tuple[str, ...]:
    """In `make test` the first edit of each: what becomes of which verdict, and in which file."""
    return fix.name, verdict(fix.name, edit.release), edit.verdict.value, edit.shape, edit.path


_ALL = [(fix, edit) for fix in FIXES for edit in edits_of(fix.name)]
_FIRST = {_kind(*pair): pair[1] for pair in reversed(_ALL)}
EDITS = [
    pytest.param(
        *pair,
        id=f"{pair[0].name}-{pair[1].release}-{pair[1].what}",
        marks=() if _FIRST[_kind(*pair)] is pair[1] else pytest.mark.slow,
    )
    for pair in _ALL
]


@pytest.mark.parametrize(("fix", "edit"), EDITS)
def test_edits_of_a_trial_are_judged_as_it_says(fix: Fix, edit: Edit) -> None:
    diagnosis = manifest.diagnose(fix, edited_source(release_root(edit.release), changes(edit)))
    assert diagnosis.verdict is edit.verdict
    assert diagnosis.shape == edit.shape or not edit.shape
    assert not diagnosis.known, "no release has this very code"


@pytest.mark.parametrize("fix", FIXES, ids=lambda fix: fix.name)
def test_a_trial_edits_the_remedy_in_and_makes_a_shape_that_nobody_knows(fix: Fix) -> None:
    stock = {edit: verdict(fix.name, edit.release) for edit in edits_of(fix.name)}
    assert any((edit.verdict is Verdict.FIXED or edit.remedy) and was == "affected" for edit, was in stock.items())
    assert any(edit.verdict is Verdict.UNRECOGNISED for edit in stock)


@pytest.mark.parametrize(
    ("fix", "release", "path"),
    [
        ("prefill-dispatch", "0.20.0", RUNNER),
        ("prompt-logprobs", "0.33.0", RUNNER),
        ("idle-rank", "0.33.0", "vllm/v1/worker/gpu_worker.py"),
    ],
)
@pytest.mark.parametrize("names", ["GPUModelRunner, Worker", "*"])
def test_what_is_imported_from_elsewhere_is_neither_absent_nor_fixed(
    fix: str, release: str, path: str, names: str
) -> None:
    """A module that was moved, and imports from its new place what others expect of it."""
    moved = f"from vllm.elsewhere import {names}\n"
    source = edited_source(release_root(release), {path: lambda _: moved})
    assert manifest.diagnose(BY_NAME[fix], stock_source(release_root(release))).verdict is Verdict.AFFECTED
    diagnosis = manifest.diagnose(BY_NAME[fix], source)
    assert (diagnosis.verdict, diagnosis.known) == (Verdict.UNRECOGNISED, False)
