"""What `prefill-dispatch` leaves to stock, and what it costs there: tokens and seconds of steps, on one GPU.

    python benchmarks/prefill_dispatch_cost.py [--site RELEASE=FOLDER …] --out FOLDER [--only MODEL …]

For each release (FOLDER holds a vLLM that can run; without --site it is the installed one) the tiny models of `verify`
and of `measuring/tiny_recurrent.py` run in three engines each, which are alive at once: eager, and with full graphs
stock and patched.

First tokens: each kind of row that has the shape of a decode, alone and beside requests that decode, must be answered
as by the eager engine. A row with a state is the rest of a prompt that was cut by `long_prefill_token_threshold`: one
token is left, as on the decoding side of a disaggregated pair. Preempted rows are computed anew, and have such a rest
while they have answered in part. Then seconds: of the steps that compute such rests
alone, and of all steps of ordinary prompts, in the patched engine with and without the plugin's wrappers in turns
(`measuring/wrappers.py`). The fix counts the steps that it takes.

Exit code 1 if patched answers differ from eager ones that repeat themselves, or if steps of which the fix takes none
are slower with it by more than 1 % and by more than is noise, or an engine failed; 2 if nothing could be run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from measuring import engine_cases, machine, tiny_recurrent
from measuring.engine_cases import Configuration, Site, find_sites
from measuring.engine_process import DiedError, EngineProcess, Order, Ready
from measuring.wrappers import ORDER, Ratio, judged
from vllm_graphfix import __version__, manifest
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.source.files import SourceError, open_source
from vllm_graphfix.verify import VerifyError
from vllm_graphfix.verify.engine import cases, models, processes
from vllm_graphfix.verify.engine import device as devices

LOAD = Path(__file__).parent / "measuring" / "dispatch_load.py"
START_TIMEOUT, TURN_TIMEOUT = 300.0, 400.0
"""Triton compiles the kernels of delta attention (Kimi Linear) at the first prompt, not while an engine starts."""
TARGET = 0.99
"""The speed of steps with the wrappers, relative to those without, where the fix takes none of them."""
THRESHOLD, BATCH, VOCABULARY = 16, 8, range(1, models.VOCABULARY)
ENGINES = ("eager", "stock", "patched")
MODELS: Mapping[str, cases.Case] = {
    "mamba2": cases.MAMBA2_ONE_TOKEN,
    "lfm2": cases.LFM2_ONE_TOKEN,
    "gdn": replace(
        cases.GDN_MTP,
        name="gdn",
        arguments={name: value for name, value in cases.GDN_MTP.arguments.items() if name != "speculative_config"},
    ),
    "gdn-mtp": cases.GDN_MTP,
    **{name: replace(cases.MAMBA2_ONE_TOKEN, name=name, model=name) for name in tiny_recurrent.MODELS},
    # On V1 graphs are captured before FlashKDA asks for its workspace, which may not grow then.
    "kimi-k3": replace(
        cases.MAMBA2_ONE_TOKEN,
        name="kimi-k3",
        model="kimi-k3",
        arguments={"additional_config": {"kda_prefill_backend": "triton"}},
    ),
    "llama": replace(cases.MAMBA2_ONE_TOKEN, name="llama", model="llama"),
}
WITHOUT_ATTENTION = ("mamba2", "mamba1")
BY_DEFAULT = ("mamba2", "lfm2")
"""Triton compiles the kernels of gated delta nets for minutes."""


def lengths(decode: int) -> dict[str, int]:
    """Tokens of the prompts of each kind, where a decode has *decode*."""
    found = {"first prompt": decode, "rest with a state": THRESHOLD + decode, "preempted": 9, "ordinary": 40}
    # Beside decodes, releases from 0.25.0 on fill the step of such a row up with placeholders for drafts.
    return found | ({"prompt of one token": 1, "rest of one token": THRESHOLD + 1} if decode > 1 else {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", action="append", default=[], metavar="RELEASE=FOLDER", help="a vLLM; may be repeated")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for result.json and engines' logs")
    parser.add_argument("--only", action="append", choices=sorted(MODELS), help=f"default: {', '.join(BY_DEFAULT)}")
    parser.add_argument("--runner", action="append", choices=("V1", "V2"), help="default: V1, and V2 where it has it")
    parser.add_argument("--rounds", type=int, default=100, metavar="N", help="of four turns each (100)")
    parser.add_argument("--rehearse", action="store_true", help="run this whole script on a CPU engine, without graphs")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        sites = find_sites(options.site)
        device = "CPU engine, rehearsal" if options.rehearse else devices.find().name
        if device is None:
            raise VerifyError("no GPU; --rehearse runs this script on a CPU engine")
    except (VerifyError, SourceError, ValueError) as error:
        print(f"not run: {error}", file=sys.stderr)
        return 2
    result: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "graphfix": __version__,
        "device": device,
        "machine": machine(),
        "command": sys.argv[1:],
        "cases": [],
    }
    names = ["llama"] if options.rehearse else options.only or BY_DEFAULT
    for name in {MODELS[name].model for name in names}:
        _write(name, options.out / "models")
    with processes.terminated_like_interrupted():
        for site in sites:
            with ExitStack() as ending:
                # All of a release start together, and are measured one after the other, once no other starts.
                begun = []
                for name in names:
                    for runner in _runners(site, name, options):
                        own = ending.enter_context(ExitStack())
                        begun.append((name, runner, own, _engines(site, sites, name, runner, options, own)))
                started = [(*each, _ready(each[-1])) for each in begun]
                for name, runner, own, engines, ready in started:
                    with own:
                        found = measured(site, name, runner, engines, ready, options)
                    result["cases"].append(found)
                    (options.out / "result.json").write_text(json.dumps(result, indent=1))
                    print(json.dumps(_short(found)), file=sys.stderr)
    judged = [case.get("verdict", "not run") for case in result["cases"]]
    return 2 if set(judged) <= {"not run"} else int(set(judged) != {"right"})


def _write(name: str, folder: Path) -> Path:
    return tiny_recurrent.write(name, folder) if name in tiny_recurrent.MODELS else models.write(name, folder)


def _runners(site: Site, name: str, options: argparse.Namespace) -> Sequence[str]:
    """V2 where its dispatch goes by the shape, and it takes such models: hybrids."""
    if options.rehearse:
        return ("V1",)
    source = open_source(site.folder)
    from vllm_graphfix.fixes.prefill_dispatch import _v2_serves_them_wrong

    offered = ["V1", *(["V2"] if name not in WITHOUT_ATTENTION and _v2_serves_them_wrong(source) else [])]
    return [runner for runner in offered if runner in (options.runner or offered)]


def _engines(
    site: Site, sites: Sequence[Site], name: str, runner: str, options: argparse.Namespace, ending: ExitStack
) -> dict[str, EngineProcess]:
    engines = {}
    for engine in ENGINES:
        engines[engine] = _engine(site, sites, MODELS[name], engine, runner, options)
        ending.callback(engines[engine].end)
    return engines


def _ready(engines: Mapping[str, EngineProcess]) -> dict[str, Ready] | DiedError:
    try:
        return {engine: each.ready(START_TIMEOUT) for engine, each in engines.items()}
    except DiedError as error:
        return error


def measured(
    site: Site,
    name: str,
    runner: str,
    engines: Mapping[str, EngineProcess],
    ready: dict[str, Ready] | DiedError,
    options: argparse.Namespace,
) -> dict[str, Any]:
    decode, begun = 1 + _drafts(MODELS[name]), time.monotonic()
    diagnosis = manifest.diagnose(BY_NAME["prefill-dispatch"], open_source(site.folder))
    found: dict[str, Any] = {"release": site.release, "model": name, "runner": runner, "shape": diagnosis.shape}
    if isinstance(ready, DiedError):
        return found | {"failure": f"did not start: {ready}"}
    found["engines"] = {engine: each.told for engine, each in ready.items()}
    found["started_in"] = {engine: round(each.seconds, 1) for engine, each in ready.items()}
    try:
        found["tokens"] = _tokens(engines, decode)
        found["steps"] = _steps(engines["patched"], decode, options.rounds)
    except DiedError as error:
        return found | {"failure": str(error)}
    return found | {
        "verdict": verdict(found["tokens"], {} if options.rehearse else found["steps"]),
        "seconds": round(time.monotonic() - begun),
    }


def verdict(tokens: Mapping[str, Any], steps: Mapping[str, Any]) -> str:
    """``wrong``: patched answers are not eager ones that repeat themselves, or steps that the fix leaves are slower."""
    wrong = any(each["eager repeats"] and not each["patched"] for each in tokens.values())
    slow = any(not each["taken"] and each["judged"] == "not met" for each in steps.values())
    return "wrong" if wrong or slow else "right"


def _drafts(case: cases.Case) -> int:
    return int(case.arguments.get("speculative_config", {}).get("num_speculative_tokens", 0))


def _engine(
    site: Site, sites: Sequence[Site], case: cases.Case, engine: str, runner: str, options: argparse.Namespace
) -> EngineProcess:
    patched = engine == "patched"
    like = engine_cases.Case(
        name=case.name,
        title="",
        fixes=(),
        wrong="",
        model={},
        runner=runner,
        arguments={},
        capability=None,
        gib=0,
        environment={"VLLM_CPU_KVCACHE_SPACE": "1"} if options.rehearse else {"VLLM_USE_FLASHINFER_SAMPLER": "0"},
    )
    decode = 1 + _drafts(case)
    graphs = cases.full_decodes([decode * rows for rows in range(1, 2 * BATCH + 1)])
    arguments: dict[str, Any] = {
        "model": str(options.out / "models" / case.model),
        "skip_tokenizer_init": True,
        "max_model_len": 256 if options.rehearse else 1024,
        "max_num_seqs": 2 * BATCH,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "long_prefill_token_threshold": THRESHOLD,
        "seed": 0,
    }
    if options.rehearse:
        arguments["block_size"] = 16
    else:
        arguments |= {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.05}
    arguments |= case.arguments
    eager = engine == "eager" or options.rehearse
    arguments |= {"enforce_eager": True} if eager else {"compilation_config": graphs}
    name = f"{site.release}-{case.name}-{runner}-{engine}"
    return EngineProcess(
        Order(
            arguments=arguments,
            plugin=patched,
            runner=runner,
            largest_batch=BATCH,
            # A step ends where it is timed.
            where_known={**case.where_known, "async_scheduling": False},
        ),
        Configuration(engine, "", site, None, plugin=patched).environment(like, sites, options.out / f"cache-{name}"),
        options.out / f"{name}.log",
        LOAD,
    )


# -- tokens


def _tokens(engines: Mapping[str, EngineProcess], decode: int) -> dict[str, Any]:
    """By kind of row, alone and beside others: whose answers are an eager engine's."""
    found = {}
    for kind, length in lengths(decode).items():
        for others in (0, 3):
            asked = {"prompts": _prompts(BATCH, length), "tokens": 24, "meanwhile": _prompts(others, 9)}
            if kind == "preempted":  # with a rest of one token when they are computed anew, without drafts
                asked["preempted_at"] = THRESHOLD + 1 - length
            first, again = (engines["eager"].ask(asked, TURN_TIMEOUT)["answers"] for _ in range(2))
            answered = {name: engines[name].ask(asked, TURN_TIMEOUT) for name in ("stock", "patched")}
            found[f"{kind}{', beside decodes' if others else ''}"] = {
                "eager repeats": first == again,
                "stock": answered["stock"]["answers"] == first,
                "patched": answered["patched"]["answers"] == first,
                "taken": answered["patched"]["taken"],
            }
    return found


def _prompts(count: int, length: int) -> list[list[int]]:
    chance = random.Random(1000 * length + count)  # noqa: S311 - the same prompts in every engine
    return [chance.choices(VOCABULARY, k=length) for _ in range(count)]


# -- seconds


def _steps(engine: EngineProcess, decode: int, rounds: int) -> dict[str, Any]:
    """Steps a second under each load, and how fast they are with the wrappers, relative to without."""
    size = lengths(decode)
    loads = {
        # The first step computes all but the rests, the second the rests, and both sample nothing else.
        "rests with a state": (_prompts(BATCH, size["rest with a state"]), 1, slice(1, 2)),
        "ordinary prompts": (_prompts(BATCH, size["ordinary"]), 8, slice(None)),
    }
    found = {}
    for load, (prompts, tokens, timed) in loads.items():
        asked = {"prompts": prompts, "tokens": tokens, "meanwhile": [], "times": len(ORDER) * rounds}
        measured: dict[str, Any] = {}
        for name in ("control", "compared"):
            engine.ask(asked | {"times": len(ORDER), "in_turns": name}, TURN_TIMEOUT)  # does not count
            answer = engine.ask(asked | {"in_turns": name}, TURN_TIMEOUT)
            turns = [turn[timed] for turn in answer["seconds"]]
            if not all(turns):
                raise DiedError(f"{load}: computed in {len(answer['seconds'][0])} steps a turn")
            measured |= {name: Ratio.of(map(sum, turns)), "taken": answer["taken"], "steps": sum(map(len, turns))}
            measured["milliseconds"] = round(1e3 * statistics.median(each for turn in turns for each in turn), 3)
        found[load] = measured | {"judged": judged([measured["compared"]], TARGET)}
    return found


def _short(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in ("engines", "started_in")}


if __name__ == "__main__":
    sys.exit(main())
