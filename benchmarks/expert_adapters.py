"""Adapters of a mixture's experts under CUDA graphs, against the same engine without: stock vLLM, on one GPU.

    python benchmarks/expert_adapters.py --out FOLDER [--model nemotron-h] [--cases few] [--runners V1] …

It asks whether vLLM issue 40038 can be seen: an illegal memory access, or wrong tokens, where some requests of a batch
have an adapter of the experts' matrices and some have none. It runs on the installed vLLM, or the one on the Python
path, with a tiny Mixtral, or a tiny Nemotron-H, whose experts have no gate, and four adapters: two of attention and
experts, one of experts alone, one of attention alone.

one    One slot for the four adapters, as the issue has it: a batch has requests of one of them and of none.
few    Two slots, so that adapters are swapped beside others.

Each case has engines of these forms, on each model runner. All answer the same batches, --rounds times.

eager      without graphs or compilation
piecewise  piecewise graphs, with vLLM's compiler leaving each piece as it is; right is what `eager` answers
full       full graphs of decode steps, nothing compiled; right is what `eager` answers

A line of JSON for each engine once it can be judged; result.json holds them all and is written after each. Engines run
side by side, --parallel at a time, each with --timeout seconds. Exit code 1 if an engine died or an answer is corrupt:
beyond rounding, and not at a tie. 2 if no engine came to its end or none with graphs could be compared; if one of them
replayed none; if an engine without graphs differs from itself too much to judge others, or no adapter changes what it
answers. A round is compared with the same round: which slot an adapter has, and after what, is then the same, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from measuring import PROJECT, tiny_recurrent

sys.path.append(str(PROJECT))

from vllm_graphfix.verify import comparison
from vllm_graphfix.verify.comparison import Answer, Kind
from vllm_graphfix.verify.engine import adapters, models, processes
from vllm_graphfix.verify.engine.models import VOCABULARY

ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"
ADAPTERS = {"both": (True, True), "both-2": (True, True), "experts": (False, True), "attention": (True, False)}
"""Whether an adapter has matrices of attention, and of experts."""


class Model(NamedTuple):
    config: models.Config
    shapes: Callable[[models.Config], models.Shapes]
    experts: tuple[str, ...]
    """Names of an expert's matrices."""

    def modules(self, name: str) -> tuple[str, ...]:
        """What the adapter *name* is of."""
        of_attention, of_experts = ADAPTERS[name]
        return ATTENTION * of_attention + self.experts * of_experts


MODELS = {
    # Sums of 512 inputs are two parts in a kernel of an adapter, which are the same in any order (see `adapters`).
    "mixtral": Model(models.MIXTRAL | {"intermediate_size": 512}, models.MODELS["mixtral"][1], ("w1", "w2", "w3")),
    "nemotron-h": Model(*tiny_recurrent.MODELS["nemotron-h"], ("up_proj", "down_proj")),
}
CASES = {"one": 1, "few": 2}
"""Slots for adapters."""
_SIZES = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]}
FORMS: dict[str, tuple[dict[str, Any] | None, str | None]] = {
    "eager": (None, None),
    "piecewise": ({"mode": 3, "backend": "eager", "cudagraph_mode": "PIECEWISE"} | _SIZES, "eager"),
    "full": ({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}, "eager"),
}
"""`compilation_config` of each form, and the form that tells what is right."""
TOKENS, ROWS, BEST, SEED = 24, 8, 5, 7
NOISE = 0.25
"""Difference of log-probabilities between two rounds without graphs up to which others can be judged by them."""
_ENVIRONMENT = {
    "VLLM_PLUGINS": "",  # stock, wherever the plugin is installed
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, whose last error is the engine's own
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",  # engines share the machine
    "PYTHONHASHSEED": "0",  # which slot an adapter gets is decided by the order of a set
    "PYTHONUNBUFFERED": "1",
    "NO_COLOR": "1",
}
_ON_A_CPU = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class Batch(NamedTuple):
    """Requests at once: the adapter of each, or None, and how many tokens it is asked for."""

    name: str
    adapters: Sequence[str | None]
    tokens: Sequence[int]
    prompts: int
    """Batches of the same number have the same prompts."""


class Run(NamedTuple):
    case: str
    runner: str
    form: str


def batches() -> list[Batch]:
    """The first have the same prompts, without an adapter and with each: what an adapter changes is seen there."""
    both, second, experts, attention = ADAPTERS
    rows: dict[str, list[str | None]] = {f"all {name}": [name] * ROWS for name in (None, *ADAPTERS)}
    same = len(rows)
    rows |= {
        "in turns": [None, both] * 4,
        "in turns, adapter first": [both, None] * 4,
        "halves": [both] * 4 + [None] * 4,
        "one without": [both] * 7 + [None],
        "one with": [None] * 7 + [experts],
        "two adapters": [both, None, experts, None, both, experts, None, both],
        "experts beside attention": [attention, experts, None, attention],
        "all adapters": [both, None, second, experts, attention, None, second, both],
        "three": [None, both, None],  # graphs of four
        "five": [both, None, second, None, None],  # graphs of eight
        "seven": [None, None, experts, both, None, both, None],
        "two": [None, both],
        **{f"alone {name}": [name] for name in (None, *ADAPTERS)},
        "none again": [None] * ROWS,
    }
    found = [
        Batch(name, each, [TOKENS] * len(each), 0 if number < same else number)
        for number, (name, each) in enumerate(rows.items())
    ]
    # Rows that end one after the other: the last ones without an adapter, and then the last ones with.
    for name, each in (("adapters leave", [both] * 4 + [None] * 4), ("adapters stay", [None] * 4 + [both] * 4)):
        found.append(Batch(name, each, range(TOKENS - 2 * (ROWS - 1), TOKENS + 2, 2), len(found)))
    chance = random.Random(SEED)  # noqa: S311 - the same batches in every engine
    for number in range(12):  # up to 12 requests: prompts begin while others decode
        size = chance.randint(2, 12)
        each = chance.choices([None, None, *ADAPTERS], k=size)
        found.append(Batch(f"any {number}", each, chance.choices(range(4, TOKENS + 1), k=size), len(found)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for result.json and the logs")
    parser.add_argument("--model", default="mixtral", choices=list(MODELS))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--runners", nargs="+", default=["V1", "V2"], choices=["V1", "V2"])
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS), help="and what judges them")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="of all batches (4)")
    parser.add_argument("--parallel", type=int, default=6, metavar="N", help="engines at a time (6)")
    parser.add_argument("--timeout", type=float, default=200.0, metavar="S", help="of an engine (200)")
    parser.add_argument("--rehearse", action="store_true", help="a CPU engine, adapters of attention alone, no graphs")
    parser.add_argument("--engine", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        engine(**json.loads(options.engine))
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    model = MODELS[options.model]
    # Experts that all tokens go to are like any layer.
    shapes = model.shapes(model.config)
    models.save(model.config, shapes, options.out / options.model)
    for name in ADAPTERS:
        routed = {each: shape for each, shape in shapes.items() if "shared_experts" not in each}
        adapters.save(name, routed, options.out / name, ATTENTION if options.rehearse else model.modules(name))
    forms = {*options.forms, *(right for form in options.forms if (right := FORMS[form][1]))}
    # What judges others first.
    runs = [
        Run(case, runner, form)
        for form in FORMS
        if form in forms
        for case in options.cases
        for runner in options.runners
    ]
    bench = Bench(options)
    with ThreadPoolExecutor(options.parallel) as pool:
        for each in runs:
            pool.submit(bench.one, each)
    return verdict(bench.judged)


class Bench:
    """What engines have answered, and what has been made of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._lock = options, threading.Lock()
        self._found: dict[Run, dict[str, Any]] = {}
        self.judged: dict[Run, dict[str, Any]] = {}

    def one(self, run: Run) -> None:
        began = time.monotonic()
        try:
            found = self._asked(run)
        except Exception as error:  # one engine must not keep the others from their turn
            found = {"error": f"{type(error).__name__}: {error}"}
        found["seconds"] = round(time.monotonic() - began)
        with self._lock:
            self._found[run] = found
            for each in self._found.keys() - self.judged.keys():
                right = FORMS[each.form][1] or each.form
                if (reference := self._found.get(each._replace(form=right))) is not None:
                    self.judged[each] = each._asdict() | judge(self._found[each], reference)
                    print(json.dumps(self.judged[each]), flush=True)
            written = json.dumps([*self.judged.values()], indent=1)
            (self._options.out / "result.json").write_text(written)

    def _asked(self, run: Run) -> dict[str, Any]:
        """What an engine in a process of its own has answered, or its `error`."""
        out, name = self._options.out, "-".join(run)
        answers, log = out / f"{name}.answers.json", out / f"{name}.log"
        answers.unlink(missing_ok=True)
        config = FORMS[run.form][0]
        arguments: dict[str, Any] = {"compilation_config": config} if config else {"enforce_eager": True}
        if self._options.rehearse:
            arguments = {"enforce_eager": True, "lora_target_modules": ATTENTION}
        job = {"out": str(out), "answers": str(answers), "slots": CASES[run.case], "arguments": arguments}
        job |= {"rounds": self._options.rounds, "model": self._options.model}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        environment |= _ENVIRONMENT | (_ON_A_CPU if self._options.rehearse else {})
        environment |= {
            "VLLM_USE_V2_MODEL_RUNNER": "1" if run.runner == "V2" else "0",
            "VLLM_CACHE_ROOT": str(out / "cache" / name),  # engines that compile the same thing at once
        }
        with log.open("w") as written:
            process = subprocess.Popen(
                [sys.executable, __file__, "--out", str(out), "--engine", json.dumps(job)],
                env=environment,
                cwd=out,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a compiler starts processes; together they can be ended
            )
            late = None
            try:
                process.wait(self._options.timeout)
            except subprocess.TimeoutExpired:
                late = f"did not finish in {self._options.timeout:.0f} s"
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        found: dict[str, Any] = json.loads(answers.read_text()) if answers.exists() else {}
        if late or code:
            cause = processes.root_cause(log.read_text(errors="replace")) or processes.last_line(log)
            found["error"] = f"{late}; {processes.last_line(log)}" if late else f"exit code {code}: {cause}"
            found["crash"] = bool(processes.CRASH.search(found["error"]))
        return found


def judge(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """What is said of an engine whose right answers are those of *reference*, which may be itself."""
    told = {key: value for key, value in found.items() if key != "rounds"}
    if "error" in found or "error" in reference:
        return told if "error" in found else told | {"not compared": reference["error"]}
    rounds, right = ([_answers(each) for each in one["rounds"]] for one in (found, reference))
    # The first round begins with empty slots, the others with what the round before has left there.
    noise = max((comparison.noise_between(right[1], again) for again in right[2:]), default=0.0)
    if found is reference:
        first = comparison.noise_between(right[0], right[1]) if len(right) > 1 else 0.0
        return told | {"noise": str(noise), "first round": str(first), "changed by adapters": changes(right[0])}
    of_rounds = [comparison.compare(one, other, min(noise, NOISE)) for one, other in zip(right, rounds, strict=True)]
    kinds = {kind.value: sum(len(each.of(kind)) for each in of_rounds) for kind in (Kind.EQUAL, Kind.TIE, Kind.CORRUPT)}
    rows = [(batch.name, row, adapter) for batch in batches() for row, adapter in enumerate(batch.adapters)]
    corrupt = [
        {"round": number, "batch": name, "row": row, "adapter": adapter} | asdict(each) | {"kind": each.kind.value}
        for number, of_round in enumerate(of_rounds)
        for each, (name, row, adapter) in zip(of_round.judgements, rows, strict=True)
        if each.kind is Kind.CORRUPT
    ]
    told |= {"noise": str(noise), "distance": str(max(each.distance for each in of_rounds)), **kinds}
    told["tokens compared"] = f"{sum(each.compared for each in of_rounds)} of {sum(each.tokens for each in of_rounds)}"
    return told | ({"first corrupt": corrupt[:10]} if corrupt else {})


def changes(answers: Sequence[Answer]) -> dict[str, int]:
    """How many answers of the first batches each adapter has changed."""
    without = answers[:ROWS]
    found = {}
    for number, name in enumerate(ADAPTERS, 1):
        of_adapter = answers[ROWS * number : ROWS * (number + 1)]
        found[name] = sum(one.tokens != other.tokens for one, other in zip(without, of_adapter, strict=True))
    return found


def verdict(judged: dict[Run, dict[str, Any]]) -> int:
    """The exit code; see above."""
    if not any("noise" in each for each in judged.values()):
        return 2
    compared = [each for each in judged.values() if "distance" in each]
    noisy = any(float(each["noise"]) > NOISE for each in compared)
    corrupt = any(each[Kind.CORRUPT.value] and float(each["noise"]) <= NOISE for each in compared)
    if corrupt or any("error" in each for each in judged.values()):
        return 1
    unchanged = any(0 in each.get("changed by adapters", {}).values() for each in judged.values())
    return 2 if not compared or noisy or unchanged or not all(each["replays"] for each in compared) else 0


def _answers(of_round: Sequence[Any]) -> list[Answer]:
    return [
        Answer(tuple(tokens), tuple({int(token): value for token, value in best} for best in top))
        for tokens, top in of_round
    ]


def engine(out: str, answers: str, model: str, slots: int, rounds: int, arguments: dict[str, Any]) -> NoReturn:
    """One engine, in this process, which it ends; what it has answered goes to the file *answers*."""
    found: dict[str, Any] = {"at": "start", "replays": 0, "rounds": []}
    code = 1
    try:
        answer(found, Path(out), rounds, arguments | {"model": str(Path(out, model)), "max_loras": slots})
        code = 0
    except BaseException:  # an engine may end in SystemExit
        traceback.print_exc()
    Path(answers).write_text(json.dumps(found))  # how far it came is said of an engine that died, too
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what is torn down at the end of an interpreter may hang after an illegal memory access


def answer(found: dict[str, Any], out: Path, rounds: int, arguments: dict[str, Any]) -> None:
    """Starts an engine and asks it; *found* is filled on the way."""
    import torch
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    found["vllm"] = vllm.__version__
    graph: Any = torch.cuda.CUDAGraph
    replay = graph.replay

    def counted(self: Any) -> None:
        found["replays"] += 1
        replay(self)

    graph.replay = counted
    llm = LLM(
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=256,
        max_num_seqs=ROWS,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=1 << 28,  # keeps vLLM's memory profiling out of a GPU that several engines share
        gpu_memory_utilization=0.05,  # with the above, only what vLLM asks to be free at the start
        enable_lora=True,
        max_lora_rank=adapters.RANK,
        seed=0,
        **arguments,
    )
    mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    found["graphs"] = mode.name if mode is not None else "NONE"
    requests = {name: LoRARequest(name, number, str(out / name)) for number, name in enumerate(ADAPTERS, 1)}
    for number in range(rounds):
        of_round: list[Any] = []
        for batch in batches():
            found["at"] = f"round {number}, {batch.name}"
            print(found["at"])  # the log of an engine that hangs says where
            chance = random.Random(batch.prompts)  # noqa: S311 - the same prompts in every engine
            given: Any = [
                {"prompt_token_ids": chance.choices(range(1, VOCABULARY), k=chance.randint(3, 28))}
                for _ in batch.adapters
            ]
            asked = [
                SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False, logprobs=BEST)
                for most in batch.tokens
            ]
            each = [requests[name] if name else None for name in batch.adapters]
            for output in llm.generate(given, asked, use_tqdm=False, lora_request=each):
                (said,) = output.outputs
                top = [[(token, float(one.logprob)) for token, one in best.items()] for best in said.logprobs]
                of_round.append((list(said.token_ids), top))
        found["rounds"].append(of_round)
    found["at"] = "end"


if __name__ == "__main__":
    sys.exit(main())
