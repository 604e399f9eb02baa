"""Reads a file of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_graphfix.commands.compare import CompareError

Prompt = tuple[int, ...] | str
_LARGEST_FILE = 64 * 1024 * 1024
"""Bytes; the prompts of a comparison are a few kilobytes."""
_FORMS = 'a string, a list of token ids, {"prompt": …} or {"prompt_token_ids": …}'


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Return the prompts of a file, one per line; blank lines are skipped.

    A line is text; in a file named `*.jsonl` it is a string, a list of token ids, or an object with ``prompt`` or
    ``prompt_token_ids``.

    Raises CompareError, which names the line.
    """
    if path.suffix.lower() == ".json":  # else each of its lines would be a prompt
        raise CompareError(f"{path}: name the file .jsonl and give one of these per line: {_FORMS}")
    # Not splitlines(), which also splits at a form feed or U+2028 within a prompt.
    lines = _text(path).replace("\r\n", "\n").split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise CompareError(f"{path} holds no prompt; give one per line")
    if path.suffix.lower() != ".jsonl":
        return tuple(line for _, line in numbered)
    return tuple(_from_json(line, f"{path}, line {number}") for number, line in numbered)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)  # stat() knows no size of a device or pipe
    except OSError as error:
        raise CompareError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > _LARGEST_FILE:
        raise CompareError(f"{path} has more than {_LARGEST_FILE >> 20} MiB; give a file with fewer prompts")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise CompareError(f"{path}, line {line}: is not UTF-8 text; give one prompt per line") from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise CompareError(f"{path}, line {line}: is not text: it holds a zero byte; give one prompt per line")
    return text


def _from_json(line: str, place: str) -> Prompt:
    try:
        prompt = json.loads(line)
    except json.JSONDecodeError as error:
        raise CompareError(f"{place}: is not JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise CompareError(f"{place}: is not readable JSON: {error}") from error
    if isinstance(prompt, dict):
        prompt = _prompt_in(prompt)
    if isinstance(prompt, str) and prompt.strip():
        return _checked_encodable(prompt, place)
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return tuple(prompt)
    raise CompareError(f"{place}: give {_FORMS}")


def _prompt_in(fields: dict[str, Any]) -> Any:
    ids = fields.get("prompt_token_ids")
    if ids is None:
        return fields.get("prompt")
    return ids if isinstance(ids, list) else None


def _checked_encodable(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CompareError(f"{place}: holds half of a surrogate pair, which no tokenizer accepts") from error
    return text
