"""The warm processes of the tests find out once, for all of them, the same as each of them would."""

from __future__ import annotations

import importlib._bootstrap_external
import importlib.util
import inspect
import os
import py_compile
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

import pytest

import import_cache

HERE = Path(__file__).read_text(encoding="utf-8").splitlines(keepends=True)
Fresh = Callable[[], ModuleType]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fresh:
    """As a process has it that finds, and leaves, what others have found."""

    def made() -> ModuleType:
        monkeypatch.setattr(inspect, "getblock", import_cache._getblock)
        monkeypatch.setattr(SourceFileLoader, "source_to_code", import_cache._compile)
        monkeypatch.setattr(importlib._bootstrap_external, "_compile_bytecode", import_cache._loaded)
        spec = importlib.util.spec_from_file_location("fresh", import_cache.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.remember(str(tmp_path / "imported"), str(tmp_path / "releases"))
        return module

    return made


def nobody(*_: object, **__: object) -> None:
    raise AssertionError("looked for again")


def test_each_block_is_what_python_finds_and_is_searched_once(fresh: Fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [inspect.getblock(HERE[start:]) for start in range(len(HERE))]
    assert len({len(block) for block in expected}) > 5
    for module in (fresh(), fresh()):
        assert [module._block(HERE[start:]) for start in range(len(HERE))] == expected
        module.keep()
    later = fresh()
    monkeypatch.setattr(later, "_getblock", nobody)
    assert [inspect.getblock(HERE[start:]) for start in range(len(HERE))] == expected
    with pytest.raises(AssertionError, match="looked for again"):
        inspect.getblock(["def another(): ...\n", *HERE])


def test_blocks_that_others_find_meanwhile_are_known_too(fresh: Fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fresh()
    monkeypatch.setattr(before, "_getblock", nobody)
    other = fresh()
    block = inspect.getblock(HERE)
    other.keep()
    assert before._block(HERE) == block


@pytest.mark.parametrize("content", ["{digest} 1", "{digest} 1x\n", "{digest}\n", "1\n", "\0\xff\n", ""])
def test_a_line_that_is_not_whole_is_not_believed(fresh: Fresh, tmp_path: Path, content: str) -> None:
    module = fresh()
    lines = ["def f():\n", "    return 1\n"]
    assert inspect.getblock(lines) == lines
    (digest,) = module._new_lengths
    file = tmp_path / "imported" / "blocks"
    file.parent.mkdir()
    file.write_text(content.format(digest=digest), encoding="latin-1")
    fresh()
    assert inspect.getblock(lines) == lines
    file.write_text(f"{digest} 1\n")
    fresh()
    assert inspect.getblock(lines) == lines[:1], "else nothing was read"


def test_code_is_that_of_its_text_and_its_path(fresh: Fresh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    texts = (b"a = 1\n", b"a = 2\n", b"\na = 1\n")
    paths = [str(tmp_path / "releases" / name) for name in ("one.py", "other.py")]
    cases = [(text, path) for text in texts for path in paths]
    expected = [compile(text, path, "exec", dont_inherit=True) for text, path in cases]
    assert len(set(expected)) == 3, "Python takes code of another file for the same"

    def with_paths(codes: list[CodeType]) -> list[object]:
        return [(code, code.co_filename) for code in codes]

    def compiled() -> list[object]:
        return with_paths([SourceFileLoader("m", path).source_to_code(text, path) for text, path in cases])

    first = fresh()
    assert compiled() == with_paths(expected)
    first.keep()
    later = fresh()
    monkeypatch.setattr(later, "_compile", nobody)
    assert compiled() == with_paths(expected)
    for data, path in ((b"a = 3\n", paths[0]), (texts[0], str(tmp_path / "elsewhere.py"))):
        with pytest.raises(AssertionError, match="looked for again"):
            SourceFileLoader("m", path).source_to_code(data, path)
    for file in (tmp_path / "imported").glob("*.code"):
        file.write_bytes(file.read_bytes()[:9])
    fresh()
    assert compiled() == with_paths(expected)


def test_code_is_that_of_the_bytecode_that_is_there(
    fresh: Fresh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a file that was written anew, too, in the same second and with the same size."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    files = [tmp_path / name for name in ("known.py", "unknown.py")]

    def written(text: str) -> None:
        for file in files:
            file.write_text(text)
            os.utime(file, (1, 1))
            py_compile.compile(str(file), doraise=True)

    def loaded(file: Path) -> tuple[object, str]:
        code = SourceFileLoader(file.stem, str(file)).get_code(file.stem)
        assert code is not None
        return code.co_consts, code.co_filename

    written("a = 1\n")
    module = fresh()
    module.know_bytecode("known", str(files[0]))
    module.know_bytecode("missing", str(tmp_path / "missing.py"))
    monkeypatch.setattr(module, "_loaded", nobody)
    assert loaded(files[0]) == ((1, None), str(files[0]))
    with pytest.raises(AssertionError, match="looked for again"):
        loaded(files[1])
    monkeypatch.setattr(module, "_loaded", import_cache._loaded)
    written("a = 2\n")
    assert [loaded(file) for file in files] == [((2, None), str(file)) for file in files]
    written("a = 1\n")
    assert [loaded(file) for file in files] == [((1, None), str(file)) for file in files]


def test_a_process_can_find_out_all_of_it_itself(fresh: Fresh, tmp_path: Path) -> None:
    module = fresh()
    module.forget()
    assert vars(importlib._bootstrap_external)["_compile_bytecode"] is module._loaded
    assert inspect.getblock(HERE)
    SourceFileLoader("m", "").source_to_code(b"a = 1", str(tmp_path / "releases" / "one.py"))
    assert not module._new_lengths
    assert not module._new_codes


def test_where_nothing_can_be_stored_all_goes_on(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "imported").write_text("no folder")
    module = fresh()
    assert inspect.getblock(HERE)
    module.keep()
