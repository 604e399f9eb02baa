"""Status records: what is written, what is read and refused, who is alive, and that nobody waits for a disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from records import AN_HOUR, ENGINE, elsewhere, leave, of, record

from vllm_graphfix.records import (
    FILES,
    LARGEST,
    Agreement,
    Decided,
    FixReport,
    Found,
    Identity,
    Liveness,
    Rank,
    Record,
    RecordError,
    Reporter,
    base_folder,
    identity,
    liveness,
    own_folder,
    prune,
    read,
    remove,
    touch,
    write,
)

A_DAY = 24 * AN_HOUR
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to other users")


@contextmanager
def nobody() -> Iterator[None]:
    """As a user without privileges, whom a folder's permissions stop."""
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(me)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user may use, as /tmp is."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        base.chmod(0o1777)
        yield base


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        yield process
        process.kill()


def eventually(holds: Callable[[], object], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def names(base: Path) -> list[str]:
    return sorted(path.name for path in own_folder(base).iterdir())


def only(base: Path) -> Found:
    found = read(base)
    assert found.problems == ()
    (one,) = found.found
    return one


# -- the record --------------------------------------------------------------------------------------------------


def test_a_record_is_the_json_object_that_is_documented() -> None:
    told = record(rank=1, world_size=2, leader="f" * 16, problem="why").as_json()
    here = identity()
    assert told == {
        "schema": 1,
        "graphfix": "0.1.0",
        "vllm": "0.21.0",
        "engine": ENGINE,
        "host": here.host,
        "pid": here.pid,
        "start_ticks": here.start_ticks,
        "boot": here.boot,
        "pid_namespace": here.pid_namespace,
        "role": "worker",
        "model": "some/model",
        "rank": {"rank": 1, "local_rank": 1, "world_size": 2, "data_parallel_rank": 0},
        "decision": {"canary": True, "bucket": 1234, "percentage": 25.0, "master": "on", "inherited": True},
        "fixes": {
            "capture-state": {
                "mode": "auto",
                "state": "active",
                "reason": "applied to GPUModelRunner.capture_model",
            }
        },
        "events": {"capture-state": {"state-consumed": 12}},
        "agreement": {"group": "a-token", "world_size": 2, "agreeing": 2, "difference": None},
        "leader": "f" * 16,
        "problem": "why",
        "serves_metrics": False,
        "written": 1763740000.0,
    }


def test_the_record_in_the_documentation_is_one() -> None:
    page = (Path(__file__).parent.parent / "docs" / "fleet.md").read_text(encoding="utf-8")
    told = page.partition("```json\n")[2].partition("```")[0]
    assert Record.from_json(json.loads(told)).as_json() == json.loads(told)


@pytest.mark.parametrize(
    "one",
    [
        record(),
        record(rank=0),
        record(rank=0)._replace(rank=Rank(0, None, 1, 0)),
        record(model=None, decision=Decided(False, None, None, "strict", False), fixes={}, events={}),
    ],
    ids=["front-end", "rank", "rank without a local rank", "as little as there can be"],
)
def test_a_record_is_read_as_it_was_written(one: Record) -> None:
    assert Record.from_json(json.loads(json.dumps(one.as_json()))) == one


DEEP: list[Any] = []
for _ in range(500):
    DEEP = [DEEP]
REFUSED: list[tuple[str, Any, str]] = [
    ("schema", 2, "it has schema 2, and this vllm-graphfix knows 1: look at it with a newer one"),
    ("schema", 0, "schema is 0"),
    ("schema", "1", "schema is '1', and not a whole number from 0 on"),
    ("graphfix", None, "graphfix is None, and not a text of at most 1500 characters"),
    ("graphfix", "x" * 1501, "and not a text of at most 1500 characters"),
    ("engine", "0123456789ABCDEF", "engine is '0123456789ABCDEF', and not of the form"),
    ("engine", ENGINE + "\n", "engine is '0123456789abcdef\\n'"),
    ("host", "a/../b", "host is 'a/../b', and not of the form"),
    ("host", "", "host is ''"),
    ("pid", -1, "pid is -1, and not a whole number from 0 on"),
    ("pid", True, "pid is True"),
    ("pid", 1.0, "pid is 1.0"),
    ("pid", 10**4000, "pid is 1000"),
    ("boot", "\x1b[2J", "boot is '\\x1b[2J'"),
    ("role", "boss", "role is 'boss', and not one of api-server, engine-core, front-end, worker"),
    ("role", ["worker"], "role is a JSON array"),
    ("model", 7, "model is 7"),
    ("rank", 0, "rank is 0, and not an object"),
    ("rank", {"rank": 0}, "rank.world_size is missing"),
    ("rank.world_size", 2**63, "rank.world_size is 9223372036854775808"),
    ("decision", None, "decision is None, and not an object"),
    ("decision.canary", 1, "decision.canary is 1, and not true or false"),
    ("decision.percentage", nan, "decision.percentage is nan, and not a number from 0 to 100"),
    ("decision.percentage", 100.5, "decision.percentage is 100.5"),
    ("decision.master", "maybe", "decision.master is 'maybe', and not one of"),
    ("fixes", [], "fixes is a JSON array, and not an object"),
    ("fixes", {"x": 1}, "fixes.x is 1, and not an object"),
    ("fixes", {"../x": {}}, "fixes has an entry named '../x'"),
    ("fixes", {f"fix-{n}": {} for n in range(65)}, "fixes has 65 entries, and not at most 64"),
    ("fixes.capture-state.state", "great", "fixes.capture-state.state is 'great', and not one of"),
    ("fixes.capture-state.mode", "", "fixes.capture-state.mode is ''"),
    ("fixes.capture-state.reason", DEEP, "fixes.capture-state.reason is a JSON array"),
    ("events", {"x": {"y": -1}}, "events.x.y is -1"),
    ("events", {"x": {"Y": 1}}, "events.x has an entry named 'Y'"),
    ("agreement.group", "a token", "agreement.group is 'a token'"),
    ("agreement.agreeing", None, "agreement.agreeing is None"),
    ("leader", "me", "leader is 'me'"),
    ("problem", {}, "problem is a JSON object"),
    ("written", inf, "written is inf, and not a number from 0 to 1e+11"),
    ("written", 10**400, "written is 1000"),
]


@pytest.mark.parametrize(
    ("key", "value", "sentence"), REFUSED, ids=[f"{key} {sentence[:40]}" for key, _, sentence in REFUSED]
)
def test_what_is_not_as_it_has_to_be_is_refused_in_one_sentence(key: str, value: Any, sentence: str) -> None:
    told = record(rank=0).as_json()
    *path, last = key.split(".")
    place = told
    for name in path:
        place = place[name]
    place[last] = value
    with pytest.raises(RecordError) as refused:
        Record.from_json(told)
    assert sentence in str(refused.value)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "key", ["schema", "graphfix", "engine", "host", "pid", "role", "decision", "fixes", "events", "written"]
)
def test_what_a_record_must_have_is_named_if_it_is_missing(key: str) -> None:
    told = record().as_json()
    del told[key]
    with pytest.raises(RecordError, match=f"^{key} is missing$"):
        Record.from_json(told)


def test_keys_that_a_later_version_adds_are_left_out() -> None:
    assert Record.from_json(record().as_json() | {"colour": "blue"}) == record()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
@settings(database=None, max_examples=200)
def test_any_json_value_is_a_record_or_is_refused(value: Any) -> None:
    with pytest.raises(RecordError):
        Record.from_json(value)


@given(st.sampled_from(sorted(record(rank=0).as_json())), JSON)
@settings(database=None, max_examples=300)
def test_a_record_with_any_value_in_it_is_shown_safely_or_refused(key: str, value: Any) -> None:
    told = record(rank=0).as_json()
    told[key] = value
    try:
        found = Record.from_json(told)
    except RecordError as error:
        found = record(problem=str(error))
    assert all(text.isprintable() for text in (found.graphfix, found.vllm, found.model or "", found.problem or ""))
    assert len(json.dumps(found.as_json(), ensure_ascii=False).encode()) <= LARGEST


def test_text_for_terminals_is_printable() -> None:
    hostile = "red \x1b[31m\nand \u202etfel ot thgir\ud800"
    found = Record.from_json({**record().as_json(), "problem": hostile})
    assert found.problem == "red \ufffd[31m and \ufffdtfel ot thgir\ufffd"


def test_a_record_fits_whatever_its_texts_are(tmp_path: Path) -> None:
    text = "\U0001f600" * 10_000
    six = {f"fix-{n}": FixReport("auto", "failed", text) for n in range(6)}
    agreement = Agreement("a-token", 2, 1, text)
    write(tmp_path, record(rank=0, fixes=six, problem=text, model=text, agreement=agreement))
    problem = only(tmp_path).record.problem
    assert problem is not None
    assert (len(problem), problem[-1]) == (1500, "…")


def test_a_host_name_is_reduced_to_what_a_file_name_may_hold(tmp_path: Path) -> None:
    write(tmp_path, record(host="node/../ä b"))
    assert only(tmp_path).record.host == "node_..___b"


# -- the folder --------------------------------------------------------------------------------------------------


def test_the_folder_is_the_one_that_the_environment_names() -> None:
    assert base_folder({}) == base_folder({"VLLM_GRAPHFIX_STATUS_DIR": " "}) == Path("/tmp")  # noqa: S108
    assert base_folder({"VLLM_GRAPHFIX_STATUS_DIR": "/mnt/shared"}) == Path("/mnt/shared")
    assert own_folder(Path("/mnt")) == Path(f"/mnt/vllm-graphfix-{os.geteuid()}")


def test_folder_and_record_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write(tmp_path, record())
    finally:
        os.umask(before)
    assert names(tmp_path) == [f"{ENGINE}-{identity().host}-{os.getpid()}.json"]
    assert stat.S_IMODE(own_folder(tmp_path).stat().st_mode) == 0o700
    assert stat.S_IMODE((own_folder(tmp_path) / record().file_name).stat().st_mode) == 0o600


def a_link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to("elsewhere")


def a_dangling_link(folder: Path) -> None:
    folder.symlink_to("nowhere")


def a_file(folder: Path) -> None:
    folder.touch()


def writable_by_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def writable_by_a_group(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)


def of_another_user(folder: Path) -> None:
    folder.mkdir(0o700)
    os.chown(folder, 12345, 12345)


FOLDERS = [
    (a_link, "it is a link, or no folder"),
    (a_dangling_link, "it is a link, or no folder"),
    (a_file, "it is a link, or no folder"),
    (writable_by_all, "others may write to it (mode 0777): chmod 700"),
    (writable_by_a_group, "others may write to it (mode 0770): chmod 700"),
    pytest.param(of_another_user, f"it belongs to uid 12345, not {os.geteuid()}", marks=needs_root),
]


@pytest.mark.parametrize(("plant", "why"), FOLDERS)
def test_a_folder_that_somebody_else_may_have_a_hand_in_is_not_written_to(
    tmp_path: Path, plant: Callable[[Path], None], why: str
) -> None:
    plant(own_folder(tmp_path))
    with pytest.raises(OSError, match="cannot write a status record in") as refused:
        write(tmp_path, record())
    assert why in str(refused.value)
    assert not list(tmp_path.rglob("*.json*"))


@pytest.mark.parametrize(("plant", "why"), FOLDERS)
def test_a_folder_that_somebody_else_may_have_a_hand_in_is_not_read(
    tmp_path: Path, plant: Callable[[Path], None], why: str
) -> None:
    plant(own_folder(tmp_path))
    found = read(tmp_path)
    assert found.found == ()
    assert found.problems == (f"{own_folder(tmp_path)}: {why}",)


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        write(tmp_path / "gone", record())
    assert read(tmp_path / "gone").problems == (f"{tmp_path / 'gone'}: No such file or directory",)


def test_a_folder_without_permission_is_said(shared: Path) -> None:
    shared.chmod(0o555)
    with nobody(), pytest.raises(PermissionError, match=r"cannot write a status record in .*Permission denied"):
        write(shared, record())


WRITES_UNTIL_FULL = """
import os, resource, signal, sys
from pathlib import Path
from records import record
from vllm_graphfix.records import read, write
base = Path(sys.argv[1])
write(base, record())
{limit}
try:
    for number in range(1000):
        write(base, record(engine=f"{{number:016x}}"))
except OSError as error:
    print(error.errno, error.strerror)
found = read(base)
print(found.problems, len(found.found) >= 1, [name for path in base.glob("vllm-*") for name in os.listdir(path) if name.startswith(".")])
"""


def run(code: str, *arguments: str, before: tuple[str, ...] = ()) -> str:
    done = subprocess.run(
        [*before, sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    return done.stdout


def test_a_write_that_is_cut_short_leaves_nothing_behind(tmp_path: Path) -> None:
    told = run(WRITES_UNTIL_FULL.format(limit="resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"), str(tmp_path))
    assert "File too large" in told
    assert told.endswith("() True []\n")


@pytest.mark.parametrize(("options", "why"), [("size=64k", "No space left on device"), ("ro", "Read-only file system")])
def test_a_real_file_system_that_is_full_or_read_only_leaves_nothing_behind(
    tmp_path: Path, options: str, why: str
) -> None:
    limit = f"if 'ro' == {options!r}: os.system('mount -o remount,ro ' + sys.argv[1])"
    mount = f'mount -t tmpfs -o {options if options != "ro" else "size=1m"} none {tmp_path} && exec "$@"'
    inside = ("unshare", "--mount", "sh", "-c", mount, "sh")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no file system can be mounted here: that needs root, or unprivileged namespaces")
    told = run(WRITES_UNTIL_FULL.format(limit=limit), str(tmp_path), before=inside)
    assert why in told
    assert told.endswith("() True []\n")


def test_two_writers_of_one_record_never_show_half_of_one(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from records import record
        from vllm_graphfix.records import identity, write
        for number in range(400):
            write(Path(sys.argv[1]), record(identity()._replace(pid=7), problem=sys.argv[2] * 1000))
        """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    seen = set()
    with (
        subprocess.Popen([*command, "a"], env=environment) as one,
        subprocess.Popen([*command, "b"], env=environment) as other,
    ):
        while one.poll() is None or other.poll() is None:
            found = read(tmp_path)
            assert found.problems == ()
            seen |= {one.record.problem for one in found.found}
    assert (one.returncode, other.returncode) == (0, 0)
    assert seen == {"a" * 1000, "b" * 1000}
    assert len(names(tmp_path)) == 1


def test_a_touch_is_a_heartbeat_and_changes_nothing_else(tmp_path: Path) -> None:
    leave(tmp_path, record(), age=100.0)
    before = only(tmp_path)
    touch(tmp_path, record())
    after = only(tmp_path)
    assert after.record == before.record
    assert after.heartbeat - before.heartbeat > 90.0


def test_a_touch_of_a_record_that_is_gone_says_so(tmp_path: Path) -> None:
    write(tmp_path, record())
    remove(tmp_path, record())
    with pytest.raises(FileNotFoundError):
        touch(tmp_path, record())
    remove(tmp_path, record())  # and to remove it again is no error
    assert names(tmp_path) == []


# -- hostile content ---------------------------------------------------------------------------------------------

GOOD = record(elsewhere(1))
BAD = record(elsewhere(2)).file_name


def put(content: bytes) -> Callable[[Path], None]:
    def plant(path: Path) -> None:
        path.write_bytes(content)

    return plant


def changed(**changes: Any) -> bytes:
    return json.dumps({**record(elsewhere(2)).as_json(), **changes}).encode()


def a_link_to_a_record(path: Path) -> None:
    path.symlink_to(GOOD.file_name)


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_device(path: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero, which has no end


def a_huge_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 * 2**30)


def a_file_of_another_user(path: Path) -> None:
    path.write_bytes(changed())
    os.chown(path, 12345, 12345)


HOSTILE = [
    (a_link_to_a_record, "it is a link, or no folder"),
    (a_fifo, "it is no regular file"),
    (a_folder, "it is no regular file"),
    pytest.param(a_device, "it is no regular file", marks=needs_root),
    (a_huge_file, "it has 10737418240 bytes, and a record at most 65536"),
    pytest.param(a_file_of_another_user, "it belongs to uid 12345, and its folder to", marks=needs_root),
    pytest.param(put(b""), "it is no JSON (JSONDecodeError)", id="empty"),
    pytest.param(put(b"[" * 60_000), "it is no JSON (RecursionError)", id="deep"),
    pytest.param(put(b'{"a":' * 12_000), "it is no JSON (RecursionError)", id="deep object"),
    pytest.param(put(b"\xff\xfe\x00"), "it is no JSON", id="no text"),
    pytest.param(put(b'"\xc3\x28"'), "it is no JSON (UnicodeDecodeError)", id="broken UTF-8"),
    pytest.param(put(b"9" * 10_000), "it is no JSON (ValueError)", id="long number"),
    pytest.param(put(b"null"), "the record is None, and not an object", id="null"),
    pytest.param(put(changed(written=nan)), "written is nan", id="NaN"),
    pytest.param(put(changed(schema=7)), "it has schema 7", id="newer"),
    pytest.param(put(changed(pid=3)), "its content is that of another one", id="another's content"),
]


@pytest.mark.parametrize(("plant", "why"), HOSTILE)
def test_what_is_no_record_is_one_line_and_hides_no_record(
    tmp_path: Path, plant: Callable[[Path], None], why: str
) -> None:
    write(tmp_path, GOOD)
    plant(own_folder(tmp_path) / BAD)
    found = read(tmp_path)
    assert [one.record for one in found.found] == [GOOD]
    (line,) = found.problems
    assert line.startswith(f"{own_folder(tmp_path)}: {BAD}: {why}")


def test_many_that_are_no_records_are_one_line_too(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    for name in ("README", "a\x1b[2Jb.json", "x.json"):
        (own_folder(tmp_path) / name).touch()
    found = read(tmp_path)
    assert [one.record for one in found.found] == [GOOD]
    assert found.problems == (
        f"{own_folder(tmp_path)}: 3 files are no records or cannot be read; the first: README: no record has such a name",
    )


@given(st.binary(max_size=200))
@settings(database=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_content_is_read_without_an_error(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, GOOD)
    (own_folder(tmp_path) / BAD).write_bytes(content)
    assert [one.record for one in read(tmp_path).found] == [GOOD]


def test_more_files_than_are_read_are_said_and_cost_no_more(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    for pid in range(FILES + 10):
        (own_folder(tmp_path) / record(elsewhere(pid), engine="f" * 16).file_name).touch()
    found = read(tmp_path)
    assert len(found.found) == 1
    assert f"{own_folder(tmp_path)}: 11 files were not looked at, since at most {FILES} are read" in found.problems


@needs_root
def test_records_of_other_users_are_read_by_who_may(shared: Path) -> None:
    write(shared, record())
    for uid in (12345, 12346):
        folder = shared / f"vllm-graphfix-{uid}"
        folder.mkdir(0o700)
        (folder / BAD).write_bytes(changed())
        os.chown(folder / BAD, uid, uid)
        os.chown(folder, uid, uid)
    assert [one.path.parent.name for one in read(shared).found] == [
        "vllm-graphfix-0",
        "vllm-graphfix-12345",
        "vllm-graphfix-12346",
    ]
    assert [one.path.parent.name for one in read(shared, own=True).found] == ["vllm-graphfix-0"]
    with nobody():
        found = read(shared)
    assert found.found == ()
    assert found.problems == (
        f"3 folders are no records or cannot be read; the first: {shared}/vllm-graphfix-0 is not for this user to read",
    )


def test_the_records_of_64_ranks_are_read_fast_enough_for_a_scrape(tmp_path: Path) -> None:
    leave(tmp_path, *(record(elsewhere(rank), rank, 64) for rank in range(64)))
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        assert len(read(tmp_path).found) == 64
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.02  # 0.003 where nothing else runs


# -- alive, dead, silent -----------------------------------------------------------------------------------------


def judged(one: Record, heartbeat: float = 0.0, among: tuple[Found, ...] = ()) -> Liveness:
    found = Found(one, time.time() - heartbeat, Path("folder", one.file_name))
    return liveness(found, time.time(), identity(), among)


def test_a_process_that_runs_here_is_alive_however_old_its_record(sleeper: subprocess.Popen[bytes]) -> None:
    assert judged(record(of(sleeper.pid)), A_DAY) is Liveness.ALIVE


def test_a_killed_process_is_dead_at_once_also_before_anybody_waits_for_it(sleeper: subprocess.Popen[bytes]) -> None:
    one = record(of(sleeper.pid))
    sleeper.send_signal(signal.SIGKILL)
    assert eventually(lambda: judged(one) is Liveness.DEAD)  # a zombie
    sleeper.wait()
    assert judged(one) is Liveness.DEAD


def test_another_process_with_its_id_is_not_taken_for_it(sleeper: subprocess.Popen[bytes]) -> None:
    before = of(sleeper.pid)
    assert judged(record(before._replace(start_ticks=before.start_ticks - 1))) is Liveness.DEAD


def test_a_process_elsewhere_is_alive_as_long_as_it_is_heard_of() -> None:
    assert judged(record(elsewhere(1), rank=0), 59.0) is Liveness.ALIVE
    assert judged(record(elsewhere(1), rank=0), 61.0) is Liveness.SILENT


@pytest.mark.parametrize("other", ["boot", "pid_namespace"])
def test_a_process_id_of_another_boot_or_container_says_nothing_here(other: str) -> None:
    changed_one: dict[str, Any] = {other: "another"}
    assert judged(record(rank=0)._replace(**changed_one), A_DAY) is Liveness.SILENT


def test_a_process_that_could_not_tell_where_it_is_goes_by_its_heartbeat() -> None:
    assert judged(record(rank=0, boot="", pid_namespace=""), 1.0) is Liveness.ALIVE


def test_elsewhere_a_process_without_a_heartbeat_is_as_alive_as_its_engine_on_its_host() -> None:
    def rank(host: str = "node-b", engine: str = ENGINE) -> tuple[Found, ...]:
        one = record(elsewhere(2, host), rank=0, engine=engine)
        return (Found(one, time.time(), Path("folder", one.file_name)),)

    front_end = record(elsewhere(1))
    assert judged(front_end, AN_HOUR, rank()) is Liveness.ALIVE
    assert judged(front_end, AN_HOUR, rank(host="node-c")) is Liveness.SILENT
    assert judged(front_end, AN_HOUR, rank(engine="f" * 16)) is Liveness.SILENT
    assert judged(record(elsewhere(1), rank=1), AN_HOUR, rank()) is Liveness.SILENT


def test_the_identity_is_that_of_this_process_and_cheap() -> None:
    here = identity()
    assert here == of(os.getpid())
    assert here.boot
    assert here.pid_namespace.startswith("pid:[")
    started = time.perf_counter()
    for _ in range(100):
        identity()
    assert time.perf_counter() - started < 0.1


# -- clearing up -------------------------------------------------------------------------------------------------


def left(base: Path) -> set[str]:
    prune(base)
    return {one.record.engine for one in read(base).found}


@pytest.fixture
def dead() -> Identity:
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        gone = of(process.pid)
        process.kill()
    return gone


def test_what_dead_processes_left_is_removed_after_an_hour(tmp_path: Path, dead: Identity) -> None:
    leave(tmp_path, record(dead, engine="1" * 16), age=AN_HOUR + 1)
    leave(tmp_path, record(dead, engine="2" * 16, problem="why"), age=AN_HOUR - 10)
    leave(tmp_path, record(engine="3" * 16), age=30 * A_DAY)
    assert left(tmp_path) == {"2" * 16, "3" * 16}


def test_what_was_left_before_this_host_booted_is_removed_after_an_hour(tmp_path: Path) -> None:
    here = identity()
    leave(tmp_path, record(here._replace(boot="before"), engine="1" * 16), age=AN_HOUR + 1)
    leave(tmp_path, record(here._replace(boot="before"), engine="2" * 16), age=AN_HOUR - 10)
    leave(tmp_path, record(elsewhere(1), engine="3" * 16), age=AN_HOUR + 1)
    assert left(tmp_path) == {"2" * 16, "3" * 16}


def test_what_was_left_elsewhere_is_removed_once_its_engine_was_silent_for_a_week(tmp_path: Path) -> None:
    leave(tmp_path, record(elsewhere(1), engine="1" * 16), age=8 * A_DAY)
    leave(tmp_path, record(elsewhere(2), engine="2" * 16), age=6 * A_DAY)
    leave(tmp_path, record(elsewhere(3), engine="3" * 16), age=8 * A_DAY)
    leave(tmp_path, record(elsewhere(4, "node-c"), rank=0, engine="3" * 16))
    assert left(tmp_path) == {"2" * 16, "3" * 16}


def test_half_written_files_are_removed_after_an_hour(tmp_path: Path) -> None:
    write(tmp_path, record())
    for number, age in enumerate((0.0, AN_HOUR + 1)):
        path = own_folder(tmp_path) / f".{record().file_name}.0000000{number}"
        path.touch()
        os.utime(path, (time.time() - age,) * 2)
    prune(tmp_path)
    assert names(tmp_path) == [f".{record().file_name}.00000000", record().file_name]


def test_nothing_is_removed_that_is_not_a_record_of_ours(tmp_path: Path, dead: Identity) -> None:
    leave(tmp_path, record(dead), age=A_DAY)
    outside = tmp_path / "outside"
    outside.mkdir()
    own_folder(tmp_path).rename(outside / "records")
    own_folder(tmp_path).symlink_to(outside / "records")
    prune(tmp_path)
    assert len(list((outside / "records").iterdir())) == 1


@pytest.mark.parametrize("plant", [a_link, a_file, writable_by_all])
def test_clearing_up_never_fails(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    prune(tmp_path / "gone")
    prune(tmp_path)
    plant(own_folder(tmp_path))
    prune(tmp_path)


# -- keeping it --------------------------------------------------------------------------------------------------


class Warnings(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


@pytest.fixture
def warned() -> Warnings:
    return Warnings()


@pytest.fixture
def reporter(tmp_path: Path, warned: Warnings) -> Iterator[Reporter]:
    made = Reporter(tmp_path, warned)
    yield made
    made.close()
    assert eventually(lambda: threads() == [])


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("graphfix")]


def test_a_published_record_is_written_by_a_thread_that_then_ends(tmp_path: Path, reporter: Reporter) -> None:
    reporter.publish(record())
    reporter.flush(10.0)
    assert only(tmp_path).record == record()
    assert threads() == []


def test_of_many_records_the_last_one_is_written(tmp_path: Path, reporter: Reporter) -> None:
    for number in range(100):
        reporter.publish(record(problem=str(number)))
    reporter.flush(10.0)
    assert only(tmp_path).record.problem == "99"


def test_records_of_two_engines_in_one_process_are_both_written(tmp_path: Path, reporter: Reporter) -> None:
    reporter.publish(record(engine="1" * 16))
    reporter.publish(record(engine="2" * 16))
    reporter.flush(10.0)
    assert {one.record.engine for one in read(tmp_path).found} == {"1" * 16, "2" * 16}
    reporter.close()
    assert names(tmp_path) == []


def test_a_kept_record_is_rewritten_when_it_changed_and_touched_when_not(tmp_path: Path, reporter: Reporter) -> None:
    says = {"now": record(rank=0)}

    def refresh() -> Record:
        return says["now"]._replace(written=time.time())

    reporter.keep(refresh, 0.02)
    assert eventually(lambda: read(tmp_path).found)
    first = only(tmp_path)
    assert eventually(lambda: only(tmp_path).heartbeat > first.heartbeat)
    assert only(tmp_path).record == first.record  # `written` included: it was touched
    says["now"] = record(rank=0, events={"capture-state": {"state-consumed": 13}})
    assert eventually(lambda: only(tmp_path).record.events == says["now"].events)


def test_a_refresh_without_an_answer_is_a_heartbeat(tmp_path: Path, reporter: Reporter) -> None:
    reporter.publish(record(rank=0))
    reporter.flush(10.0)
    first = only(tmp_path)
    reporter.keep(lambda: None, 0.02)
    assert eventually(lambda: only(tmp_path).heartbeat > first.heartbeat)


def test_a_record_that_somebody_cleared_away_comes_back(tmp_path: Path, reporter: Reporter, warned: Warnings) -> None:
    reporter.keep(lambda: record(rank=0), 0.02)
    assert eventually(lambda: read(tmp_path).found)
    shutil.rmtree(own_folder(tmp_path))
    assert eventually(lambda: read(tmp_path).found)
    assert warned == []


def test_an_error_in_refresh_is_one_warning(tmp_path: Path, reporter: Reporter, warned: Warnings) -> None:
    asked = []

    def refresh() -> Record:
        asked.append(1)
        raise KeyError("x")

    reporter.keep(refresh, 0.01)
    assert eventually(lambda: len(asked) > 3)
    assert len(warned) == 1
    assert "KeyError: 'x'" in warned[0]


def test_a_clean_end_removes_the_record_and_nothing_comes_after(tmp_path: Path, reporter: Reporter) -> None:
    reporter.keep(lambda: record(rank=0), 0.01)
    assert eventually(lambda: read(tmp_path).found)
    reporter.close()
    reporter.publish(record())
    reporter.keep(record)
    assert names(tmp_path) == []
    assert eventually(lambda: threads() == [])


def test_a_record_with_a_problem_is_written_and_stays(tmp_path: Path, reporter: Reporter) -> None:
    reporter.publish(record())
    reporter.flush(10.0)
    reporter.publish(record(problem="the ranks do not agree"))
    reporter.close(10.0)
    assert only(tmp_path).record.problem == "the ranks do not agree"


def test_a_folder_that_fails_is_one_warning_and_the_record_comes_when_it_is_well_again(
    tmp_path: Path, reporter: Reporter, warned: Warnings
) -> None:
    own_folder(tmp_path).touch()
    reporter.keep(lambda: record(rank=0), 0.01)
    assert eventually(lambda: warned)
    time.sleep(0.1)
    own_folder(tmp_path).unlink()
    assert eventually(lambda: read(tmp_path).found)
    assert len(warned) == 1
    assert "it is a link, or no folder" in warned[0]
    assert "VLLM_GRAPHFIX_STATUS_DIR names another folder" in warned[0]


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A double of a disk that does not answer until the event is set: `os.open` of the folder, in any thread."""
    answers = threading.Event()
    really_open = os.open

    def hanging_open(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == own_folder(tmp_path):
            answers.wait(30.0)
        return really_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", hanging_open)
    yield answers
    answers.set()


def test_nobody_waits_for_a_folder_that_hangs(tmp_path: Path, reporter: Reporter, hanging: threading.Event) -> None:
    started = time.monotonic()
    for number in range(1000):
        reporter.publish(record(problem=str(number)))
    assert time.monotonic() - started < 1.0
    assert threads() == ["graphfix-record"]
    hanging.set()
    assert eventually(lambda: threads() == [])
    assert only(tmp_path).record.problem == "999"


def test_the_end_waits_for_a_folder_that_hangs_as_long_as_it_was_told(
    reporter: Reporter, hanging: threading.Event
) -> None:
    reporter.keep(lambda: record(rank=0), 0.01)
    assert eventually(lambda: reporter._busy_since is not None)
    started = time.monotonic()
    reporter.close(0.2)
    assert 0.15 < time.monotonic() - started < 30.0  # for ever would be the failure


def test_a_folder_that_hangs_is_one_warning(
    reporter: Reporter, warned: Warnings, hanging: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_graphfix.records.reporter._SLOW", 0.05)
    reporter.keep(lambda: record(rank=0), 0.01)
    assert eventually(lambda: warned)
    time.sleep(0.1)
    assert len(warned) == 1
    assert "has not answered for" in warned[0]


def test_a_forked_child_starts_with_nothing_and_leaves_its_parents_record_alone(
    tmp_path: Path, reporter: Reporter
) -> None:
    reporter.keep(lambda: record(rank=0), 0.01)
    assert eventually(lambda: read(tmp_path).found)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 on, which is what is tried here
        child = os.fork()
    if child == 0:
        code = 1
        try:
            assert threads() == []
            reporter.publish(record(identity(), rank=1))
            reporter.flush(10.0)
            assert len(read(tmp_path).found) == 2
            reporter.close(10.0)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [one.record.pid for one in read(tmp_path).found] == [os.getpid()]


def test_a_forked_child_that_says_nothing_leaves_its_parents_record_alone(tmp_path: Path, reporter: Reporter) -> None:
    reporter.publish(record())
    reporter.flush(10.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        reporter.close(10.0)
        os._exit(0)
    os.waitpid(child, 0)
    assert only(tmp_path).record == record()


def start_no_thread(self: threading.Thread) -> None:
    """A double of an interpreter that is shutting down, in Python 3.12.0 to 3.12.2."""
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_a_kept_record_is_removed_also_where_no_thread_can_be_started_any_more(
    tmp_path: Path, reporter: Reporter, warned: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter.keep(record)
    assert eventually(lambda: threads() == ["graphfix-heartbeat"] and read(tmp_path).found)
    monkeypatch.setattr(threading.Thread, "start", start_no_thread)
    reporter.close(10.0)
    assert names(tmp_path) == []
    assert warned == []


@pytest.mark.parametrize("kept", [False, True])
def test_the_end_waits_no_longer_where_no_thread_can_be_started_any_more(
    kept: bool,
    tmp_path: Path,
    reporter: Reporter,
    warned: Warnings,
    hanging: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hanging.set()
    if kept:
        reporter.keep(record)
    else:
        reporter.publish(record())
    assert eventually(lambda: "graphfix-record" not in threads() and read(tmp_path).found)
    hanging.clear()
    monkeypatch.setattr(threading.Thread, "start", start_no_thread)
    started = time.monotonic()
    reporter.close(0.2)
    assert time.monotonic() - started < 10.0
    assert names(tmp_path) == [record().file_name]
    assert warned == []
    hanging.set()
    assert eventually(lambda: threads() == [])
    assert names(tmp_path) == ([] if kept else [record().file_name])


def test_no_thread_to_be_had_is_one_warning(
    reporter: Reporter, warned: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        """A double of a process at its limit of threads."""
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    reporter.publish(record())
    reporter.keep(record)
    reporter.publish(record())
    assert len(warned) == 1
    assert "can't start new thread" in warned[0]


def test_a_process_whose_folder_hangs_ends_in_a_moment(tmp_path: Path) -> None:
    code = """
        import atexit, os, sys, time
        from pathlib import Path
        from records import record
        from vllm_graphfix.records import Reporter
        reporter = Reporter(Path(sys.argv[1]), print)
        reporter.publish(record())
        reporter.flush(10.0)
        really_open = os.open
        os.open = lambda *given, **named: time.sleep(30.0) or really_open(*given, **named)
        atexit.register(reporter.close)
        """
    started = time.monotonic()
    assert run(code, str(tmp_path)) == ""
    assert time.monotonic() - started < 10.0
    assert len(names(tmp_path)) == 1


def test_a_process_that_keeps_a_record_ends_at_once_and_cleanly(tmp_path: Path) -> None:
    code = """
        import atexit, sys, time
        from pathlib import Path
        from records import record
        from vllm_graphfix.records import Reporter, read
        reporter = Reporter(Path(sys.argv[1]), print)
        atexit.register(reporter.close)
        reporter.keep(lambda: record(rank=0), 10.0)
        while not read(Path(sys.argv[1])).found:
            time.sleep(0.01)
        """
    started = time.monotonic()
    assert run(code, str(tmp_path)) == ""
    assert time.monotonic() - started < 10.0
    assert names(tmp_path) == []
