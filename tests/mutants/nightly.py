"""The shapes of nightly wheels between PR 37588 and PR 39773, made from a stock release by cutting statements out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from edited import link

SPECULATOR = Path("vllm/v1/worker/gpu/spec_decode/eagle/speculator.py")
T = TypeVar("T")


def make_nightly(stock_root: Path, destination: Path, *, without_mode: bool, without_zero_fill: bool) -> Path:
    """A vLLM in `destination` that is the one of `stock_root` (both hold `vllm/`) less a half of PR 39773, or both.

    Args:
        stock_root: an unpacked 0.20.0 or later release that has PR 39773.
        destination: a new or empty directory; all but the edited file links into `stock_root`.
        without_mode: the draft decodes' manager gets the configured mode.
        without_zero_fill: the kernel leaves `last_token_indices` beyond the batch as they are.

    Raises:
        LookupError: `stock_root` has not the statements to cut, or more than one candidate.
    """
    source = (stock_root / SPECULATOR).read_text()
    tree = ast.parse(source)
    cut: list[ast.stmt] = []
    if without_mode:
        cut.append(_only(s for s in _function(tree, "init_cudagraph_manager").body if _is_mode_choice(s)))
    if without_zero_fill:
        kernel = _function(tree, "_prepare_eagle_inputs_kernel")
        loops = (s for s in ast.walk(kernel) if isinstance(s, ast.For))
        cut.append(_only(s for s in loops if _stores_to(s, "last_token_indices_ptr")))
    lines = source.splitlines(keepends=True)
    for statement in sorted(cut, key=lambda s: s.lineno, reverse=True):
        del lines[statement.lineno - 1 : statement.end_lineno]
    edited = "".join(lines)
    ast.parse(edited)
    link(stock_root.resolve(), destination, {SPECULATOR.parts})
    (destination / SPECULATOR).write_text(edited)
    return destination


def _function(tree: ast.Module, name: str) -> ast.FunctionDef:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    return _only(functions)


def _is_mode_choice(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and any(
        isinstance(node, ast.Attribute) and node.attr == "decode_mode" for node in ast.walk(statement.test)
    )


def _stores_to(loop: ast.For, pointer: str) -> bool:
    calls = (node for node in ast.walk(loop) if isinstance(node, ast.Call))
    return any(ast.unparse(call.func) == "tl.store" and ast.unparse(call.args[0]).startswith(pointer) for call in calls)


def _only(matches: Iterator[T]) -> T:
    candidates = list(matches)
    if len(candidates) != 1:
        raise LookupError(f"{SPECULATOR}: {len(candidates)} statements to cut where there should be one")
    return candidates[0]
