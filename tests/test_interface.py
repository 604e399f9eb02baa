"""The output that scripts and running engines of version 0.1.0 read is still the same: JSON, and the files of records.

`support/interface/` was written by that version, on 2026-11-23.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from records import ENGINE, elsewhere, leave, only, record
from stock import release_root
from vllm_graphfix import __version__
from vllm_graphfix.commands import explain
from vllm_graphfix.commands.fleet import as_json, look
from vllm_graphfix.commands.status import status
from vllm_graphfix.fixes import OBSERVED_BY_DEFAULT
from vllm_graphfix.fixes._about import NEWEST
from vllm_graphfix.records import own_folder
from vllm_graphfix.source.files import open_source

FOLDER = Path(__file__).parent / "support" / "interface"


def earlier_output(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


@pytest.mark.parametrize("release", ["0.18.1", "0.33.0"])
def test_status_tells_the_same(release: str) -> None:
    output = status(open_source(release_root(release)), {"VLLM_GRAPHFIX_MAMBA_PADDING": "off"}).as_json()
    before = earlier_output("status")[release]
    del output["source"], output["default_runner"]  # the second is told since
    assert (output.pop("graphfix"), before.pop("graphfix")) == (__version__, "0.1.0")
    for row in output["fixes"]:
        del row["rests_on"], row["ran_on"], row["defect_seen"], row["tree"]  # told since
    now_applied = {row["name"] for row in before["fixes"] if row["mode"] == "observe"} - OBSERVED_BY_DEFAULT
    for row in (row for each in (output, before) for row in each["fixes"] if row["name"] in now_applied):
        for what in ("mode", "would_be", "notes"):
            del row[what]
    assert without_later_fixes(output) == before


def test_explain_tells_the_same() -> None:
    """Up to the newest release, which was another one then."""
    output = json.loads(json.dumps(explain.all_as_json()).replace(NEWEST, "0.33.0"))
    assert without_later_fixes(output) == earlier_output("explain")


def without_later_fixes(output: dict[str, Any]) -> dict[str, Any]:
    """A fix that was added since is one more entry, which is no other interface."""
    known = {fix["name"] for fix in earlier_output("explain")["fixes"]}
    return output | {"fixes": [fix for fix in output["fixes"] if fix["name"] in known]}


def test_a_record_of_a_running_older_version_is_read_and_written_alike(tmp_path: Path) -> None:
    """An engine that was started before an upgrade goes on writing its own records, which a newer `fleet` reads."""
    file = own_folder(tmp_path) / f"{ENGINE}-node-b-4242.json"
    file.parent.mkdir(mode=0o700, exist_ok=True)
    file.write_bytes((FOLDER / "record.json").read_bytes())
    file.chmod(0o600)
    here = record(elsewhere(4242), rank=0, world_size=2)
    assert only(tmp_path).record == here
    leave(tmp_path, here)
    assert file.read_bytes() == (FOLDER / "record.json").read_bytes()


@pytest.mark.usefixtures("alone")
def test_fleet_tells_it_in_the_same_form(tmp_path: Path) -> None:
    workers = (record(elsewhere(4242 + rank), rank=rank, world_size=2) for rank in (0, 1))
    leave(tmp_path, *workers, record(elsewhere(4241)))
    form = form_of(as_json(look(tmp_path)))
    del form["wrong"], form["prometheus"]  # newer than that version
    for engine in form["engines"]:
        del engine["ranks"]["unreadable"], engine["user"]  # newer than that version
        for process in engine["processes"]:
            del process["outdated"], process["in_step_since"]
    assert form == earlier_output("fleet")


def form_of(value: Any) -> Any:
    """Names and kinds of values: how old a record is differs each time."""
    if isinstance(value, dict):
        return {name: form_of(each) for name, each in value.items()}
    if isinstance(value, list):
        return [form_of(value[0])] if value else []
    if value is None:
        return "none"
    return "text" if isinstance(value, str) else "truth" if isinstance(value, bool) else "number"
