"""One data-parallel rank with a front-end of its own, in a process of its own: of an engine whose ranks come and go.

    python elastic_rank.py DESCRIPTOR

A stock vLLM takes ranks in and out by itself with Ray alone; without, whoever starts the ranks asks each of them for
the same change. The first answer is that vLLM is imported; then each ``{"do": …}`` is answered with what
`_done` returns.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from typing import Any

_BEST = 5
_REPLAYS = [0]
"""How often this process has replayed a graph since it was first asked."""


def serve(parent: Any, order: dict[str, Any]) -> None:
    asyncio.run(_serve(parent, order))


async def _serve(parent: Any, _: dict[str, Any]) -> None:
    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401 - before it is asked to start: imports take long

    parent.send({"vllm": vllm.__version__})
    engine: Any = None
    while True:
        # The engine's own tasks go on meanwhile.
        asked = parent.recv() if engine is None else await asyncio.to_thread(parent.recv)
        if asked["do"] == "start":
            from measuring.data_parallel import started

            began = time.monotonic()
            engine = started(asked["arguments"])
            parent.send({"seconds": round(time.monotonic() - began, 1)})
        else:
            parent.send(await _done(engine, **asked))


async def _done(engine: Any, do: str, **asked: Any) -> Any:
    """Answers to prompts; seconds of a change; or what a method of the worker returns."""
    if do == "ask":
        batches = [[each] for each in asked["prompts"]] if asked["alone"] else [asked["prompts"]]
        found = []
        for number, prompts in enumerate(batches):
            each = (
                _answer(engine, f"{asked['name']}-{number}-{row}", prompt, asked["tokens"])
                for row, prompt in enumerate(prompts)
            )
            found += await asyncio.gather(*each)
        return found
    if do == "scale":
        began = time.monotonic()
        await engine.scale_elastic_ep(asked["ranks"])
        return {"seconds": round(time.monotonic() - began, 1)}
    return (await engine.collective_rpc(asked["method"]))[0]


async def _answer(engine: Any, name: str, prompt: list[int], tokens: int) -> Any:
    """The tokens of the answer, and at each position the best ones, each with its log-probability."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=_BEST)
    last = None
    async for output in engine.generate({"prompt_token_ids": prompt}, sampling, name):
        last = output
    if last is None:
        raise RuntimeError(f"no answer to {name}")
    (answer,) = last.outputs
    best = [[(token, each.logprob) for token, each in top.items()] for top in answer.logprobs or ()]
    return list(answer.token_ids), best


class Observed:
    """vLLM's `worker_extension_cls`: what the worker is asked for."""

    model_runner: Any
    vllm_config: Any
    _lay: dict[str, int] | None = None

    def observed(self) -> dict[str, Any]:
        """Replays so far, parameters and buffers that lie elsewhere than last time, and what the plugin says."""
        import sys

        import torch

        model, parallel = self.model_runner.get_model(), self.vllm_config.parallel_config
        lie = {name: each.data_ptr() for name, each in (*model.named_parameters(), *model.named_buffers())}
        if self._lay is None:
            _count_replays(torch.cuda.CUDAGraph)
            self._lay = lie
        elsewhere = [name for name, pointer in lie.items() if self._lay.get(name) != pointer]
        self._lay = lie
        experts = {type(each).__name__ for each in model.modules() if "Experts" in type(each).__name__}
        found = {
            "rank": parallel.data_parallel_rank,
            "ranks": parallel.data_parallel_size,
            "redundant experts": parallel.eplb_config.num_redundant_experts,
            "runner": type(self.model_runner).__module__,
            "experts": sorted(experts),
            "replays": _REPLAYS[0],
            "weights": len(lie),
            "elsewhere": elsewhere[:5] + [f"and {len(elsewhere) - 5} more"] * (len(elsewhere) > 5),
        }
        if "vllm_graphfix" in sys.modules:
            found |= _of_the_plugin()
        return found

    def scatter_weights(self) -> int:
        """Gives each weight, but for those of experts, memory of its own, and wipes what it had; returns how many.

        Those of experts are known by their addresses to the ranks' exchange of experts, too, which is not asked here.
        """
        import torch

        moved = 0
        with torch.inference_mode():
            for name, parameter in self.model_runner.get_model().named_parameters():
                if "experts" not in name:
                    old = parameter.data
                    parameter.data = old.clone()
                    old.zero_()
                    moved += 1
            torch.cuda.synchronize()
        return moved


def _count_replays(graph: Any) -> None:
    replay = graph.replay

    def counted(self: Any) -> None:
        _REPLAYS[0] += 1
        replay(self)

    graph.replay = counted


def _of_the_plugin() -> dict[str, Any]:
    from vllm_graphfix import _this_process, events

    watch = _this_process().component("addresses").watch.of_rank
    taken = watch._inventory if watch is not None else None
    moved = sorted(watch._moved.items()) if watch is not None else []
    return {
        "addresses": len(taken.entries) if taken is not None else None,
        "events": events().get("addresses", {}),
        "moved": [f"{name}: {what.outcome}, after {what.after}" for name, what in moved],
    }


if __name__ == "__main__":
    importlib.import_module("asked_engine").begin(serve, above=True)
