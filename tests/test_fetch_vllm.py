"""The cache of stock releases, with pip and a small wheel in place of the network."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import fetch_vllm
from wheels import MakeWheel, write_wheel


@pytest.fixture(autouse=True)
def make_wheel(wheel_index: Path) -> MakeWheel:
    """Puts a wheel of vLLM 9.9.9 where pip looks, and nowhere else."""

    def make(files: dict[str, bytes]) -> Path:
        return write_wheel(wheel_index, files, "vllm", "9.9.9", "cp38-abi3-manylinux_2_31_x86_64")

    return make


def test_keeps_python_and_drops_compiled_code(make_wheel: MakeWheel, tmp_path: Path) -> None:
    """Shared libraries, kernels' sources and executables are not unpacked; the wheel is deleted."""
    make_wheel({"vllm/a.py": b"A = 1\n", "vllm/_C.abi3.so": b"x", "vllm/k.cuh": b"x", "vllm/server": b"\x7fELF.."})
    root = fetch_vllm.release("9.9.9", tmp_path / "cache")
    files = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    assert files == {"vllm/a.py", "vllm-9.9.9.dist-info/METADATA", "vllm-9.9.9.dist-info/WHEEL"}
    assert (root / "vllm" / "a.py").read_bytes() == b"A = 1\n"
    assert not list((tmp_path / "cache").rglob("*.whl"))


def test_a_release_in_the_cache_needs_no_pip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A release that is there is not fetched again, also where the cache cannot be written."""
    (tmp_path / "0.18.1").mkdir()
    tmp_path.chmod(0o555)
    assert fetch_vllm.main(["--into", str(tmp_path), "0.18.1"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / '0.18.1'}\n"


def test_keeps_the_wheel_on_demand(make_wheel: MakeWheel, tmp_path: Path) -> None:
    """A kept wheel is beside the folders, also where the release was fetched without it before."""
    make_wheel({"vllm/a.py": b""})
    fetch_vllm.release("9.9.9", tmp_path / "cache")
    assert fetch_vllm.wheel("9.9.9", tmp_path / "cache") is None
    fetch_vllm.release("9.9.9", tmp_path / "cache", keep_wheel=True)
    wheel = fetch_vllm.wheel("9.9.9", tmp_path / "cache")
    assert wheel
    assert zipfile.is_zipfile(wheel)


@pytest.mark.parametrize("name", ["../outside.py", "/outside.py", "vllm/../../outside.py", "..\\outside.py"])
def test_nothing_is_unpacked_outside_the_cache(make_wheel: MakeWheel, tmp_path: Path, name: str) -> None:
    """A wheel with a path that leads out of it is refused, and nothing of it stays."""
    make_wheel({name: b"", "vllm/a.py": b""})
    with pytest.raises(fetch_vllm.FetchError, match="outside its own folder"):
        fetch_vllm.release("9.9.9", tmp_path / "cache")
    assert not list(tmp_path.rglob("*.py"))
    assert not (tmp_path / "cache" / "9.9.9").exists()


def test_a_failed_download_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the version, pip's error and the next step; the exit code is 1."""
    assert fetch_vllm.main(["--into", str(tmp_path / "cache"), "9.9.8"]) == 1
    error = capsys.readouterr().err
    assert "vLLM 9.9.8" in error
    assert "No matching distribution" in error
    assert "pip index versions vllm" in error


@pytest.mark.parametrize("version", ["../x", "0.18.1; rm", "latest", "0.18", ""])
def test_a_version_is_a_version(version: str, tmp_path: Path) -> None:
    """Text that is no version becomes neither a path nor an argument of pip."""
    with pytest.raises(fetch_vllm.FetchError, match="not a version"):
        fetch_vllm.release(version, tmp_path)


# -- by ranges of the wheel


class Server(SimpleHTTPRequestHandler):
    """An index of one folder that serves metadata, and ranges unless `whole`, and notes the bytes that it sent."""

    whole = False
    sent: list[int]

    def do_GET(self) -> None:
        first, last = map(int, (re.findall(r"\d+", self.headers.get("Range", "")) or (0, 0)))
        path = Path(self.translate_path(self.path))
        is_range = path.is_file() and "Range" in self.headers and not self.whole
        if path.is_dir():
            names = [each.name for each in path.glob("*.whl")]
            body = "".join(f'<a href="{name}" data-core-metadata="true">{name}</a>' for name in names).encode()
        else:
            body = path.read_bytes()[first : last + 1 if is_range else None]
        self.sent.append(len(body))
        self.send_response(206 if is_range else 200)
        self.send_header("Content-Type", "text/html" if path.is_dir() else "application/octet-stream")
        self.send_header("Content-Range", f"bytes {first}-{last}/{path.stat().st_size}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Server]]:
    """Serves the index's wheels, in place of the folder."""
    handler = type("Handler", (Server,), {"sent": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path / "index")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_FIND_LINKS", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "127.0.0.1")
    monkeypatch.setattr(fetch_vllm, "_BLOCK", 4096)
    yield handler
    server.shutdown()
    server.server_close()


def make_recorded(make_wheel: MakeWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bytes) -> int:
    """Make a wheel with a large library whose RECORD says *recorded* of a.py; return its size."""
    made = make_wheel({"vllm/a.py": b"A = 1\n", "vllm/_C.abi3.so": bytes(1_000_000)})
    parts = [("vllm/a.py", recorded)]
    with zipfile.ZipFile(made) as wheel:
        Path(f"{made}.metadata").write_bytes(wheel.read("vllm-9.9.9.dist-info/METADATA"))
        parts += [(name, wheel.read(name)) for name in wheel.namelist() if "dist-info" in name]
        lines = [f"{name},sha256={fetch_vllm._encoded(hashlib.sha256(data))},{len(data)}" for name, data in parts]
    record = "\n".join([*lines, "vllm-9.9.9.dist-info/RECORD,,\n"]).encode()
    with zipfile.ZipFile(made, "a") as wheel:
        wheel.writestr("vllm-9.9.9.dist-info/RECORD", record)
    records = tmp_path / "records.json"
    records.write_text(json.dumps({"9.9.9": hashlib.sha256(record).hexdigest()}))
    monkeypatch.setattr(fetch_vllm, "RECORDS", records)
    return made.stat().st_size


@pytest.mark.parametrize(
    ("recorded", "whole", "fetched"),
    [(b"A = 1\n", False, "python"), (b"A = 1\n", True, "wheel"), (b"A = 2\n", False, "wheel")],
    ids=["ranges", "no ranges", "another digest"],
)
def test_the_python_alone_is_fetched_where_it_can_be_and_is_as_recorded(
    served: type[Server],
    make_wheel: MakeWheel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recorded: bytes,
    whole: bool,
    fetched: str,
) -> None:
    size = make_recorded(make_wheel, tmp_path, monkeypatch, recorded)
    served.whole = whole
    root = fetch_vllm.release("9.9.9", tmp_path / "cache")
    assert (root / "vllm" / "a.py").read_bytes() == b"A = 1\n"
    assert not list(root.rglob("*.so"))
    assert (sum(served.sent) > size) == (fetched == "wheel")


def test_each_release_has_a_digest() -> None:
    assert tuple(json.loads(fetch_vllm.RECORDS.read_text())) == fetch_vllm.ALL_RELEASES
