"""Damaged files: copies of a stock release with one target spoilt, and of the plugin with its manifest spoilt."""

from __future__ import annotations

import ast
import json
import os
import py_compile
import zipfile
from collections.abc import Callable
from pathlib import Path

import vllm_graphfix
from edited import edited
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.manifest import diagnose
from vllm_graphfix.source.files import open_source


def targets(release: Path, fixes: tuple[str, ...]) -> dict[Path, list[str]]:
    """The files, relative to *release*, in which *fixes* patch something there, and what."""
    names_by_file: dict[Path, list[str]] = {}
    for name in fixes:
        for patch in BY_NAME[name].patches(diagnose(BY_NAME[name], open_source(release)).shape):
            names = names_by_file.setdefault(_file(release, patch.module), [])
            names.extend({patch.name} - set(names))
    return names_by_file


def _file(release: Path, module: str) -> Path:
    path = Path(*module.split("."))
    return path / "__init__.py" if (release / path).is_dir() else path.with_suffix(".py")


def _rewritten(code: str, names: list[str], change: Callable[[ast.FunctionDef], None]) -> str:
    """*code* with a change to each function of *names* that is defined there."""
    tree = ast.parse(code)
    for name in names:
        *owner, function = name.split(".")
        scope: list[ast.stmt] = tree.body
        for each in owner:
            scope = next(node.body for node in scope if isinstance(node, ast.ClassDef) and node.name == each)
        for node in scope:
            if isinstance(node, ast.FunctionDef) and node.name == function:
                change(node)
    return ast.unparse(tree)


def _rename(node: ast.FunctionDef) -> None:
    node.name += "_now"


def _rename_argument(node: ast.FunctionDef) -> None:
    argument = node.args.args[-1]
    before, argument.arg = argument.arg, argument.arg + "_now"
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id == before:
            inner.id = argument.arg


def _further_argument(node: ast.FunctionDef) -> None:
    node.args.args.insert(1, ast.arg("further"))


def _further_keyword(node: ast.FunctionDef) -> None:
    node.args.kwonlyargs.append(ast.arg("further"))
    node.args.kw_defaults.append(None)


def _deleted(code: str, names: list[str]) -> str:
    return code + "".join(f"\ndel {name}" for name in names) + "\n"


DAMAGES: dict[str, Callable[[str, list[str]], bytes]] = {
    "attribute gone": lambda code, names: _deleted(code, names).encode(),
    "function renamed": lambda code, names: _rewritten(code, names, _rename).encode(),
    "argument renamed": lambda code, names: _rewritten(code, names, _rename_argument).encode(),
    "further argument": lambda code, names: _rewritten(code, names, _further_argument).encode(),
    "further keyword": lambda code, names: _rewritten(code, names, _further_keyword).encode(),
    "cut": lambda code, names: code.encode()[: len(code) * 2 // 3],
    "cut to nothing": lambda code, names: b"",
    "binary": lambda code, names: bytes(range(256)) * 64,
    "null byte": lambda code, names: code.encode() + b"\0",
    "unknown encoding": lambda code, names: b"# -*- coding: klingon -*-\n" + code.encode(),
    "another encoding": lambda code, names: b"# -*- coding: latin-1 -*-\n# \xe9\n" + code.encode(),
}
"""By what is done to a file that is read as text; the new content."""


def _bytecode_only(file: Path) -> None:
    py_compile.compile(str(file), cfile=str(file.with_suffix(".pyc")), doraise=True)
    file.unlink()


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _dangling_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


FORMS: dict[str, Callable[[Path], None]] = {
    "bytecode only": _bytecode_only,
    "a folder": _folder,
    "a dangling link": _dangling_link,
}
"""By what is there in the place of a file."""


def damaged_releases(release: Path, fixes: tuple[str, ...], folder: Path, every: int = 1) -> dict[str, str]:
    """Each damage to each target, or every nth, made below *folder*: roots of the trees; and the release in a zip."""
    made: dict[str, str] = {}
    damaged = targets(release, fixes)
    pairs = [(path, what) for path in damaged for what in (*DAMAGES, *FORMS)]
    for number, (path, what) in enumerate(pairs[::every]):
        root = edited(release, folder / str(number), {str(path): lambda text: text + "\n"}, anonymous=False)
        made[f"{path}: {what}"] = str(root)
        if what in FORMS:
            FORMS[what](root / path)
        else:
            code = (release / path).read_text()
            (root / path).write_bytes(DAMAGES[what](code, damaged[path]))
    made["all: in a zip"] = str(_zipped(release, folder / "release.zip"))
    return made


def _zipped(release: Path, archive: Path) -> Path:
    with zipfile.ZipFile(archive, "w") as made:
        for file in sorted((release / "vllm").rglob("*.py")):
            made.write(file, file.relative_to(release))
    return archive


_MANIFEST = (Path(vllm_graphfix.__file__).parent / "manifest.json").read_bytes()
MANIFESTS: dict[str, Callable[[Path], object]] = {
    "a folder": lambda manifest: manifest.mkdir(),
    "a dangling link": lambda manifest: manifest.symlink_to("nowhere"),
    "empty": lambda manifest: manifest.touch(),
    "cut": lambda manifest: manifest.write_bytes(_MANIFEST[: len(_MANIFEST) // 2]),
    "binary": lambda manifest: manifest.write_bytes(bytes(range(256)) * 64),
    "another schema": lambda manifest: manifest.write_text(json.dumps(json.loads(_MANIFEST) | {"schema": 99})),
    "a list": lambda manifest: manifest.write_text("[]"),
    "fixes of another kind": lambda manifest: manifest.write_text(
        '{"schema": 1, "files": {}, "fixes": {"capture-state": 3}}'
    ),
    "nested without end": lambda manifest: manifest.write_text("[" * 100_000),
}


def damaged_packages(folder: Path) -> dict[str, str]:
    """The plugin with each damage to its manifest: folders for the Python path."""
    package = Path(vllm_graphfix.__file__).parent
    made = {}
    for number, (what, damage) in enumerate(MANIFESTS.items()):
        copy = folder / f"package{number}" / package.name
        copy.mkdir(parents=True)
        for child in package.iterdir():
            if child.name not in ("manifest.json", "__pycache__"):
                os.symlink(child, copy / child.name)  # noqa: PTH211
        damage(copy / "manifest.json")
        made[what] = str(copy.parent)
    return made
