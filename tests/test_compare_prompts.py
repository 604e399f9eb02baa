"""The file of prompts: what is a prompt, and one clear error, with file and line, for what is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_graphfix.commands.compare import CompareError
from vllm_graphfix.commands.compare.prompts import read_prompts

FORMS = 'a string, a list of token ids, {"prompt": …} or {"prompt_token_ids": …}'
MEBIBYTE = 1 << 20


def written(folder: Path, content: str | bytes, name: str = "prompts.txt") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def error(path: Path) -> str:
    with pytest.raises(CompareError) as caught:
        read_prompts(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


TEXTS: list[tuple[str, bytes, tuple[str, ...]]] = [
    ("a prompt a line", b"one two\nthree\n", ("one two", "three")),
    ("no newline at the end", b"one", ("one",)),
    ("blank lines are none", b"\n  \none\n\t\n\ntwo\n", ("one", "two")),
    ("space around a prompt is its own", b"  one \n", ("  one ",)),
    ("lines as on Windows", b"one\r\ntwo\r\n", ("one", "two")),
    ("a byte order mark is no text", b"\xef\xbb\xbfone\n", ("one",)),
    ("any script", "où\n日本\n".encode(), ("où", "日本")),
    ("only a newline ends a line", "a\x0cb\u2028c\x85d\n".encode(), ("a\x0cb\u2028c\x85d",)),
    ("JSON is text here", b'{"prompt": "x"}\n', ('{"prompt": "x"}',)),
]


@pytest.mark.parametrize(("content", "prompts"), [row[1:] for row in TEXTS], ids=[row[0] for row in TEXTS])
def test_a_line_of_text_is_a_prompt(tmp_path: Path, content: bytes, prompts: tuple[str, ...]) -> None:
    assert read_prompts(written(tmp_path, content)) == prompts


def test_a_line_of_json_is_a_prompt_in_each_of_its_forms(tmp_path: Path) -> None:
    lines = [
        '"text"',
        "[1, 2, 3]",
        '{"prompt": "text", "max_tokens": 9}',
        '{"prompt": [4, 0]}',
        '{"prompt_token_ids": [5], "prompt": "text"}',
        '{"prompt_token_ids": null, "prompt": "as vLLM writes it"}',
        '"two\\nlines\u2028"',
    ]
    expected = ("text", (1, 2, 3), "text", (4, 0), (5,), "as vLLM writes it", "two\nlines\u2028")
    assert read_prompts(written(tmp_path, "\n".join(lines), "prompts.jsonl")) == expected
    assert read_prompts(written(tmp_path, "\r\n".join(lines), "prompts.JSONL")) == expected


NO_PROMPT = [
    *("[]", "{}", '""', '"  "', "null", "7", "true", "NaN", "[true]", "[1, false]", "[-1]", "[1.0]", '["1"]', "[[1]]"),
    *('[{"prompt": "x"}]', '{"prompt": ""}', '{"prompt": []}', '{"prompt": {"prompt": "x"}}', '{"prompt": null}'),
    *('{"prompt_token_ids": [true]}', '{"prompt_token_ids": "text"}', '{"messages": []}', '{"prompt": true}'),
]


@pytest.mark.parametrize("line", NO_PROMPT)
def test_a_line_of_json_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    path = written(tmp_path, f'"right"\n\n{line}\n"right"\n', "prompts.jsonl")
    assert error(path) == f"{path}, line 3: give {FORMS}"


NO_JSON = [
    ("unquoted", "Expecting value (column 1)"),
    ('{"prompt": "x"', "Expecting ',' delimiter (column 15)"),
    ('"x" "y"', "Extra data (column 5)"),
    ('"tab\there"', "Invalid control character at (column 5)"),
]


@pytest.mark.parametrize(("line", "reason"), NO_JSON)
def test_a_line_that_is_no_json_is_named_with_the_column(tmp_path: Path, line: str, reason: str) -> None:
    path = written(tmp_path, f"[1]\n{line}\n", "prompts.jsonl")
    assert error(path) == f"{path}, line 2: is not JSON: {reason}"


@pytest.mark.parametrize("line", ["[" * 200_000, "[" + "9" * 5000 + "]"], ids=["nested", "long number"])
def test_json_that_python_refuses_is_one_line(tmp_path: Path, line: str) -> None:
    path = written(tmp_path, line, "prompts.jsonl")
    assert error(path).startswith(f"{path}, line 1: is not readable JSON: ")


def test_half_of_a_surrogate_pair_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, '"right"\n"\\ud800"\n', "prompts.jsonl")
    assert error(path) == f"{path}, line 2: holds half of a surrogate pair, which no tokenizer accepts"


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, b"text\nte\xffxt\n")
    assert error(path) == f"{path}, line 2: is not UTF-8 text; give one prompt per line"
    assert "is not UTF-8 text" in error(written(tmp_path, "text".encode("utf-16")))
    path = written(tmp_path, b"text\n\ntext\0\n")
    assert error(path) == f"{path}, line 3: is not text: it holds a zero byte; give one prompt per line"


@pytest.mark.parametrize("content", [b"", b"\n \n\t\n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_a_file_without_a_prompt_is_an_error(tmp_path: Path, content: bytes, name: str) -> None:
    path = written(tmp_path, content, name)
    assert error(path) == f"{path} holds no prompt; give one per line"


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    assert error(tmp_path) == f"{tmp_path} cannot be read: Is a directory"
    missing = tmp_path / "missing.txt"
    assert error(missing) == f"{missing} cannot be read: No such file or directory"


def test_a_file_without_an_end_is_not_read_to_it(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        os.truncate(file.fileno(), 64 * MEBIBYTE + 1)  # a hole, which takes no room
    message = "has more than 64 MiB; give a file with fewer prompts"
    assert error(path) == f"{path} {message}"
    assert error(Path("/dev/zero")) == f"/dev/zero {message}"


def test_a_pipe_can_be_read(tmp_path: Path) -> None:
    """The shell's ``<(…)`` is a pipe."""
    reading, writing = os.pipe()
    os.write(writing, b"one\n")
    os.close(writing)
    try:
        assert read_prompts(Path(f"/dev/fd/{reading}")) == ("one",)
    finally:
        os.close(reading)


def test_one_json_value_in_a_file_is_not_taken_for_lines_of_text(tmp_path: Path) -> None:
    path = written(tmp_path, '[\n"one",\n"two"\n]\n', "prompts.json")
    assert error(path) == f"{path}: name the file .jsonl and give one of these per line: {FORMS}"
