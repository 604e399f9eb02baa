"""Processes of vLLM without a record: which are found, and what is said of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import replace
from pathlib import Path

import pytest

from fleets import WITHOUT_RECORD, Start, here, reason, text, unrecorded_of
from records import leave, needs_root, of, record
from vllm_graphfix.commands.fleet import Unrecorded, as_json, look, unrecorded
from vllm_graphfix.commands.fleet.unrecorded import _is_vllm
from vllm_graphfix.records import own_folder


def test_the_reason_says_that_a_server_filters_the_plugin_out(tmp_path: Path, serve: Start) -> None:
    process = serve(env=here(tmp_path, VLLM_PLUGINS="other"))
    assert reason(process, tmp_path) == "VLLM_PLUGINS='other' keeps vLLM from loading this plugin; add graphfix to it"


def test_the_reason_says_that_a_server_loads_no_plugin_at_all(tmp_path: Path, serve: Start) -> None:
    assert reason(serve(env=here(tmp_path, VLLM_PLUGINS="")), tmp_path).startswith("VLLM_PLUGINS='' keeps vLLM")


def test_the_reason_says_that_a_server_leaves_its_records_elsewhere(tmp_path: Path, serve: Start) -> None:
    process = serve(env=here(tmp_path / "bin", VLLM_PLUGINS=""))
    assert reason(process, tmp_path) == f"its records are in {tmp_path}/bin: vllm-graphfix fleet --dir {tmp_path}/bin"


def test_a_server_that_has_just_started_counts_as_starting(tmp_path: Path, serve: Start) -> None:
    process = serve(env=here(tmp_path, VLLM_PLUGINS="graphfix,other"))
    assert reason(process, tmp_path) == "it has just started and may not have loaded its plugins yet"
    entry = unrecorded_of(process, tmp_path)
    assert entry is not None
    assert entry.starting


def test_a_server_without_a_record_for_no_reason_to_be_seen_is_sent_to_its_log(
    tmp_path: Path, serve: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_graphfix.commands.fleet.unrecorded.YOUNG", 0.0)
    process = serve(env=here(tmp_path))
    assert "see the log of this process" in reason(process, tmp_path)


def test_an_installation_that_lacks_the_plugin_is_named(tmp_path: Path, serve: Start, start: Start) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    (site / "vllm").mkdir()
    process = start(str(python), str(tmp_path / "bin" / "vllm"), "serve", env=here(tmp_path))
    assert reason(process, tmp_path) == f"vllm-graphfix is not installed for {python}"
    (site / "vllm_graphfix-0.1.0.dist-info").mkdir()
    assert "just started" in reason(process, tmp_path)


def test_the_reason_says_that_a_server_has_file_systems_of_its_own(tmp_path: Path, serve: Start, start: Start) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace can be made here: that needs root, or unprivileged namespaces")
    script = str(tmp_path / "bin" / "vllm")
    process = start(unshare, "--mount", sys.executable, script, "serve", env=here(tmp_path))
    assert reason(process, tmp_path).startswith("it has its own file systems, as in a container or under systemd")


@needs_root
def test_servers_of_other_users_are_a_note(serve: Start) -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        process = serve(env=here(Path(name)))
        reason(process, Path(name))
        os.seteuid(65534)
        try:
            fleet = look(Path(name))
        finally:
            os.seteuid(0)
    assert process.pid not in {one.pid for one in fleet.unrecorded}
    assert "belong to other users, and only those users (or root) can read their records" in fleet.notes[0]


def test_a_server_with_a_record_is_not_listed(tmp_path: Path, serve: Start) -> None:
    process = serve(env=here(tmp_path))
    reason(process, tmp_path)
    leave(tmp_path, record(of(process.pid)))
    assert unrecorded_of(process, tmp_path) is None


def give(base: Path, uid: int) -> None:
    """Gives the records below *base* to another user."""
    theirs = base / f"vllm-graphfix-{uid}"
    own_folder(base).rename(theirs)
    for path in (*theirs.iterdir(), theirs):
        os.chown(path, uid, uid)


@needs_root
@pytest.mark.parametrize("container", [False, True], ids=["here", "in a container"])
def test_a_record_of_another_user_hides_no_process_and_is_named_as_theirs(
    container: bool, tmp_path: Path, serve: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = serve(env=here(tmp_path))
    theirs = of(process.pid)
    if container:
        theirs = theirs._replace(pid_namespace="pid:[1]")
    monkeypatch.setattr(unrecorded, "_own_view", lambda pid, _: (theirs.pid_namespace, pid))
    leave(tmp_path, record(theirs, kept=True))
    give(tmp_path, 12345)
    assert reason(process, tmp_path).endswith("; a record of uid 12345 names it, and is not its own")
    fleet = look(tmp_path)
    assert (fleet.engines[0].live, fleet.engines[0].owner) == (container, 12345)
    assert "records of uid 12345" in text(tmp_path)
    assert as_json(fleet)["engines"][0]["user"] == "uid 12345"
    leave(tmp_path, record(theirs, kept=True))
    assert unrecorded_of(process, tmp_path) is None


@needs_root
def test_a_process_of_another_user_with_a_record_of_theirs_is_not_listed(tmp_path: Path, start: Start) -> None:
    process = start("VLLM::EngineCore", "600", executable="/bin/sleep", env=here(tmp_path), user=12345)
    leave(tmp_path, record(of(process.pid)))
    reason(process, tmp_path)
    give(tmp_path, 12345)
    assert unrecorded_of(process, tmp_path) is None
    assert look(tmp_path).engines[0].live


def test_an_old_record_of_another_process_with_its_id_does_not_count(tmp_path: Path, serve: Start) -> None:
    process = serve(env=here(tmp_path))
    leave(tmp_path, record(of(process.pid)._replace(start_ticks=1)))
    reason(process, tmp_path)


def test_a_process_with_a_title_of_vllm_is_known_by_it(tmp_path: Path, start: Start) -> None:
    process = start("VLLM::EngineCore", "600", executable="/bin/sleep", env=here(tmp_path, VLLM_PLUGINS="x"))
    assert reason(process, tmp_path).startswith("VLLM_PLUGINS='x' keeps vLLM")


def test_a_process_whose_title_overwrote_its_environment_is_known_by_its_parents(tmp_path: Path, start: Start) -> None:
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
        while not (entries := [one for one in look(tmp_path).unrecorded if one.pid == worker]):
            assert time.monotonic() < deadline
        parent.stdin.close()
        parent.wait()
    assert entries[0].command == "VLLM::Worker_TP0"
    assert entries[0].reason.startswith("VLLM_PLUGINS='x' keeps vLLM")


A_SERVER = Unrecorded(1, "somebody", "vllm serve some/model", 300.0, "the reason", elsewhere=False)


@pytest.mark.parametrize(
    ("seen", "with_an_engine", "without"),
    [
        ((), 0, 3),
        ((A_SERVER,), 1, 1),
        ((replace(A_SERVER, elsewhere=True),), 0, 3),
        ((replace(A_SERVER, starting=True),), 4, 4),
        ((replace(A_SERVER, starting=True), A_SERVER), 1, 1),
    ],
    ids=["none", "without a record", "records elsewhere", "just started", "one just started"],
)
def test_servers_without_a_record_are_exit_1_unless_they_leave_theirs_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: tuple[Unrecorded, ...], with_an_engine: int, without: int
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


def test_a_multiprocessing_child_is_listed_where_its_server_lacks_the_plugin(tmp_path: Path, start: Start) -> None:
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


@pytest.mark.parametrize(
    ("flags", "hidden"),
    [
        (("--api-key", "k3y-of-us"), "--api-key (hidden)"),
        (("--api-key", "k1", "k,2'x y", "-tp", "2"), "--api-key (hidden) (hidden) -tp 2"),
        (("--api_key=k,1", "-tp", "2"), "--api_key=(hidden) -tp 2"),
        (("--api-ke", "k3y", "--api-k=k1"), "--api-ke (hidden) --api-k=(hidden)"),
        (("--hf_tok", "k3y", "--hf-to=k1", "-tp", "2"), "--hf_tok (hidden) --hf-to=(hidden) -tp 2"),
        (("--hf-token", "abc" * 80, "-tp", "2"), "--hf-token (hidden) -tp 2"),
        (("--hf-overrides", '{"token": "s3cret"}'), '--hf-overrides {"token": "(hidden)"}'),
        (("--max-num-batched-tokens", "8192"), "--max-num-batched-tokens 8192"),
    ],
)
def test_secrets_in_a_command_line_are_hidden_from_fleet_and_its_json(
    flags: tuple[str, ...], hidden: str, tmp_path: Path, serve: Start
) -> None:
    process = serve("serve", *flags, env=here(tmp_path))
    reason(process, tmp_path)
    (listed,) = [one for one in as_json(look(tmp_path))["unrecorded"] if one["pid"] == process.pid]
    assert listed["command"].endswith(f"serve {hidden}")
