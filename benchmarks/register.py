"""The time of `register()` in a process of vLLM, beyond `import wrapt`, and the modules that it imports.

    python benchmarks/register.py [--processes N]

Every measurement is a fresh process. Exit code 1 if a heavy module is among the imported ones.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import Times, console, environment, machine, run, table, verdict
from vllm_graphfix.fixes import FIXES

import fetch_vllm  # isort: skip - measuring has put tools/ on the path

TARGET = 5.0
"""Milliseconds, import of the package included."""
HEAVY = {"torch", "numpy", "rich", "typer", "click"}
LIGHT_PARTS_OF_VLLM = {"vllm", "vllm.plugins", "vllm.envs"}

CHILD = """
import sys, time
{before}
started = time.perf_counter_ns()
import wrapt
wrapt_ms = (time.perf_counter_ns() - started) / 1e6
already = set(sys.modules)
cpu, started = time.thread_time_ns(), time.perf_counter_ns()
import vllm_graphfix
imported = time.perf_counter_ns()
vllm_graphfix.register()
ended, cpu_ended = time.perf_counter_ns(), time.thread_time_ns()
added = sorted(set(sys.modules) - already)
diagnosing = time.perf_counter_ns()
states = [state.state.value for state in vllm_graphfix.states().values()]
diagnosed = time.perf_counter_ns()
print(dict(
    diagnosis=(diagnosed - diagnosing) / 1e6, wrapt=wrapt_ms, wall=(ended - started) / 1e6, cpu=(cpu_ended - cpu) / 1e6,
    modules=added, needed=states.count("waiting"),
))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--processes", type=int, default=40, metavar="N", help="fresh processes for each row (default: 40)"
    )
    processes = parser.parse_args().processes
    made = table(
        (
            f"register(), milliseconds beyond import wrapt; {processes} processes a row, fewer where vllm.plugins "
            "is imported"
        ),
        *(
            "process",
            "fixes needed",
            "wall min",
            "wall median",
            "CPU min",
            "CPU median",
            "modules",
            "target",
            "diagnosis",
        ),
    )
    heavy: set[str] = set()
    imported: set[str] = set()
    wrapt: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        releases = {version: fetch_vllm.release(version) for version in ("0.18.1", "0.21.0", "0.33.0")}
        rows = [(f"bare, vLLM {version}", root, "", processes) for version, root in releases.items()]
        unknown = _unknown(releases["0.18.1"], Path(scratch))
        rows += [("bare, 0.18.1 with every file edited", unknown, "", processes)]
        rows += [
            ("vllm.plugins imported, vLLM 0.18.1", releases["0.18.1"], "import vllm.plugins", max(5, processes // 8))
        ]
        for name, root, before, count in rows:
            measured = [_measure(root, before) for _ in range(count + 1)][1:]  # the first one writes bytecode
            wall, cpu = Times.of([m["wall"] for m in measured]), Times.of([m["cpu"] for m in measured])
            modules = set(measured[0]["modules"])
            imported |= modules
            heavy |= {module for module in modules if _is_heavy(module)}
            wrapt += [m["wrapt"] for m in measured] if not before else []
            cells = [f"{value:.2f}" for value in (*wall, *cpu)]
            made.add_row(
                name,
                str(measured[0]["needed"]),
                *cells,
                str(len(modules)),
                verdict(wall.minimum, TARGET, "ms"),
                f"{min(m['diagnosis'] for m in measured):.1f}",
            )
    out = console()
    out.print(machine(), highlight=False)
    out.print(made)
    out.print("diagnosis: milliseconds at the first import of what a fix concerns, at least; not part of register()")
    out.print(f"import wrapt itself: {min(wrapt):.1f} ms at least", highlight=False)
    foreign = sorted(module for module in imported if not module.startswith("vllm_graphfix"))
    out.print(f"imported besides the package: {', '.join(foreign) or 'nothing'}", highlight=False)
    if heavy:
        out.print(f"[bold red]heavy modules imported: {', '.join(sorted(heavy))}[/]", highlight=False)
    return 1 if heavy else 0


def _measure(root: Path, before: str) -> Any:
    # literal_eval and no JSON: the process must import json only if the plugin does
    return ast.literal_eval(run(["-c", CHILD.format(before=before)], environment(root)).output)


def _is_heavy(module: str) -> bool:
    top = module.partition(".")[0]
    return top in HEAVY or (top == "vllm" and module not in LIGHT_PARTS_OF_VLLM)


def _unknown(root: Path, folder: Path) -> Path:
    """Copy a vLLM into *folder*, a comment added to each file, so that none is a stock release's; return *folder*."""
    for path in {"vllm/__init__.py", *(path for fix in FIXES for path in fix.inspected_files)}:
        if (root / path).is_file():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / path, folder / path)
            with (folder / path).open("a") as edited:
                edited.write("\n# edited\n")
    return folder


if __name__ == "__main__":
    sys.exit(main())
