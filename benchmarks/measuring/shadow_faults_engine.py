"""One engine of two ranks in a process of its own, in one of which a fault is planted, for `shadow_faults.py`.

    python shadow_faults_engine.py DESCRIPTOR

As `shadow_load.py`, but for what is asked: ``{"prompts": …, "tokens": …, "plant": null}`` is answered with
``{"answers": …, "found": …}``, what each rank has found; ``"plant": {…}`` are first the arguments of `_plant`, and the
ids of the ranks' processes are an answer of their own. An engine that has ended after that answers ``{"died": …}``, and
its process waits: whoever asks looks what is left of it.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import time
import traceback
from typing import Any


def serve(parent: Any, order: dict[str, Any]) -> int:
    import vllm_graphfix

    vllm_graphfix.register()  # where it lies on the path only, there is no entry point to find it by
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    arguments = dict(order["arguments"])
    if "moe_backend" not in EngineArgs.__dataclass_fields__:
        arguments.pop("moe_backend", None)
    llm: Any = RanksInTurn(arguments) if "data_parallel_size" in arguments else LLM(**arguments)
    parent.send(time.monotonic())
    parent.send({name: state.state.value for name, state in vllm_graphfix.states().items()})
    planted = False
    while True:
        asked = parent.recv()
        plant = asked["plant"]
        try:
            if plant is not None and plant["fault"] == "no-room":
                # NCCL allocates what two stages of a pipeline need at their first exchange: stock fails there, too.
                _answers(llm, asked)
            if plant is not None:
                parent.send(llm.collective_rpc(_plant, args=(plant,)))
                planted = True
            answers = _answers(llm, asked)
            found = llm.collective_rpc(_found) if order["plugin"] else []
        except BaseException as error:
            if not planted:
                raise
            traceback.print_exc()
            parent.send({"died": importlib.import_module("asked_engine").in_one_line(error)})
            parent.poll(60.0)
            return 1
        parent.send({"answers": answers, "found": found})


class RanksInTurn:
    """Data-parallel ranks, one of which has a request at a time; what is asked of it here is as of `vllm.LLM`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from measuring import data_parallel

        self._parallel, self._ranks = data_parallel, arguments["data_parallel_size"]
        self._loop = asyncio.new_event_loop()
        self._asked = itertools.count()
        self._engine = self._loop.run_until_complete(self._start(arguments))

    async def _start(self, arguments: dict[str, Any]) -> Any:
        return self._parallel.started(arguments)

    def collective_rpc(self, function: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        return self._loop.run_until_complete(self._parallel.on_all_ranks(self._engine, function, *args))

    def answers(self, prompts: list[list[int]], sampling: Any) -> list[list[int]]:
        async def one_by_one() -> list[list[int]]:
            return [
                await self._parallel.tokens_of(
                    self._engine, str(next(self._asked)), prompt, number % self._ranks, sampling
                )
                for number, prompt in enumerate(prompts)
            ]

        return self._loop.run_until_complete(one_by_one())


def _answers(llm: Any, asked: dict[str, Any]) -> list[list[int]]:
    """The tokens that follow each prompt; all prompts are in one step."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False)
    if isinstance(llm, RanksInTurn):
        return llm.answers(asked["prompts"], sampling)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    llm.sleep(level=0, mode="keep")  # what is in a batch decides how its sums round
    llm.enqueue(prompts, sampling, use_tqdm=False)
    llm.wake_up(tags=["scheduling"])
    return [list(each.outputs[0].token_ids) for each in llm.wait_for_completion(use_tqdm=False)]


def _plant(worker: Any, wanted: dict[str, Any]) -> int:
    """Puts the graphs of all batches of each rank into quarantine, if that is wanted, and plants the fault in one rank.

    The fault is half-way through a run without its graph.

    Half-way is before its last layer: on two ranks of one group, behind the sums of those before.
    """
    import itertools
    import pathlib
    import signal
    import subprocess
    import time

    import torch

    from vllm_graphfix.shadow import process, ranks
    from vllm_graphfix.shadow.lockstep import shape_of

    shadow = process.SHADOW
    runner = worker.model_runner
    if wanted["quarantine"] and shadow is not None:
        manager, wrapper = getattr(runner, "cudagraph_manager", None), runner.model
        found = getattr(manager, "graphs", None) or getattr(wrapper, "concrete_cudagraph_entries", {})
        owner = manager if getattr(manager, "graphs", None) else wrapper
        of_all = shadow.lockstep is not None  # then by what is the same on all ranks
        shadow.quarantined.update((id(owner), shape_of(each) if of_all else each) for each in found)
    if worker.rank + worker.vllm_config.parallel_config.data_parallel_rank != wanted["rank"]:
        return os.getpid()
    fault, folder, seconds = wanted["fault"], pathlib.Path(wanted["folder"]), wanted["seconds"]
    inside, runs, held = [False], itertools.count(1), []

    def act() -> None:
        (folder / "fault-at").write_text(str(time.time()))
        if fault == "out-of-memory":
            torch.empty(1 << 50, dtype=torch.uint8, device=worker.device)
        elif fault == "exception":
            raise ValueError("planted")
        elif fault == "slow":
            time.sleep(seconds)
        elif fault == "stopped":
            again = f"sleep {seconds}; kill -CONT {os.getpid()}"
            subprocess.Popen(["/bin/sh", "-c", again], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

    stock = ranks.paired

    def paired(prepare: Any, run: Any, seconds: Any = None) -> Any:
        def counted() -> Any:
            inside[0] = next(runs) == wanted["at"]
            try:
                return run()
            finally:
                inside[0] = False

        return stock(prepare, counted, seconds)

    def before_the_layer(*_: Any) -> None:
        if inside[0]:
            inside[0] = False
            act()

    if fault == "no-room":
        (folder / "fault-at").write_text(str(time.time()))
        torch.cuda.empty_cache()
        held.append(torch.empty(torch.cuda.mem_get_info()[0] - (200 << 20), dtype=torch.uint8, device=worker.device))
        worker.graphfix_held = held
    elif fault != "none":
        model = runner.get_model()
        layers = [module for name, module in model.named_modules() if name.rpartition(".")[0].endswith("layers")]
        own = [module for module in layers if type(module).__name__ != "PPMissingLayer"]
        own[-1].register_forward_pre_hook(before_the_layer)
        ranks.paired = paired
    return os.getpid()


def _found(_: Any) -> dict[str, Any]:
    from vllm_graphfix.shadow import process

    shadow = process.SHADOW
    if shadow is None:
        return {}
    results = shadow.results
    return {
        "checks": results.checks,
        "left out": results.skipped,
        "mismatches": results.mismatches,
        "stopped": shadow.stopped,
        "refused": process.REFUSED,
        "quarantined": len(shadow.quarantined),
        "MiB measured": {
            f"{tokens} tokens": round(need / 2**20, 2) for (_, tokens), need in shadow.memory.needs.items()
        },
    }


if __name__ == "__main__":
    importlib.import_module("asked_engine").begin(serve, above=True)
