"""Mutants of a whole class or module: renamed, moved, split up; and of what a module imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from edited import Change, swap
from mutants_made import Base, Mutant


def around(
    fix: str, base: Base, path: str, cls: str, paths: tuple[str, ...], methods: tuple[str, ...]
) -> Iterator[Mutant]:
    """A class renamed, moved, with another base; a method moved to a base; a module moved; names imported otherwise."""
    text = base.text(path)
    tree = ast.parse(text)
    node = next((child for child in tree.body if isinstance(child, ast.ClassDef) and child.name == cls), None)
    if node is None:
        return
    bases = ", ".join(map(ast.unparse, node.bases))

    def mutant(name: str, *changes: Change, moved: tuple[tuple[str, str], ...] = (), **renamed: str) -> Mutant:
        by_hand = tuple((path, change) for change in changes)
        return Mutant(
            fix,
            base,
            paths,
            (),
            by_hand,
            moved,
            tuple(renamed.items()),
            name=f"{cls}: {name}",
            kind="class or module moved or renamed",
        )

    header = rf"^class {cls}\b(?:\([^)]*\))?:"
    renamed = swap(rf"\b{cls}\b", f"New{cls}")
    yield mutant("renamed, the old name stays", renamed, lambda text: text + f"\n\n{cls} = New{cls}\n")
    yield mutant(
        "renamed, the old name is a subclass", renamed, lambda text: text + f"\n\nclass {cls}(New{cls}):\n    pass\n"
    )
    with_mixin = f"class _Mixin:\n    pass\n\n\nclass {cls}({', '.join(filter(None, ['_Mixin', bases]))}):"
    yield mutant("a base added", swap(header, with_mixin))
    for method in methods:
        defined = _method(node, method)
        if defined is None:
            continue
        first = min([defined.lineno, *(decorator.lineno for decorator in defined.decorator_list)])
        lines = text.splitlines(keepends=True)
        whole = "".join(lines[first - 1 : defined.end_lineno])
        if "super()" in whole:
            continue
        without = text.replace(whole, "")
        with_base = re.sub(
            header,
            f"class _{cls}Base{f'({bases})' if bases else ''}:\n{escaped(whole)}\n\nclass {cls}(_{cls}Base):",
            without,
            count=1,
            flags=re.MULTILINE,
        )
        yield mutant(f"{method} moved to a base class", lambda _, with_base=with_base: with_base)  # type: ignore[misc]
        subclass = (
            f"class {cls}(_{cls}Base):\n    def {method}(self, *args, **kwargs):\n"
            f"        return super().{method}(*args, **kwargs)\n"
        )
        whole_base = re.sub(rf"^class {cls}\b", f"class _{cls}Base", text, count=1, flags=re.MULTILINE)
        split = whole_base.splitlines(keepends=True)
        split[(node.end_lineno or 0) : node.end_lineno or 0] = ["\n\n", subclass, "\n"]
        yield mutant(f"{method} calls the base's", lambda _, split=split: "".join(split))  # type: ignore[misc]
    elsewhere = path.replace(".py", "_impl.py")
    module = elsewhere.removesuffix(".py").replace("/", ".")
    names = [name for child in tree.body for name in _defined(child)]
    imports = f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")\n"
    yield mutant("its module moved, names imported", lambda _: imports, moved=((elsewhere, text),))
    yield mutant(
        "its module moved, * imported", lambda _: f"from {module} import *\n{imports}", moved=((elsewhere, text),)
    )
    lines = text.splitlines(keepends=True)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines[first - 1 : node.end_lineno] = [f"from {module} import {cls}\n"]
    yield mutant("moved to another module", lambda _: "".join(lines), moved=((elsewhere, text),))


def escaped(text: str) -> str:
    return text.replace("\\", r"\\")


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == name), None)


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.ImportFrom, ast.Import)):
        return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def imported_otherwise(fix: str, base: Base, path: str, name: str, paths: tuple[str, ...]) -> Iterator[Mutant]:
    """A name that *path* imports: under an alias, through its module, or bound again."""
    text = base.text(path)
    imports = (node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom))
    statement = next((node for node in imports if name in {alias.name for alias in node.names}), None)
    if statement is None:
        return
    lines = text.splitlines(keepends=True)
    rest = [alias for alias in statement.names if alias.name != name]
    remaining = [ast.unparse(ast.ImportFrom(statement.module, rest, statement.level)) + "\n"] if rest else []

    def with_import(imported: str, used: str) -> str:
        head = "".join(lines[: statement.lineno - 1])
        tail = "".join(lines[statement.end_lineno :])
        return head + "".join(remaining) + imported + "\n" + re.sub(rf"\b{name}\b(?!\s*=[^=])", used, tail)

    package, _, module = (statement.module or "").rpartition(".")
    for label, new in {
        "under an alias": with_import(f"from {statement.module} import {name} as Own{name}", f"Own{name}"),
        "through its module": with_import(f"from {package} import {module} as its_module", f"its_module.{name}"),
        "by a full path": with_import(f"import {statement.module}", f"{statement.module}.{name}"),
        "bound again": with_import(
            f"from {statement.module} import {name} as _{name}\nOwn{name} = _{name}", f"Own{name}"
        ),
        "where it may be missing": with_import(
            f"try:\n    from {statement.module} import {name}\nexcept ImportError:\n    {name} = None", name
        ),
    }.items():
        by_hand = ((path, lambda _, new=new: new),)
        yield Mutant(fix, base, paths, (), by_hand, name=f"{name} imported {label}", kind="imported otherwise")
