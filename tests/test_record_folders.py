"""The folder of the records: whose it is, and that what is written there is whole."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from record_folders import a_dangling_link, a_file, a_link, of_another_user, writable_by_a_group, writable_by_all
from records import ENGINE, elsewhere, leave, names, needs_root, only, record, run_python
from vllm_graphfix.records import Record, base_folder, identity, own_folder, read, remove, touch, write


@contextmanager
def nobody() -> Iterator[None]:
    """Acts as a user without privileges, whom a folder's permissions stop."""
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


FOLDERS = [
    (a_link, "it is a link or not a folder"),
    (a_dangling_link, "it is a link or not a folder"),
    (a_file, "it is a link or not a folder"),
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
    result = read(tmp_path)
    assert result.found == ()
    assert result.problems == (f"{own_folder(tmp_path)}: {why}",)


@pytest.mark.parametrize("use", [write, touch], ids=["write", "touch"])
def test_a_folder_that_an_fs_group_has_opened_is_closed_and_used(
    tmp_path: Path, use: Callable[[Path, Record], None]
) -> None:
    """Kubernetes adds 2770 to all folders of a volume and 660 to all files, whenever it mounts it."""
    tmp_path.chmod(0o2777)
    write(tmp_path, record())
    own, file = own_folder(tmp_path), own_folder(tmp_path) / record().file_name
    own.chmod(own.stat().st_mode | 0o2770)
    file.chmod(file.stat().st_mode | 0o660)
    use(tmp_path, record())
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert [one.record for one in read(tmp_path).found] == [record()]
    assert read(tmp_path).problems == ()


def test_a_folder_that_an_fs_group_has_opened_is_closed_and_read(tmp_path: Path) -> None:
    write(tmp_path, record())
    own_folder(tmp_path).chmod(0o2770)
    assert [one.record for one in read(tmp_path).found] == [record()]
    assert stat.S_IMODE(own_folder(tmp_path).stat().st_mode) == 0o700


@needs_root
def test_a_folder_of_another_user_stays_as_an_fs_group_has_opened_it(tmp_path: Path) -> None:
    other = tmp_path / "vllm-graphfix-12345"
    other.mkdir()
    os.chown(other, 12345, 12345)
    other.chmod(0o2770)
    assert read(tmp_path).problems == (f"{other}: others may write to it (mode 2770): chmod 700",)
    assert stat.S_IMODE(other.stat().st_mode) == 0o2770


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        write(tmp_path / "gone", record())
    assert read(tmp_path / "gone").problems == (f"{tmp_path / 'gone'}: No such file or directory",)


def test_a_folder_without_permission_is_reported(shared: Path) -> None:
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
"""  # noqa: E501


def test_a_write_that_is_cut_short_leaves_nothing_behind(tmp_path: Path) -> None:
    output = run_python(
        WRITES_UNTIL_FULL.format(limit="resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"), str(tmp_path)
    )
    assert "File too large" in output
    assert output.endswith("() True []\n")


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
    output = run_python(WRITES_UNTIL_FULL.format(limit=limit), str(tmp_path), before=inside)
    assert why in output
    assert output.endswith("() True []\n")


def test_two_writers_of_one_record_never_show_half_of_one(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from records import record
        from vllm_graphfix.records import identity, write
        for number in range(400):
            write(Path(sys.argv[1]), record(identity()._replace(pid=7), problem=sys.argv[2] * 1000))
        """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "support"), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    seen = set()
    with (
        subprocess.Popen([*command, "a"], env=environment) as one,
        subprocess.Popen([*command, "b"], env=environment) as other,
    ):
        while one.poll() is None or other.poll() is None:
            result = read(tmp_path)
            assert result.problems == ()
            seen |= {one.record.problem for one in result.found}
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


@needs_root
def test_records_of_other_users_are_read_by_who_may(shared: Path) -> None:
    theirs = record(elsewhere(2))
    write(shared, record())
    for uid in (12345, 12346):
        folder = shared / f"vllm-graphfix-{uid}"
        folder.mkdir(0o700)
        (folder / theirs.file_name).write_text(json.dumps(theirs.as_json()))
        os.chown(folder / theirs.file_name, uid, uid)
        os.chown(folder, uid, uid)
    assert [one.path.parent.name for one in read(shared).found] == [
        "vllm-graphfix-0",
        "vllm-graphfix-12345",
        "vllm-graphfix-12346",
    ]
    assert [one.path.parent.name for one in read(shared, own=True).found] == ["vllm-graphfix-0"]
    with nobody():
        result = read(shared)
    assert result.found == ()
    assert result.problems == (
        f"3 folders are not records or cannot be read; the first: {shared}/vllm-graphfix-0 cannot be read by this user",
    )
