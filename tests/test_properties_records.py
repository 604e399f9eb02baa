"""Whatever stands in a status folder, and whatever other processes call themselves: `fleet` says what it is."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostile import ARGUMENTS, JSON, KINDS, TEXT, changed, dumped, plant, share
from records import ENGINE, elsewhere, leave, record
from vllm_graphfix.commands.fleet import unrecorded
from vllm_graphfix.records import (
    FILES,
    AgreementReport,
    FixReport,
    Liveness,
    StoredRecord,
    base_folder,
    identity,
    liveness_of,
    own_folder,
)
from vllm_graphfix.records.folder import ENTRIES
from watched import Answer, Watched, answer, watched

GOOD = record(model="the good one")
VALID: dict[str, Any] = record(elsewhere(7), rank=0, world_size=2, engine="f" * 16, problem="why").as_json()

raw_names = st.binary(min_size=1, max_size=60).map(lambda name: name.replace(b"/", b"-").replace(b"\0", b"-"))
names = (
    st.builds(
        "{}-{}-{}.json".format,
        st.sampled_from(["f" * 16, "e" * 16, ENGINE]),
        st.sampled_from(["node-b", "n", "a" * 64, "a" * 65]),
        st.integers(0, 10),
    )
    | raw_names.map(os.fsdecode).filter(lambda name: name not in (".", ".."))
    | st.builds(".{}-node-b-7.json.{:08x}".format, st.just("f" * 16), st.integers(0, 2**32 - 1))
)
contents = (
    st.binary(max_size=300)
    | JSON.map(lambda value: dumped(value).encode())
    | changed(VALID).map(lambda value: dumped(value).encode())
    | st.sampled_from([b"[" * 65_536, b" " * 70_000, json.dumps(VALID).encode()])
)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No vLLM seems to run on this machine: it is not what these tests are about."""
    monkeypatch.setattr("vllm_graphfix.commands.fleet.survey.without_record", lambda *_: ((), ()))


def looked(base: Path, *arguments: str, seconds: int = 10, memory: int = 64 << 20) -> Watched:
    return watched(lambda: answer("fleet", "--dir", str(base), *arguments), seconds=seconds, memory=memory)


@pytest.mark.usefixtures("no_processes")
@given(st.lists(st.tuples(names, st.sampled_from(["file", "file", *KINDS]), contents), max_size=6))
@share(30)
def test_whatever_files_are_in_a_status_folder_the_good_record_is_seen(files: list[tuple[str, str, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        base, outside = Path(name) / "base", Path(name) / "outside"
        base.mkdir()
        outside.write_text(json.dumps(VALID), encoding="utf-8")
        leave(base, GOOD)
        for file, kind, content in files:
            path = own_folder(base) / file
            if not os.path.lexists(path):
                plant(path, kind, content, outside)
        for arguments in ((), ("--json",)):
            seen = looked(base, *arguments)
            assert seen.changes == ()
            assert seen.value.code in (0, 1, 4)
            if arguments:
                engines = json.loads(seen.value.out)["engines"]
                assert any(engine["model"] == "the good one" for engine in engines)
            else:
                assert "the good one" in seen.value.out


FOLDERS = ["link", "loop", "dangling", "file", "fifo", "socket", "open to all", "another's", "empty"]


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("kind", FOLDERS)
def test_what_stands_in_place_of_a_status_folder_is_one_line_at_most(tmp_path: Path, kind: str) -> None:
    (tmp_path / "other").mkdir()
    leave(tmp_path / "other", GOOD)
    mine = own_folder(tmp_path)
    if kind == "link":
        mine.symlink_to(own_folder(tmp_path / "other"))
    elif kind in ("open to all", "another's", "empty"):
        leave(tmp_path, *([] if kind == "empty" else [GOOD]))
        mine.mkdir(exist_ok=True)
        if kind == "open to all":
            mine.chmod(0o777)
        elif kind == "another's":
            if os.geteuid() != 0:
                pytest.skip("only root may give folders to other users")
            os.chown(mine, 12345, 12345)
    else:
        plant(mine, kind, b"", tmp_path / "other")
    seen = looked(tmp_path, "--json")
    report = json.loads(seen.value.out)
    assert (report["engines"], seen.value.code, seen.changes) == ([], 3 if kind == "empty" else 1, ())
    assert len(report["problems"]) == (kind != "empty")


@given(ARGUMENTS)
@share(30)
def test_any_text_is_a_folder_to_look_at_or_one_error(text: str) -> None:
    seen = watched(lambda: answer("fleet", f"--dir=/nowhere/{text}"), seconds=10, memory=64 << 20)
    assert seen.value.code == 2 or text.strip("./") == ""
    assert seen.changes == ()


# -- many --------------------------------------------------------------------------------------------------------

_NAMED = [f"fix-{number}" for number in range(40)]


def crowd(base: Path, count: int, kind: str) -> None:
    """So many records, each as large a claim as a record can make."""
    reports = {
        name: FixReport("auto", state, "") for name, state in zip(_NAMED, ["failed", "active"] * 20, strict=True)
    }
    claims = {"world_size": 2**62, "fixes": reports} if kind == "one engine" else {"world_size": 2**62}
    for number in range(count):
        one = record(elsewhere(number), rank=number, **claims)
        if kind == "engines":
            one = one._replace(engine=f"{number:016x}")
        elif kind == "worlds":
            one = one._replace(agreement=AgreementReport(f"group-{number}", 2**62, 1, "different"))
        elif kind == "front-ends":
            one = one._replace(rank=None, role="front-end", agreement=None, engine=f"{number % 2:016x}")
        path = own_folder(base) / one.file_name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_text(json.dumps(one.as_json()), encoding="utf-8")


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("kind", ["one engine", "engines", "worlds", "front-ends"])
@pytest.mark.parametrize("count", [60, pytest.param(FILES, marks=pytest.mark.slow)])
def test_the_most_records_with_the_largest_claims_are_listed_in_seconds(tmp_path: Path, kind: str, count: int) -> None:
    crowd(tmp_path, count, kind)
    for arguments in (("--json",), ()):
        looked(tmp_path, *arguments, seconds=2 + count // 60, memory=(64 << 20) + count * (256 << 10))


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("count", [2_000, pytest.param(ENTRIES - 100, marks=pytest.mark.slow)])
def test_files_without_number_cost_what_some_do(tmp_path: Path, count: int) -> None:
    leave(tmp_path, GOOD)
    for number in range(count):
        (own_folder(tmp_path) / f"f{number}").touch()
        if number < count // 2:
            (tmp_path / f"vllm-graphfix-{number}x").touch()
    seen = looked(tmp_path, "--json")
    assert [engine["model"] for engine in json.loads(seen.value.out)["engines"]] == ["the good one"]
    assert seen.looks < 20


# -- processes ---------------------------------------------------------------------------------------------------

words = TEXT | st.sampled_from(
    ["-m", "-X", "serve", "vllm", "vllm.entrypoints.cli.main", "VLLM::Worker", "/a/python3", ""]
)
commands = st.lists(
    words | st.sampled_from(["/" + "n" * 5000 + "/bin/python", "/n/" * 3000 + "bin/python"]), max_size=5
)


@given(commands, st.dictionaries(st.sampled_from(["VLLM_PLUGINS", "VLLM_GRAPHFIX_STATUS_DIR", "PATH"]), ARGUMENTS))
def test_any_command_line_and_environment_of_another_process_is_judged(
    command: list[str], environment: dict[str, str]
) -> None:
    assert unrecorded._is_vllm(command) in (True, False)
    reason = unrecorded._printable_and_cut(
        unrecorded._reason(os.getpid(), environment, [word for word in command if "\0" not in word], 1e9)
    )
    assert reason.isprintable()
    assert reason
    folder = base_folder(environment)
    assert unrecorded._resolved(folder) is not None


@given(st.integers(0, 2**63 - 1))
def test_any_process_id_in_a_record_is_alive_dead_or_silent(pid: int) -> None:
    one = record(identity()._replace(pid=pid))
    assert liveness_of(StoredRecord(one, 0.0, Path()), 1e9, identity()) in Liveness


def test_the_watch_notices_time_memory_and_writes(tmp_path: Path) -> None:
    assert isinstance(watched(lambda: answer("--version")).value, Answer)
    with pytest.raises(AssertionError, match="killed by signal"):
        watched(lambda: [None for _ in iter(int, 1)], seconds=1)
    with pytest.raises(AssertionError, match="of which 10 are allowed"):
        watched(lambda: len(bytearray(18 << 20)), memory=10 << 20)
    assert watched(Path(os.devnull).read_bytes).looks == 1
    assert f"open {tmp_path / 'x'}" in watched((tmp_path / "x").touch).changes
