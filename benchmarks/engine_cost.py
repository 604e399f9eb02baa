"""The cost of the fixes in a real engine, and the gain of full graphs: engines that take turns on one GPU.

    python benchmarks/engine_cost.py [--site RELEASE=FOLDER …] --out FOLDER [--plot FILE]
    python benchmarks/engine_cost.py --steps [--site RELEASE=FOLDER …] --out FOLDER
    python benchmarks/engine_cost.py --from FOLDER/result.json [FILE …] [--markdown] [--plot FILE]

FOLDER of --site holds a vLLM with its dependencies; without --site it is the installed one. For each case (`CASES`) the
newest affected release runs eager, with piecewise graphs, with full graphs stock (twice: the second engine shows the
noise) and patched; the first fixed release after it runs with full graphs. All engines are alive at once and decode in
turn, in alternating order, so that ratios compare neighbours in time. Then they end, and stock and patched engines of
the first case start in pairs. The result is written after each step, so that an interruption loses nothing.

With --detectors the newest release runs stock (twice), patched, and patched with all detectors on.
With --steps a single decode step is measured on each release: patched as by default and observed, each engine against
itself without the plugin's wrappers (`measuring/engine_steps.py`).

The most important cases come first; --limit ends in time. Exit code 1 if nothing was measured, 2 if nothing could be.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape

from measuring import console, table
from measuring.engine_cases import CASES, REHEARSAL, SIZES
from measuring.engine_figures import Figures, is_measured, markdown, notes, tables
from measuring.engine_plot import svg
from measuring.engine_run import RESULT, Benchmark
from measuring.engine_steps import STEPS, is_step, step_notes, step_table
from vllm_graphfix.source.files import SourceError
from vllm_graphfix.verify import VerifyError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", action="append", default=[], metavar="RELEASE=FOLDER", help="a vLLM; may be repeated")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"for {RESULT} and the engines' logs")
    parser.add_argument("--steps", action="store_true", help="a decode step alone, with and without wrappers")
    names = [case.name for case in (*CASES, *STEPS, *REHEARSAL)]
    parser.add_argument("--only", action="append", choices=names, help="this case; may be repeated (default: all)")
    parser.add_argument("--rounds", type=int, default=11, metavar="N", help="of turns of all engines (default: 11)")
    parser.add_argument("--detectors", metavar="RATE", help="patched with all detectors; RATE of the shadow check")
    parser.add_argument("--count", type=int, default=2000, metavar="N", help="of steps of --steps (default: 2000)")
    parser.add_argument("--starts", type=int, default=3, metavar="N", help="pairs of starts (default: 3)")
    parser.add_argument("--tokens", type=int, default=65, metavar="N", help="of each answer (default: 65)")
    parser.add_argument("--batches", default="1,8,64", help="batch sizes (default: 1,8,64)")
    parser.add_argument(
        "--limit", type=float, default=float("inf"), metavar="SECONDS", help="start nothing that would end later"
    )
    parser.add_argument("--rehearse", action="store_true", help="run this whole script on a CPU engine, without graphs")
    parser.add_argument(
        "--from", dest="read", type=Path, nargs="+", metavar="FILE", help="measure nothing; show these results"
    )
    parser.add_argument("--markdown", action="store_true", help="print the tables for a page")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the picture, as SVG")
    options = parser.parse_args()
    if options.read:
        results = [json.loads(file.read_text()) for file in options.read]
        result = results[0] | {"cases": [case for each in results for case in each["cases"]]}
    else:
        if options.out is None:
            parser.error("--out FOLDER is needed")
        options.batches = [int(batch) for batch in options.batches.split(",")]
        if max(options.batches) > max(SIZES):
            parser.error(f"graphs are captured up to batch {max(SIZES)}")
        try:
            result = Benchmark(options).run()
        except (VerifyError, SourceError, ValueError) as error:
            print(f"not run: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"interrupted; what was measured is in {options.out / RESULT}", file=sys.stderr)
            return 130
    if options.plot:
        options.plot.write_text(svg(result))
    show(result, as_markdown=options.markdown)
    return 0 if any(is_measured(case) for case in result["cases"]) else 1


def show(result: Mapping[str, Any], *, as_markdown: bool) -> None:
    device = result["device"]
    facts = (
        f"{device['name']}, driver {device['driver']}, torch {device['torch']}, "
        f"vllm-graphfix {result['graphfix']}, {result['date']}"
    )
    out = console()
    out.print(f"{facts}\n{result['machine']}", highlight=False)
    steps = [case for case in result["cases"] if is_step(case)]
    for case in [*steps[:1], *(case for case in result["cases"] if case not in steps)]:
        for figures in [step_table(steps)] if is_step(case) else tables(case):
            if as_markdown:
                print(f"\n{markdown(figures)}")
            else:
                out.print()
                out.print(_rich(figures))
    for case in result["cases"]:
        print(f"\n{case['title']}:")
        for note in [*notes(case), *(step_notes(case) if is_step(case) else ())]:
            print(f"  {note}")


def _rich(figures: Figures) -> Any:
    made = table(figures.title, *figures.columns)
    made.columns[1].justify = "left"
    for row in figures.rows:
        cells = [escape(cell) for cell in row]
        made.add_row(*(f"[bold red]{cell}[/]" if cell == "not met" else cell for cell in cells))
    return made


if __name__ == "__main__":
    sys.exit(main())
