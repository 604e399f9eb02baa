"""`vllm-graphfix fleet`: what is made of the records, of the processes that have none, and how it is said."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from records import AN_HOUR, ENGINE, elsewhere, leave, of, record
from rich.console import Console
from typer.testing import CliRunner

from vllm_graphfix import __version__
from vllm_graphfix.cli import app
from vllm_graphfix.fleet import Engine, Unrecorded, as_json, look, shown
from vllm_graphfix.fleet.unrecorded import _is_vllm
from vllm_graphfix.records import Agreement, Decided, FixReport, Identity, Rank, Record, own_folder

OTHER_ENGINE = "f" * 16
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to other users")

Start = Callable[..., "subprocess.Popen[bytes]"]

WITHOUT_RECORD = "vllm_graphfix.fleet.looking.without_record"
"""The function that looks at this machine's processes."""


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that is killed in the end."""
    with ExitStack() as stack:

        def start(*command: str, env: Mapping[str, str] | None = None, **rest: Any) -> subprocess.Popen[bytes]:
            process = stack.enter_context(
                subprocess.Popen(command or ["/bin/sleep", "600"], env={**os.environ, **(env or {})}, **rest)
            )
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double of a machine without any process of vLLM; the one that runs the tests may have some."""
    monkeypatch.setattr(WITHOUT_RECORD, lambda *_: ((), ()))


@pytest.fixture
def two(start: Start) -> tuple[Identity, Identity]:
    """Two processes of this machine, for two ranks."""
    return of(start().pid), of(start().pid)


def only(base: Path) -> Engine:
    (engine,) = look(base).engines
    return engine


def ranks(two: tuple[Identity, Identity], **changes: Any) -> tuple[Record, Record]:
    first, second = (record(process, rank, 2) for rank, process in enumerate(two))
    return first, second._replace(**changes)


def text(base: Path, width: int = 200) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(shown(look(base)))
    return capture.get()


# -- engines -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_an_engine_whose_ranks_agree_is_in_order(tmp_path: Path, two: tuple[Identity, Identity]) -> None:
    leave(tmp_path, record(), *ranks(two))
    engine = only(tmp_path)
    assert (engine.status, engine.wrong, engine.notes) == ("in order", (), ())
    assert (engine.expected, engine.agreeing) == (2, 2)
    assert [engine.name_of(member) for member in engine.members][1:] == ["rank 0", "rank 1"]
    assert engine.counts("capture-state") == {"state-consumed": 24}
    assert look(tmp_path).exit_code == 0


def failed(state: str) -> dict[str, Any]:
    return {"fixes": {"capture-state": FixReport("auto", state, "the reason")}}


WRONG: list[tuple[dict[str, Any], str]] = [
    (failed("failed"), "capture-state is failed on rank 1: the reason"),
    (failed("conflict"), "capture-state is conflict on rank 1: the reason"),
    (failed("incompatible"), "capture-state is incompatible on rank 1: the reason"),
    (failed("off"), "capture-state differs: active on rank 0; off on rank 1"),
    ({"vllm": "0.22.0"}, "vLLM differs: 0.21.0 on rank 0, front-end "),
    ({"graphfix": "0.2.0"}, "vllm-graphfix differs: 0.1.0 on rank 0, front-end "),
    ({"decision": Decided(False, 9000, 25.0, "on", True)}, "in the rollout differs: yes on rank 0, front-end "),
    (
        {"agreement": Agreement("a-token", 2, 1, "capture-state is 'active' on rank 0 (a); 'off' on rank 1 (b).")},
        "the ranks do not agree. capture-state is 'active' on rank 0 (a); 'off' on rank 1 (b).",
    ),
]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("changes", "sentence"), WRONG, ids=[sentence[:45] for _, sentence in WRONG])
def test_what_is_wrong_in_an_engine_names_the_ranks_and_is_exit_1(
    tmp_path: Path, two: tuple[Identity, Identity], changes: dict[str, Any], sentence: str
) -> None:
    leave(tmp_path, record(), *ranks(two, **changes))
    engine = only(tmp_path)
    assert engine.status == "not in order"
    assert any(what.startswith(sentence) for what in engine.wrong), engine.wrong
    assert look(tmp_path).exit_code == 1


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("state", ["off", "not-in-canary", "observing", "not-needed"])
def test_an_engine_that_does_as_it_was_told_is_in_order(
    tmp_path: Path, two: tuple[Identity, Identity], state: str
) -> None:
    first, second = ranks(two, **failed(state))
    leave(tmp_path, record(), first._replace(fixes=second.fixes), second)
    assert look(tmp_path).exit_code == 0


@pytest.mark.usefixtures("alone")
def test_a_rank_that_does_not_run_what_a_fix_concerns_differs_from_nothing(
    tmp_path: Path, two: tuple[Identity, Identity]
) -> None:
    leave(tmp_path, record(), *ranks(two, **failed("waiting")))
    assert look(tmp_path).exit_code == 0
    assert "active (rank 0)" in text(tmp_path)
    assert "waiting (rank 1)" in text(tmp_path)


@pytest.mark.usefixtures("alone")
def test_a_rank_that_was_killed_in_a_live_engine_is_exit_1(tmp_path: Path, start: Start) -> None:
    one, other = start(), start()
    leave(tmp_path, record(), *ranks((of(one.pid), of(other.pid))))
    assert look(tmp_path).exit_code == 0
    other.kill()
    other.wait()
    engine = only(tmp_path)
    assert engine.wrong == ("dead: rank 1",)
    assert look(tmp_path).exit_code == 1


@pytest.mark.usefixtures("alone")
def test_a_rank_that_is_silent_in_a_live_engine_is_exit_1(tmp_path: Path) -> None:
    leave(tmp_path, record(), record(elsewhere(1), 0, 2))
    leave(tmp_path, record(elsewhere(2), 1, 2), age=75.0)
    assert only(tmp_path).wrong == ("not heard of for 75 s: rank 1",)
    assert look(tmp_path).exit_code == 1


@pytest.mark.usefixtures("alone")
def test_an_engine_that_was_killed_as_a_whole_has_ended_and_is_not_wrong(tmp_path: Path, start: Start) -> None:
    processes = start(), start()
    leave(tmp_path, *ranks((of(processes[0].pid), of(processes[1].pid))))
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.wait()
    engine = only(tmp_path)
    assert (engine.status, engine.live, engine.wrong) == ("ended", False, ())
    assert look(tmp_path).exit_code == 3  # none runs: `until vllm-graphfix fleet` goes on waiting
    leave(tmp_path, record(engine=OTHER_ENGINE, rank=0))
    assert look(tmp_path).exit_code == 0
    (tmp_path / own_folder(tmp_path) / record(engine=OTHER_ENGINE).file_name).unlink()
    assert f"engine {ENGINE}  ended" in text(tmp_path)
    assert "dead: ranks 0-1, heard of 0 s ago" in text(tmp_path)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("age", "code"), [(0.0, 1), (AN_HOUR - 10, 1), (AN_HOUR + 10, 3)])
def test_an_engine_that_was_stopped_by_us_is_exit_1_for_an_hour(
    tmp_path: Path, start: Start, age: float, code: int
) -> None:
    process = start()
    leave(tmp_path, record(of(process.pid), rank=0, problem="the ranks of this engine do not agree"), age=age)
    process.kill()
    process.wait()
    assert only(tmp_path).status == "stopped"
    assert look(tmp_path).exit_code == code
    assert "says rank 0: the ranks of this engine do not agree" in text(tmp_path)


@pytest.mark.usefixtures("alone")
def test_ranks_that_agreed_and_are_on_machines_that_are_not_seen_are_said_and_not_wrong(tmp_path: Path) -> None:
    leave(tmp_path, record(), *(record(elsewhere(rank), rank, 8) for rank in range(4)))
    engine = only(tmp_path)
    assert engine.notes == (
        "ranks 4-7 are on machines whose records are not here: set VLLM_GRAPHFIX_STATUS_DIR to shared storage to see them; they agreed",
    )
    assert look(tmp_path).exit_code == 0


@pytest.mark.usefixtures("alone")
def test_ranks_that_are_missing_before_they_agreed_are_exit_1(tmp_path: Path, two: tuple[Identity, Identity]) -> None:
    leave(tmp_path, record(), ranks(two)[1]._replace(agreement=None))
    engine = only(tmp_path)
    assert engine.wrong[0].startswith("no record of rank 0: starting, without the plugin, or on machines")
    assert engine.notes == ("not compared with the others: rank 1",)
    assert look(tmp_path).exit_code == 1


@pytest.mark.usefixtures("alone")
def test_an_engine_no_rank_of_which_has_said_anything_is_exit_1(tmp_path: Path) -> None:
    leave(tmp_path, record())
    assert only(tmp_path).wrong[0].startswith("no rank has said anything: they are starting, or on machines")
    assert look(tmp_path).exit_code == 1


@pytest.mark.usefixtures("alone")
def test_a_program_that_makes_one_engine_after_the_other_is_in_order(
    tmp_path: Path, two: tuple[Identity, Identity]
) -> None:
    """Its record of the first engine lives as long as it does."""
    process, rank = two
    leave(tmp_path, record(process), record(process, engine=OTHER_ENGINE, written=1763740001.0))
    leave(tmp_path, record(rank, rank=0, engine=OTHER_ENGINE))
    (engine,) = look(tmp_path).engines
    assert (engine.name, engine.wrong) == (OTHER_ENGINE, ())


def test_a_program_that_has_two_engines_at_once_shows_both(
    tmp_path: Path, start: Start, two: tuple[Identity, Identity]
) -> None:
    process, rank = two
    leave(tmp_path, record(process), record(process, engine=OTHER_ENGINE, written=1763740001.0))
    leave(tmp_path, record(rank, rank=0), record(of(start().pid), rank=0, engine=OTHER_ENGINE))
    assert [engine.wrong for engine in look(tmp_path).engines] == [(), ()]


def test_nodes_that_started_on_their_own_are_joined_by_the_leader(tmp_path: Path) -> None:
    leave(tmp_path, record(elsewhere(1, "node-a")), record(elsewhere(2, "node-a"), 0, 2, leader=ENGINE))
    leave(tmp_path, record(elsewhere(1, "node-b"), engine=OTHER_ENGINE))
    leave(tmp_path, record(elsewhere(2, "node-b"), 1, 2, engine=OTHER_ENGINE, leader=ENGINE))
    engine = only(tmp_path)
    assert (engine.name, engine.status, len(engine.members)) == (ENGINE, "in order", 4)
    assert set(engine.told("host")) == {"node-a", "node-b"}


@pytest.mark.usefixtures("alone")
def test_leaders_that_name_each_other_are_two_engines(tmp_path: Path) -> None:
    leave(tmp_path, record(elsewhere(1), 0, leader=OTHER_ENGINE))
    leave(tmp_path, record(elsewhere(2), 0, engine=OTHER_ENGINE, leader=ENGINE))
    assert [engine.name for engine in look(tmp_path).engines] == [ENGINE, OTHER_ENGINE]


@needs_root
@pytest.mark.usefixtures("alone")
def test_records_of_another_user_do_not_join_an_engine(tmp_path: Path) -> None:
    leave(tmp_path, record(elsewhere(1), 0))
    mine = own_folder(tmp_path)
    theirs = tmp_path / "vllm-graphfix-12345"
    mine.rename(theirs)
    for path in (*theirs.iterdir(), theirs):
        os.chown(path, 12345, 12345)
    leave(tmp_path, record(elsewhere(2), 0))
    assert [len(engine.members) for engine in look(tmp_path).engines] == [1, 1]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("compared", [True, False])
def test_worlds_of_data_parallelism_are_counted_each_for_itself(tmp_path: Path, compared: bool) -> None:
    for replica in range(2):
        for rank in range(2):
            leave(
                tmp_path,
                record(
                    elsewhere(10 * replica + rank),
                    rank,
                    2,
                    agreement=Agreement(f"token-{replica}", 2, 2, None) if compared else None,
                )._replace(rank=Rank(rank, rank, 2, replica)),
            )
    engine = only(tmp_path)
    assert (engine.expected, engine.agreeing, engine.wrong) == (4, 4 if compared else None, ())
    if compared:
        assert engine.several(engine.members) == "ranks 0-1 of DP 0, ranks 0-1 of DP 1"


@pytest.mark.usefixtures("alone")
def test_one_world_over_all_data_parallel_replicas_is_one(tmp_path: Path) -> None:
    for rank in range(4):
        leave(tmp_path, record(elsewhere(rank), rank, 4)._replace(rank=Rank(rank, rank % 2, 4, rank // 2)))
    engine = only(tmp_path)
    assert (engine.expected, engine.agreeing, engine.wrong) == (4, 4, ())
    assert engine.several(engine.members) == "ranks 0-3"


@pytest.mark.usefixtures("alone")
def test_a_world_of_any_claimed_size_is_shown_in_time(tmp_path: Path) -> None:
    leave(tmp_path, record(elsewhere(1), 0, 2**62, agreement=None))
    started = time.monotonic()
    assert "no record of ranks 1-1024:" in text(tmp_path)
    assert time.monotonic() - started < 5.0


@pytest.mark.usefixtures("alone")
def test_what_is_told_to_a_terminal_is_text_and_no_markup(tmp_path: Path) -> None:
    hostile = "[bold]x[/nothing] [link=http://x]"
    leave(tmp_path, record(rank=0, model=hostile, problem=hostile, vllm=hostile, **failed("failed")))
    assert text(tmp_path).count(hostile) >= 3


@pytest.mark.usefixtures("alone")
def test_files_that_are_no_records_are_said_and_change_nothing(tmp_path: Path) -> None:
    leave(tmp_path, record(rank=0))
    (own_folder(tmp_path) / "x.json").touch()
    assert "x.json: no record has such a name" in text(tmp_path)
    assert look(tmp_path).exit_code == 0


def of_fixes(**states: str) -> dict[str, Any]:
    """Changes of a record: each fix in that state, because of its mode, and with an event that did not happen."""
    return {
        "fixes": {name.replace("_", "-"): FixReport("auto", state, "the reason") for name, state in states.items()},
        "events": {name.replace("_", "-"): {f"event-of-{name}": 0} for name in states},
    }


@pytest.mark.usefixtures("alone")
def test_events_are_shown_of_the_fixes_that_count_them(tmp_path: Path) -> None:
    leave(
        tmp_path, record(rank=0, **of_fixes(first="active", second="observing", third="not-needed", fourth="waiting"))
    )
    assert re.findall(r"event-of-(\w+) 0", text(tmp_path)) == ["first", "second"]


@pytest.mark.usefixtures("alone")
def test_an_event_that_happened_is_shown_whatever_became_of_its_fix(tmp_path: Path) -> None:
    leave(tmp_path, record(rank=0, fixes={"capture-state": FixReport("auto", "failed", "the reason")}))
    assert "state-consumed 12" in text(tmp_path)


@pytest.mark.usefixtures("alone")
def test_fixes_of_which_the_same_is_told_share_a_row(tmp_path: Path) -> None:
    leave(tmp_path, record(rank=0, **of_fixes(first="off", second="off", third="not-needed")))
    assert text(tmp_path).count("the reason") == 2
    assert all(name in text(tmp_path) for name in ("first", "second", "third"))


@pytest.mark.usefixtures("alone")
def test_a_rollout_is_told_of_where_there_is_one(tmp_path: Path) -> None:
    leave(tmp_path, record(rank=0))
    assert "in the rollout of 25 % (bucket 1234 of 10,000)" in text(tmp_path)
    leave(tmp_path, record(rank=0, decision=Decided(True, None, None, "on", True)))
    assert "rollout" not in text(tmp_path)
    leave(tmp_path, record(rank=0, decision=Decided(False, 1234, None, "on", True)))  # the percentage is none
    assert "not in the rollout" in text(tmp_path)


@pytest.mark.usefixtures("alone")
def test_a_process_that_writes_once_is_not_said_to_be_silent(tmp_path: Path, start: Start) -> None:
    leave(tmp_path, record(), age=500.0)
    leave(tmp_path, record(of(start().pid), 0))
    assert "min ago" not in text(tmp_path)
    assert "0 s ago" in text(tmp_path)


# -- processes without a record ----------------------------------------------------------------------------------


@pytest.fixture
def serve(start: Start, tmp_path: Path) -> Start:
    """A stand-in of `vllm serve`: a script of that name, called as vLLM's is, that sleeps."""
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text("import time\ntime.sleep(600)\n", encoding="utf-8")

    def serve(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        return start(sys.executable, str(script), *(arguments or ("serve", "some/model")), env=env)

    return serve


def said_of(process: subprocess.Popen[bytes], base: Path) -> Unrecorded | None:
    return next((one for one in look(base).unrecorded if one.pid == process.pid), None)


def reason(process: subprocess.Popen[bytes], base: Path) -> str:
    deadline = time.monotonic() + 10.0
    while (found := said_of(process, base)) is None:  # it is between fork and exec
        assert time.monotonic() < deadline
    return found.reason


def here(base: Path, **environment: str) -> dict[str, str]:
    return {"VLLM_GRAPHFIX_STATUS_DIR": str(base), **environment}


def test_a_server_that_filters_the_plugin_out_is_said_to(tmp_path: Path, serve: Start) -> None:
    process = serve(env=here(tmp_path, VLLM_PLUGINS="other"))
    assert reason(process, tmp_path) == "VLLM_PLUGINS='other' keeps vLLM from loading this plugin; add graphfix to it"


def test_a_server_that_loads_no_plugin_at_all_is_said_to(tmp_path: Path, serve: Start) -> None:
    assert reason(serve(env=here(tmp_path, VLLM_PLUGINS="")), tmp_path).startswith("VLLM_PLUGINS='' keeps vLLM")


def test_a_server_that_leaves_its_records_elsewhere_is_said_to(tmp_path: Path, serve: Start) -> None:
    process = serve(env=here(tmp_path / "bin", VLLM_PLUGINS=""))
    assert reason(process, tmp_path) == f"its records go to {tmp_path}/bin: vllm-graphfix fleet --dir {tmp_path}/bin"


def test_a_server_that_has_just_started_is_given_time(tmp_path: Path, serve: Start) -> None:
    process = serve(env=here(tmp_path, VLLM_PLUGINS="graphfix,other"))
    assert reason(process, tmp_path) == "it has just started, and may not have loaded its plugins"


def test_a_server_without_a_record_for_no_reason_to_be_seen_is_sent_to_its_log(
    tmp_path: Path, serve: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_graphfix.fleet.unrecorded._STARTING", 0.0)
    process = serve(env=here(tmp_path))
    assert "the log of this process says which" in reason(process, tmp_path)


def test_an_installation_that_lacks_the_plugin_is_named(tmp_path: Path, serve: Start, start: Start) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    (site / "vllm").mkdir()
    process = start(str(python), str(tmp_path / "bin" / "vllm"), "serve", env=here(tmp_path))
    assert reason(process, tmp_path) == f"vllm-graphfix is not installed for {python}"
    (site / "vllm_graphfix-0.1.0.dist-info").mkdir()
    assert "just started" in reason(process, tmp_path)


def test_a_server_with_file_systems_of_its_own_is_said_to(tmp_path: Path, serve: Start, start: Start) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace can be made here: that needs root, or unprivileged namespaces")
    script = str(tmp_path / "bin" / "vllm")
    process = start(unshare, "--mount", sys.executable, script, "serve", env=here(tmp_path))
    assert reason(process, tmp_path).startswith("it has file systems of its own, as in a container or under systemd")


@needs_root
def test_servers_of_other_users_are_a_note(serve: Start) -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        process = serve(env=here(Path(name)))
        reason(process, Path(name))
        os.seteuid(65534)
        try:
            found = look(Path(name))
        finally:
            os.seteuid(0)
    assert process.pid not in {one.pid for one in found.unrecorded}
    assert "belong to other users, whose records are theirs to read" in found.notes[0]


def test_a_server_with_a_record_is_not_listed(tmp_path: Path, serve: Start) -> None:
    process = serve(env=here(tmp_path))
    reason(process, tmp_path)
    leave(tmp_path, record(of(process.pid)))
    assert said_of(process, tmp_path) is None


def test_an_old_record_of_another_process_with_its_id_does_not_count(tmp_path: Path, serve: Start) -> None:
    process = serve(env=here(tmp_path))
    leave(tmp_path, record(of(process.pid)._replace(start_ticks=1)))
    reason(process, tmp_path)


def test_a_process_with_a_title_of_vllm_is_known_by_it(tmp_path: Path, start: Start) -> None:
    process = start("VLLM::EngineCore", "600", executable="/bin/sleep", env=here(tmp_path, VLLM_PLUGINS="x"))
    assert reason(process, tmp_path).startswith("VLLM_PLUGINS='x' keeps vLLM")


def test_a_process_whose_title_has_overwritten_its_environment_is_told_by_its_parents(
    tmp_path: Path, start: Start
) -> None:
    pytest.importorskip("setproctitle")
    script = tmp_path / "vllm"
    script.write_text(
        "import subprocess, sys\n"
        "child = 'import setproctitle, time; setproctitle.setproctitle(\"VLLM::Worker_TP0\"); time.sleep(600)'\n"
        "process = subprocess.Popen([sys.executable, '-c', child])\n"
        "print(process.pid, flush=True)\n"
        "try:\n    sys.stdin.read()\nfinally:\n    process.kill()\n",
        encoding="utf-8",
    )
    with start(
        sys.executable,
        str(script),
        "serve",
        "some/model",
        env=here(tmp_path, VLLM_PLUGINS="x"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        worker = int(parent.stdout.readline())
        deadline = time.monotonic() + 20.0
        while not (found := [one for one in look(tmp_path).unrecorded if one.pid == worker]):
            assert time.monotonic() < deadline
        parent.stdin.close()
        parent.wait()
    assert found[0].command == "VLLM::Worker_TP0"
    assert found[0].reason.startswith("VLLM_PLUGINS='x' keeps vLLM")


A_SERVER = Unrecorded(1, "somebody", "vllm serve some/model", 300.0, "the reason", elsewhere=False)


@pytest.mark.parametrize(
    ("seen", "with_an_engine", "without"),
    [((), 0, 3), ((A_SERVER,), 1, 1), ((replace(A_SERVER, elsewhere=True),), 0, 3)],
    ids=["none", "without a record", "records elsewhere"],
)
def test_servers_without_a_record_are_exit_1_unless_they_leave_theirs_elsewhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seen: tuple[Unrecorded, ...],
    with_an_engine: int,
    without: int,
) -> None:
    monkeypatch.setattr(WITHOUT_RECORD, lambda *_: (seen, ()))  # a double of what runs on this machine
    assert look(tmp_path).exit_code == without
    leave(tmp_path, record(rank=0))
    assert look(tmp_path).exit_code == with_an_engine


def test_a_reason_is_named_once_for_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = "/usr/bin/python3 /usr/local/bin/vllm serve " + "a/model/with/a/name/" * 9
    seen = (replace(A_SERVER, command=serve), replace(A_SERVER, pid=2, command="VLLM::EngineCore"))
    monkeypatch.setattr(WITHOUT_RECORD, lambda *_: (seen, ()))  # a double of what runs on this machine
    lines = [line.split() for line in text(tmp_path, 80).splitlines() if line.strip()]
    assert lines[1:] == [
        ["✗", "the", "reason"],
        ["pid", "user", "started", "command"],
        ["1", "somebody", "5", "min", "ago", "vllm", "serve", lines[3][-1]],
        ["2", "somebody", "5", "min", "ago", "VLLM::EngineCore"],
    ]
    assert lines[3][-1].startswith("a/model")


COMMANDS: list[tuple[str, bool]] = [
    ("/usr/bin/python3 /usr/local/bin/vllm serve some/model", True),
    ("/usr/bin/python3.12 -u -X dev /usr/local/bin/vllm serve --headless", True),
    ("vllm serve some/model", True),
    ("python -m vllm.entrypoints.openai.api_server --model some/model", True),
    ("python -m vllm.entrypoints.cli.main serve some/model", True),
    ("python3 /usr/local/bin/vllm run-batch -i x", True),
    ("VLLM::EngineCore_DP1", True),
    ("VLLM::Worker_TP0", True),
    ("mine::APIServer_1", True),
    ("ray::RayWorkerWrapper.execute_method", True),
    ("VLLM::DPCoordinator", False),
    ("python3 /usr/local/bin/vllm serve --help", False),
    ("python3 /usr/local/bin/vllm --version", False),
    ("python3 /usr/local/bin/vllm bench serve", False),
    ("python3 -m vllm.entrypoints.cli.main collect-env", False),
    ("python3 /usr/local/bin/vllm-graphfix fleet", False),
    ("bash -c vllm serve some/model", False),
    ("timeout 60 vllm serve some/model", False),
    ("python -c vllm serve", False),
    ("grep vllm serve", False),
    ("python -c from multiprocessing.resource_tracker import main;main(5)", False),
    ("ray::SomeActor", False),
    ("python", False),
    ("", False),
]


@pytest.mark.parametrize(("command", "is_vllm"), COMMANDS)
def test_a_command_line_tells_whether_it_is_vllms(command: str, is_vllm: bool) -> None:
    assert _is_vllm(command.split()) is is_vllm


def test_a_multiprocessing_child_without_a_title_is_listed_where_its_server_is_without_the_plugin(
    tmp_path: Path, start: Start
) -> None:
    script = tmp_path / "vllm"
    script.write_text(
        "import multiprocessing, sys, time\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=time.sleep, args=(600,), daemon=True)\n"
        "    child.start()\n"
        "    print(child.pid, flush=True)\n"
        "    sys.stdin.read()\n",
        encoding="utf-8",
    )
    with start(
        sys.executable, str(script), "serve", env=here(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        child = int(parent.stdout.readline())
        without = {one.pid for one in look(tmp_path).unrecorded}
        leave(tmp_path, record(of(parent.pid)))
        with_a_record = {one.pid for one in look(tmp_path).unrecorded}
        parent.stdin.close()
        parent.wait()
    assert {child, parent.pid} <= without
    assert not {child, parent.pid} & with_a_record


# -- the command -------------------------------------------------------------------------------------------------


def call(*arguments: str, code: int = 0, env: dict[str, str] | None = None) -> tuple[str, str]:
    done = CliRunner().invoke(app, ["fleet", *arguments], env=env or {})
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    return done.stdout, done.stderr


@pytest.mark.usefixtures("alone")
def test_the_json_is_the_interface_that_is_documented(tmp_path: Path, two: tuple[Identity, Identity]) -> None:
    leave(tmp_path, record(), *ranks(two))
    told = json.loads(call("--dir", str(tmp_path), "--json")[0])
    (engine,) = told.pop("engines")
    mine = of(os.getpid())
    assert told == {
        "schema": 1,
        "graphfix": __version__,
        "host": mine.host,
        "folder": str(tmp_path),
        "exit_code": 0,
        "unrecorded": [],
        "notes": [],
        "problems": [],
    }
    processes = engine.pop("processes")
    assert engine == {
        "engine": ENGINE,
        "status": "in order",
        "live": True,
        "wrong": [],
        "notes": [],
        "model": "some/model",
        "vllm": ["0.21.0"],
        "graphfix": ["0.1.0"],
        "canary": True,
        "bucket": 1234,
        "percentage": 25.0,
        "master": "on",
        "hosts": [mine.host],
        "ranks": {"expected": 2, "recorded": 2, "agreeing": 2, "missing": []},
        "fixes": {
            "capture-state": {
                "states": {"active": ["rank 0", "rank 1"]},
                "mode": "auto",
                "reason": "applied to GPUModelRunner.capture_model",
                "events": {"state-consumed": 24},
            }
        },
    }
    assert processes[1] == {
        "engine": ENGINE,
        "role": "worker",
        "rank": {"rank": 0, "local_rank": 0, "world_size": 2, "data_parallel_rank": 0},
        "host": mine.host,
        "pid": two[0].pid,
        "liveness": "alive",
        "age": processes[1]["age"],
        "problem": None,
    }


def test_unrecorded_processes_are_in_the_json(tmp_path: Path, serve: Start) -> None:
    process = serve(env=here(tmp_path, VLLM_PLUGINS=""))
    reason(process, tmp_path)
    one = next(one for one in as_json(look(tmp_path))["unrecorded"] if one["pid"] == process.pid)
    assert set(one) == {"pid", "user", "command", "age", "reason", "elsewhere"}
    assert one["command"].endswith("vllm serve some/model")


@pytest.mark.usefixtures("alone")
def test_nothing_to_see_is_exit_3(tmp_path: Path) -> None:
    out, _ = call("--dir", str(tmp_path), code=3)
    assert "Engines elsewhere are seen if VLLM_GRAPHFIX_STATUS_DIR is a folder of shared storage" in " ".join(
        out.split()
    )


@pytest.mark.usefixtures("alone")
def test_something_wrong_is_exit_1_and_in_words(tmp_path: Path) -> None:
    leave(tmp_path, record(rank=0, **failed("failed")))
    out, _ = call("--dir", str(tmp_path), code=1)
    assert "capture-state is failed on rank 0: the reason" in out


@pytest.mark.usefixtures("alone")
def test_the_folder_is_the_environments_and_may_be_named_in_full(tmp_path: Path) -> None:
    leave(tmp_path, record(rank=0))
    call(env={"VLLM_GRAPHFIX_STATUS_DIR": str(tmp_path)})
    call("--dir", str(own_folder(tmp_path)))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("folder", ["gone", "a file"])
def test_a_folder_that_is_none_is_one_sentence_and_exit_2(tmp_path: Path, folder: str) -> None:
    (tmp_path / "a file").touch()
    out, err = call("--dir", str(tmp_path / folder), code=2)
    assert out == ""
    assert err.startswith(f"vllm-graphfix: --dir='{tmp_path / folder}' is no folder")
    _, err = call(env={"VLLM_GRAPHFIX_STATUS_DIR": str(tmp_path / folder)}, code=2)
    assert err.startswith("vllm-graphfix: VLLM_GRAPHFIX_STATUS_DIR=")
    call("--watch", "--dir", str(tmp_path / folder), code=2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("5",), "SECONDS is for --watch"),
        (("--watch", "--json"), "--watch is for eyes"),
        (("--watch", "0"), "--watch looks every 0.1 to 86400 seconds, not every 0"),
        (("--watch", "nan"), "not every nan"),
        (("--watch", "inf"), "not every inf"),
    ],
)
def test_options_that_make_no_sense_are_exit_2(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in call("--dir", str(tmp_path), *arguments, code=2)[1]


def test_watching_goes_on_until_it_is_interrupted_which_is_exit_0(tmp_path: Path, start: Start) -> None:
    leave(tmp_path, record(rank=0))
    with start(
        *(sys.executable, "-m", "vllm_graphfix", "fleet", "--watch", "0.1", "--dir", str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        looks = 0
        while looks < 3:
            looks += ENGINE.encode() in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.stderr.read() == b""
        assert process.wait(20) == 0


def test_watching_on_a_terminal_shows_changes_in_place_and_gives_the_terminal_back(
    tmp_path: Path, start: Start
) -> None:
    leave(tmp_path, record(rank=0))
    ours, theirs = pty.openpty()
    process = start(
        *(sys.executable, "-m", "vllm_graphfix", "fleet", "--watch", "0.1", "--dir", str(tmp_path)),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={"TERM": "xterm", "COLUMNS": "140", "LINES": "40"},
    )
    os.close(theirs)
    seen = b""
    while b"another/model" not in seen:
        seen += os.read(ours, 65536)
        if b"some/model" in seen:
            leave(tmp_path, record(rank=0, model="another/model"))
    process.send_signal(signal.SIGINT)
    try:
        while more := os.read(ours, 65536):
            seen += more
    except OSError:  # how a terminal ends
        os.close(ours)
    assert process.wait(20) == 0
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")  # the cursor
    assert b"Traceback" not in seen
