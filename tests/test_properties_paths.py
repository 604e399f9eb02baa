"""Whatever path `--vllm` names, `status` says what it is, in time.

So it does whatever stands in place of a source file or in it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hostile import ARGUMENTS, KINDS, METADATA, READ, TEXT, Files, made, metadata, plant, share, stock_files
from vllm_files import RUNNER
from vllm_graphfix.source.files import SourceError, open_source
from watched import judged


@pytest.fixture(scope="module")
def stock() -> Files:
    return stock_files()


@given(ARGUMENTS)
@example("n" * 300)
@example("n/" * 60_000)
@example("~nobody-has-this")
@share(30)
def test_any_text_is_a_path_or_one_error(text: str) -> None:
    assert judged(text).value.code == 2
    assert judged(f"/nowhere/{text}").value.code == 2


def test_a_path_that_no_system_knows_is_one_error() -> None:
    for path in ("a\0b", "\ud800"):
        with pytest.raises(SourceError, match="give a vLLM wheel"):
            open_source(path)


def test_a_path_that_leads_nowhere_or_is_not_ours_is_one_error(tmp_path: Path) -> None:
    for kind in KINDS:
        plant(tmp_path / kind, kind, b"", tmp_path / "file")
        assert judged(tmp_path / kind).value.code == 2
        assert judged(tmp_path / kind / "vllm").value.code == 2


# -- trees -------------------------------------------------------------------------------------------------------

versions = st.builds("__version__ = {!r}\n".format, TEXT).map(lambda text: text.encode("utf-8", "replace"))
PARTS = st.sampled_from([*READ, METADATA, "vllm/_version.py", "vllm/__init__.py"])


@given(
    st.dictionaries(
        PARTS, st.tuples(st.sampled_from(["file", "file", *KINDS]), st.binary(max_size=60) | metadata | versions)
    )
)
@share(30)
def test_whatever_stands_in_place_of_a_file_is_a_verdict_or_one_error(
    stock: Files, parts: dict[str, tuple[str, bytes]]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = made(Path(name) / "site", stock)
        for path, (kind, content) in parts.items():
            (root / path).unlink(missing_ok=True)
            plant(root / path, kind, content, Path(__file__))
        judged(root)


def test_a_tree_is_listed_once_and_its_unknown_files_are_read_once(stock: Files, tmp_path: Path) -> None:
    small = judged(made(tmp_path / "small", stock))
    large = made(tmp_path / "large", stock)
    for number in range(1000):
        (large / "vllm" / f"{number}.py").write_text("pass\n")
        (large / f"vllm-{number}.dist-info").mkdir()
    (large / "vllm" / "loop").symlink_to(large, target_is_directory=True)
    seen = judged(large)
    # Of 1,065 files no release has 1,000: what is missing in the others may stand in these.
    assert (small.value.code, seen.value.code) == (0, 3)
    # 1000 folders, and 1000 files: each file counts twice, in `open` and in its opener.
    assert seen.looks <= small.looks + 3000 + 10


def test_a_link_from_the_package_to_a_disk_is_one_error(stock: Files, tmp_path: Path) -> None:
    tree = made(tmp_path, stock)
    (tree / "vllm" / "disk").symlink_to("/", target_is_directory=True)
    seen = judged(tree)
    assert seen.value.code == 2
    assert "more files than any vLLM" in seen.value.err


@pytest.mark.slow
def test_a_tree_of_a_hundred_thousand_files_is_one_error(stock: Files, tmp_path: Path) -> None:
    large = made(tmp_path, stock)
    for number in range(50_000):
        (large / "vllm" / f"{number}.py").touch()
        (large / "vllm" / f"{number}.txt").touch()
    assert judged(large).value.code == 2


# -- source ------------------------------------------------------------------------------------------------------

FRAGMENTS = st.sampled_from(
    [
        *[b"\0", b"\xff", b"\n", b"(" * 300, b"\\", b"'''", b"self" + b".a" * 900, b"0x" + b"f" * 9000, b"9" * 9000],
        *[
            b"not " * 90,
            b"-" * 900 + b"1",
            b"[" * 150 + b"]" * 150,
            b"\x0c",
            b"\t",
            b"def f(): pass\n",
            b"class C:",
            b"...",
        ],
    ]
)


@given(st.lists(st.tuples(st.sampled_from(READ), st.floats(0, 1), FRAGMENTS | st.binary(max_size=20)), max_size=4))
@share(30)
def test_a_source_file_with_anything_in_it_is_a_verdict_or_one_error(
    stock: Files, cuts: list[tuple[str, float, bytes]]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        files = dict(stock)
        for path, where, fragment in cuts:
            content = files.get(path, b"")
            place = int(where * len(content))
            files[path] = content[:place] + fragment + content[place:]
        judged(made(Path(name), files), memory=256 << 20)


IN_A_FUNCTION = b"class GPUModelRunner:\n def _build_attention_metadata(self):\n  is_prefilling = "
MB = 1 << 20
LARGE = {
    "deep attributes": IN_A_FUNCTION + b"a" + b".a" * 900,
    "deeper attributes": IN_A_FUNCTION + b"a" + b".a" * 2900,
    "a chain of calls": IN_A_FUNCTION + b"a" + b"()" * 2500,
    "a sum of many": IN_A_FUNCTION + b"1" + b"+1" * 2500,
    "a number of many digits": IN_A_FUNCTION + b"0x" + b"f" * 900_000,
    "a decimal of many digits": IN_A_FUNCTION + b"9" * 900_000,
    "open brackets": b"(" * MB,
    "nested brackets": b"[" * 199 + b"]" * 199,
    "signs": b"x=" + b"-" * (MB - 3) + b"1",
    "not not": b"x=" + b"not " * 200_000 + b"1",
    "lambdas": b"x=" + b"lambda:" * 100_000 + b"1",
    "elifs": b"if 1: x\n" + b"elif 1: x\n" * 90_000,
    "an encoding": b"# coding: idna\n" + b"a" * 900_000,
    "another one": b"# coding: utf-7\n" + b"+" * 900_000,
    "8 MB": b"(" * (8 * MB),
    "fields": b"x=f'" + b"{a}" * 300_000 + b"'",
}
LARGEST = {
    "attributes without end": b"a" + b".a" * (MB // 2 - 1),
    "names": b"a\n" * (MB // 2),
    "assignments": b"a=1\n" * (MB // 4),
    "decorators": b"@a\n" * (MB // 3 - 10) + b"def f(): 0",
    "fields that are not too many": b"x=f'" + (b"{a}" + b"y" * 100) * 9_900 + b"'",
}


@pytest.mark.parametrize(
    "content", [*LARGE.values(), *(pytest.param(one, marks=pytest.mark.slow) for one in LARGEST.values())],
    ids=[*LARGE, *LARGEST],
)  # fmt: skip
def test_source_made_to_exhaust_a_parser_is_judged_within_limits(stock: Files, tmp_path: Path, content: bytes) -> None:
    slow = content in LARGEST.values()
    # All files of it: none is parsed without those before it.
    files = dict.fromkeys(READ, content) if slow else stock | {RUNNER: content}
    judged(
        made(tmp_path, files | {"vllm/__init__.py": b""}),
        seconds=150 if slow else 10,
        memory=(2600 if slow else 200) << 20,
    )
