"""An engine in a process of its own, under the load of many users until the shadow check has made enough checks.

    python shadow_load.py DESCRIPTOR

Like `engine_worker.py`; each request ``{"checks": …, "seconds": …, "seed": …, "adapters": …}`` is answered with the
result of `_load`.
"""

from __future__ import annotations

import importlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

    from vllm_graphfix.shadow.runs import CheckedStep
    from vllm_graphfix.shadow.verdict import Mismatch

_MOST = 12
"""The most requests at a time: more than a batch has, so that some wait."""
_CHANGE = 0.02
"""The share of steps after which the number of requests changes."""
_ABORT = 0.01
"""The share of steps after which a request is aborted."""


def serve(parent: Any, order: dict[str, Any]) -> None:
    import vllm_graphfix

    _count_graphs()
    vllm_graphfix.register()  # where it lies on the path only, there is no entry point to find it by
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    arguments = dict(order["arguments"])
    arguments |= {
        name: value for name, value in order["where_known"].items() if name in EngineArgs.__dataclass_fields__
    }
    llm = LLM(**arguments)
    parent.send(time.monotonic())  # one clock for all processes of a machine
    parent.send({name: state.state.value for name, state in vllm_graphfix.states().items()})
    while True:
        parent.send(_load(llm, **parent.recv()))


def _load(llm: LLM, checks: int, seconds: float, seed: int, adapters: Sequence[str]) -> dict[str, Any]:
    """Run requests of all lengths, some of which are aborted, until *checks* were made or *seconds* are over.

    Their adapters take turns: none, the first of the folders *adapters*, and so on. Where the model takes images, every
    other request begins with one.
    """
    from vllm.lora.request import LoRARequest

    from vllm_graphfix.shadow import process

    shadow = process.SHADOW if llm.llm_engine.vllm_config.parallel_config.world_size == 1 else None
    chance = random.Random(seed)  # noqa: S311 - the same load in every run
    engine = llm.llm_engine
    vocabulary = range(1, engine.model_config.get_vocab_size())
    turns = [None, *(LoRARequest(folder, number, folder) for number, folder in enumerate(adapters, 1))]
    image = getattr(engine.model_config.hf_config, "image_token_id", None)
    running: set[str] = set()
    begun, made, aborted, steps, wanted = time.monotonic(), 0, 0, 0, _MOST
    while time.monotonic() - begun < seconds and (
        shadow is None or (shadow.stopped is None and shadow.results.checks < checks)
    ):
        if chance.random() < _CHANGE:
            wanted = chance.randint(1, _MOST)
        while len(running) < wanted:
            name = f"{seed}-{made}"
            prompt = chance.choices(vocabulary, k=chance.choice((1, 2, 7, 64, 250, 500, 500, 700)))
            adapter = turns[made % len(turns)]
            inputs: Any = {"prompt_token_ids": prompt}
            if image is not None and made % 2:
                prompt.insert(0, image)
                inputs["multi_modal_data"] = {"image": _drawn(chance)}
            engine.add_request(name, inputs, _sampling(chance), lora_request=adapter)
            running.add(name)
            made += 1
        running.difference_update(output.request_id for output in engine.step() if output.finished)
        steps += 1
        if running and chance.random() < _ABORT:
            name = chance.choice(sorted(running))
            engine.abort_request([name])
            running.discard(name)
            aborted += 1
    taken = time.monotonic() - begun
    engine.abort_request(sorted(running))
    counted = {"seconds": round(taken, 1), "steps": steps, "requests": made, "aborted": aborted, **_counted(llm)}
    if shadow is not None:
        return {**counted, **_counts(taken)}
    return {**counted, "ranks": llm.collective_rpc(_counts_of_a_worker, args=(taken,))}


def _drawn(chance: random.Random) -> Any:
    from PIL import Image

    side = chance.choice((64, 128, 192, 256))
    return Image.frombytes("RGB", (side, side), chance.randbytes(3 * side * side))


_CHECKED: Counter[str] = Counter()
"""Steps of this process that came to a judgement, by kind of graph."""


def _count_graphs() -> None:
    from vllm_graphfix.shadow.judge import Judge

    judge = Judge.judge

    def counting(self: Judge, checked: CheckedStep, *rest: Any) -> Mismatch | None:
        _CHECKED[checked.step.graph.name.partition(",")[0]] += 1
        return judge(self, checked, *rest)

    Judge.judge = counting  # type: ignore[method-assign, assignment]


def _counts_of_a_worker(_: Any, taken: float) -> dict[str, Any]:
    return _counts(taken)


def _counts(taken: float) -> dict[str, Any]:
    """Return the results of this process's check after *taken* seconds."""
    import vllm_graphfix
    from vllm_graphfix.fixes import BY_NAME
    from vllm_graphfix.shadow import process

    shadow = process.SHADOW
    if shadow is None:
        return {}
    results = shadow.results
    return {
        "checks": results.checks,
        "by kind of graph": dict(_CHECKED),
        "mismatches": results.mismatches,
        "quarantined": [graph.name for graph in results.quarantined],
        "left out": results.skipped,
        "stopped": shadow.stopped,
        "refused": process.REFUSED,
        "noise": results.noise,
        "changed inputs": sorted(results.changed_inputs),
        "milliseconds a check": round(1000 * results.seconds / max(1, results.checks), 2),
        "share of the other time": results.seconds / max(1e-9, taken - results.seconds),
        "steps": shadow.schedule.step,
        "last steps checked": list(results.steps),
        "other detectors": {
            name: counts for name, counts in vllm_graphfix.events().items() if name not in (*BY_NAME, process.NAME)
        },
        "wrong": [f"{each.sentence()} First layer: {each.first_layer}" for each in results.to_report(5)],
    }


def _sampling(chance: random.Random) -> Any:
    from vllm import SamplingParams

    drawn: dict[str, Any] = {"temperature": 0.0}
    if chance.random() < 0.5:
        drawn = {"temperature": 0.8, "seed": chance.choice((None, 11))}
    return SamplingParams(max_tokens=chance.randint(1, 160), ignore_eos=True, detokenize=False, **drawn)


def _counted(llm: LLM) -> dict[str, int]:
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    names = {
        "preempted": "vllm:num_preemptions",
        "drafts": "vllm:spec_decode_num_draft_tokens",
        "accepted": "vllm:spec_decode_num_accepted_tokens",
    }
    return {ours: int(values[theirs]) for ours, theirs in names.items() if theirs in values}


if __name__ == "__main__":
    importlib.import_module("asked_engine").begin(serve)
