"""Eager, stock and patched engines on a GPU, side by side: tokens equal to eager before the first difference.

    python compare.py --plugin FOLDER RELEASE=SITE …      SITE: a folder with that stock vLLM and its dependencies

Each RELEASE runs the models whose fix concerns it. Prints a table and writes every engine's log next to its tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
CASES: dict[str, list[tuple[str, dict[str, str]]]] = {
    "0.17.1": [("mla-fp8", {}), ("mla", V2)],
    "0.18.1": [("mla-fp8", {})],
    "0.19.1": [("mamba2", {}), ("mla-fp8", {"GRAPHFIX_UNEVEN": "1"})],
    "0.20.0": [("mla", V2), ("mamba2", {})],
    "0.21.0": [("mla", V2), ("mla-mtp", V2), ("mamba2", {})],
    "0.22.1": [("mla-mtp", V2)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin", required=True, help="folder with the installed plugin and wrapt")
    parser.add_argument("--out", type=Path, default=Path("gpu-out"))
    parser.add_argument("--parallel", type=int, default=6)
    parser.add_argument("sites", nargs="+", metavar="RELEASE=SITE")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    def engine(job: tuple[str, str, str, dict[str, str], str]) -> None:
        release, site, model, env, mode = job
        name = options.out / f"{release}-{model}-{mode}"
        started = time.time()
        with Path(f"{name}.log").open("w") as log:
            code = subprocess.run(
                [sys.executable, str(Path(__file__).with_name("engine_tokens.py")), model, mode, f"{name}.json"],
                env=os.environ | env | {"PYTHONPATH": f"{site}:{options.plugin}"},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=400,
                check=False,
            ).returncode
        print(f"{name.name}: exit {code}, {time.time() - started:.0f} s", flush=True)

    cases = [
        (release, site, model, env)
        for release, site in (given.split("=", 1) for given in options.sites)
        for model, env in CASES[release]
    ]
    jobs = [(*case, mode) for case in cases for mode in ("eager", "stock", "patched")]
    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(engine, jobs))
    for release, _, model, _ in cases:
        found = {}
        for mode in ("eager", "stock", "patched"):
            path = options.out / f"{release}-{model}-{mode}.json"
            found[mode] = json.loads(path.read_text()) if path.exists() else None
        print(f"{release} {model}:", "; ".join(f"{mode} {equal(found['eager'], found[mode])}" for mode in found))


def equal(eager: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    if eager is None or other is None:
        return "no result"
    same = total = 0
    for a, b in zip(eager["tokens"], other["tokens"], strict=True):
        total += len(a)
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    active = [name for name, state in other["states"].items() if state == "active"]
    given = f", given {other['given']}" if other["given"] else ""
    return f"{same} of {total} tokens equal to eager, active: {', '.join(active) or 'none'}{given}"


if __name__ == "__main__":
    main()
