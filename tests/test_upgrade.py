"""An upgrade under running engines: records of version 0.1.0 beside those of this one, in one folder.

`support/interface/records.json` was left by a `vllm serve` 0.21.0 on a CPU, with the plugin at 3340855, on 2026-11-30.
The older `fleet` also read the newer engine's records there; what it needs of them is compared here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from records import elsewhere, leave, record
from vllm_graphfix import __version__, fixes
from vllm_graphfix.commands.fleet import as_json, look
from vllm_graphfix.fix import Code
from vllm_graphfix.records import FixReport, Record, own_folder

pytestmark = pytest.mark.usefixtures("alone")

EARLIER: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "support" / "interface" / "records.json").read_text()
)
"""By role."""
ENGINE = EARLIER["worker"]["engine"]
STATES = set("active observing off not-needed not-in-canary incompatible conflict failed waiting".split())
"""Those that 0.1.0 knows; it refuses a record with another one."""


def leave_earlier(base: Path) -> None:
    """Leave the records of the older engine, as of now."""
    for fields in EARLIER.values():
        leave(base, Record.from_json(fields))
        # What a running engine of that version goes on writing, not this version's form of it.
        file = own_folder(base) / f"{ENGINE}-{fields['host']}-{fields['pid']}.json"
        file.write_text(json.dumps(fields))


def newer(rank: int | None = None, **changes: Any) -> Record:
    return record(elsewhere(5000 + (rank or 0)), rank=rank, **{"graphfix": __version__, "graphs": False, **changes})


def test_engines_of_both_versions_are_in_order_in_one_folder(tmp_path: Path) -> None:
    leave_earlier(tmp_path)
    leave(tmp_path, newer(), newer(0))
    fleet = as_json(look(tmp_path))
    assert (fleet["wrong"], fleet["problems"]) == ([], [])
    versions = {engine["engine"]: engine["graphfix"] for engine in fleet["engines"]}
    assert versions[ENGINE] == ["0.1.0"]
    assert set(map(tuple, versions.values())) == {("0.1.0",), (__version__,)}
    (earlier,) = (engine for engine in fleet["engines"] if engine["engine"] == ENGINE)
    assert {process["role"] for process in earlier["processes"]} == set(EARLIER)
    assert earlier["status"] == "in order"


def test_a_rank_of_another_version_in_one_engine_is_wrong(tmp_path: Path) -> None:
    leave_earlier(tmp_path)
    leave(tmp_path, newer(1, engine=ENGINE, world_size=2))
    (engine,) = as_json(look(tmp_path))["engines"]
    assert any("vllm-graphfix differs" in each for each in engine["wrong"])


def test_a_newer_record_has_all_that_an_older_reader_needs() -> None:
    """After the way back, and where an older `fleet` looks at newer engines."""
    fixes = {"capture-state": FixReport("auto", "unknown", "newer code", Code.NONE.value)}
    for fields, earlier in (
        (newer().as_json(), EARLIER["front-end"]),
        (newer(0, fixes=fixes).as_json(), EARLIER["worker"]),
    ):
        assert fields["schema"] == earlier["schema"]
        assert {*earlier} - {*fields} == set()
        of_fix = {key for fix in earlier["fixes"].values() for key in fix}
        assert all(of_fix <= {*fix} for fix in fields["fixes"].values())
        assert {fix["state"] for fix in fields["fixes"].values()} <= STATES


@pytest.mark.parametrize("text", ["", None, f'__version__ = "{__version__}"\n'])
def test_a_fix_is_imported_from_the_files_of_this_version(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "_version.py").write_text(text)
    monkeypatch.setattr(fixes, "_VERSION_FILE", tmp_path / "_version.py")
    monkeypatch.delitem(sys.modules, "vllm_graphfix.fixes.mamba_padding", raising=False)
    assert fixes.module_of("mamba-padding").FIX.name == "mamba-padding"


def test_no_fix_is_imported_from_the_files_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when pip has replaced them under a running engine, which imports a model late."""
    (tmp_path / "_version.py").write_text('"""The version."""\n\n__version__ = "9.8.7"\n')
    monkeypatch.setattr(fixes, "_VERSION_FILE", tmp_path / "_version.py")
    monkeypatch.delitem(sys.modules, "vllm_graphfix.fixes.mamba_padding", raising=False)
    with pytest.raises(ImportError, match=f"now those of '9.8.7', and this process runs {__version__}; restart"):
        fixes.module_of("mamba-padding")
