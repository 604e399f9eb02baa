"""docs/schemas describes what the commands print with `--json`: real outputs have the described keys, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

import make_schemas
from compared import FAILED, report
from json_outputs import FOLDER, check_output
from records import elsewhere, leave, record
from stock import release_root
from vllm_graphfix.commands.cli import app
from vllm_graphfix.commands.compare.report import as_json as compared_json
from vllm_graphfix.commands.fleet import as_json, look


def test_the_files_are_current_and_valid() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(make_schemas.OUTPUTS)
    for name in make_schemas.OUTPUTS:
        assert (FOLDER / f"{name}.json").read_text() == make_schemas.written(name), "run tools/make_schemas.py"
        jsonschema.Draft202012Validator.check_schema(make_schemas.schema_of(name))


def test_the_page_lists_each_schema() -> None:
    page = (FOLDER.parent / "json-output.md").read_text()
    rows = dict(re.findall(r"^\| `vllm-graphfix (.+)` \| \[`.+`\]\(schemas/(\w+)\.json\) \|$", page, re.MULTILINE))
    assert rows == {command: name for name, (_, command, _) in make_schemas.OUTPUTS.items()}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("status", ["status", "--vllm", "0.33.0"]),
        ("status", ["status", "--vllm", "0.18.1", "--for", "some/model", "--gpu", "H200"]),
        ("explain", ["explain", "flashmla-fp8"]),
        ("fixes", ["explain"]),
    ],
)
@pytest.mark.release
def test_commands_print_what_is_described(name: str, arguments: list[str]) -> None:
    words = [str(release_root(word)) if word[:1].isdigit() else word for word in arguments]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    check_output(name, json.loads(done.stdout))


@pytest.mark.usefixtures("alone")
def test_a_fleet_is_printed_as_described(tmp_path: Path) -> None:
    workers = (record(elsewhere(4242 + rank), rank=rank, world_size=3) for rank in (0, 1))
    leave(tmp_path, *workers, record(elsewhere(4241)))
    check_output("fleet", as_json(look(tmp_path)))


def test_a_comparison_is_printed_as_described() -> None:
    for each in (report(), FAILED):
        check_output("compare", compared_json(each))


def test_a_key_that_is_not_described_is_seen() -> None:
    output = compared_json(report())
    del output["drafts"]["lost"]
    for wrong in (output, {**compared_json(report()), "new": 1}):
        with pytest.raises(jsonschema.ValidationError):
            check_output("compare", wrong)
