"""promtool from the PATH, or out of Debian's package."""

from __future__ import annotations

from pathlib import Path

import pytest

import fetch_promtool
from fetch_vllm import FetchError


def test_a_promtool_on_the_path_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "promtool").write_text("#!/bin/sh\n")
    (tmp_path / "promtool").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetch_promtool.tool("promtool", tmp_path / "cache") == tmp_path / "promtool"
    assert not (tmp_path / "cache").exists()


def test_on_a_machine_that_is_no_debian_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetch_promtool.main(["--into", str(tmp_path / "cache")]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert "promtool is not on the PATH" in output.err
    assert fetch_promtool.INSTEAD in output.err


def test_a_failed_download_is_no_reason_to_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, body in (("apt-get", "echo E: no network; exit 100"), ("dpkg-deb", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FetchError, match="no network") as raised:
        fetch_promtool.tool("promtool", tmp_path / "cache")
    assert not isinstance(raised.value, fetch_promtool.NoDebianError)
    assert not (tmp_path / "cache" / fetch_promtool.PACKAGE).exists()
