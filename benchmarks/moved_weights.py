"""Weights that move under graphs, with real engines: what stock answers, what is told, and what a repair makes of it.

It runs on the installed vLLM, or the one on the Python path, and one GPU.

    python benchmarks/moved_weights.py --out FOLDER [--models mla-fp8 llama-fp8 llama] [--part PART …] [--eager]

For each model two sets of weights, A and B, and for each part one engine on A with full graphs for each of
VLLM_GRAPHFIX_ADDRESSES `off`, `report`, `repair`. It gets weights, one way after the other, and is asked the same
prompts after each:

weights  `official`: B by `collective_rpc("reload_weights")`; `official again`: A;
         `load and process`: B by `model.load_weights` and `process_weights_after_loading`, as programs for RL do it;
         `elsewhere`: A the same way, after each parameter got memory of its own (`parameter.data = tensor`)
sleep    `asleep and awake`: level 1, by which weights go to the host and come back;
         `asleep, loaded anew`: level 2, by which they are lost: the weights wake up, B by `reload_weights`, the cache
adapter  `an adapter`, `another adapter`: one more by `add_lora`, which no prompt asks for; a Llama that is not
         quantised alone

--layers makes the models as deep as large ones, so that a `comparison` has as many addresses to compare.

Right is what a fresh engine on those weights answers, token by token. What a release cannot load again is `failed`.
Engines run side by side, a process each.

Exit code 1 if a repaired engine gives another token, or a report has named nothing where stock gives one; 2 if an
engine has not come to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measuring import engine_answer
from vllm_graphfix.verify.engine import adapters, models
from vllm_graphfix.verify.engine.models import VOCABULARY

MODES = ("off", "report", "repair")
MODELS = {"mla-fp8": "mla", "llama-fp8": "llama", "llama": "llama", "mla": "mla"}
"""Name here, and that of the model that it is made from; fp8 as DeepSeek's checkpoints have it, in blocks."""
BEFORE = ("before", "a", "")
PARTS = {
    "weights": (
        BEFORE,
        ("official", "b", "reload"),
        ("official again", "a", "reload"),
        ("load and process", "b", "load"),
        ("elsewhere", "a", "move and load"),
    ),
    "sleep": (BEFORE, ("asleep and awake", "a", "sleep"), ("asleep, loaded anew", "b", "sleep and reload")),
    "adapter": (BEFORE, ("an adapter", "a", "adapter"), ("another adapter", "a", "adapter")),
}
"""What each way is called, the weights that are right after it, and what is done (`updated`)."""
ARGUMENTS: dict[str, dict[str, Any]] = {
    "weights": {},
    "sleep": {"enable_sleep_mode": True},
    "adapter": {"enable_lora": True, "max_loras": len(adapters.NAMES), "max_lora_rank": adapters.RANK},
}
PROMPTS, PROMPT, ANSWER, BLOCK = 8, 24, 24, 128
TIMEOUT = 240.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for result.json and the logs")
    parser.add_argument("--models", nargs="+", default=["mla-fp8", "llama-fp8", "llama"], choices=list(MODELS))
    parser.add_argument("--part", action="append", choices=list(PARTS), help="weights, if none is named")
    parser.add_argument("--layers", type=int, metavar="N", help="of each model, in place of two or three")
    parser.add_argument("--jobs", type=int, default=4, help="engines side by side")
    parser.add_argument("--eager", action="store_true", help="without graphs, to rehearse it where there is no GPU")
    parser.add_argument("--engine", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        print(json.dumps(engine(**json.loads(options.engine))), flush=True)
        return 0
    out, began = options.out.resolve(), time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        write_both(name, out, options.layers)
    if "adapter" in (options.part or ()):
        for name in adapters.NAMES:
            models.write(name, out)
    parts = [
        (name, part)
        for name in options.models
        for part in options.part or ["weights"]
        if part != "adapter" or name == "llama"
    ]
    runs = [(name, "", letter) for name in options.models for letter in "ab"]
    runs += [(name, part, mode) for name, part in parts for mode in MODES]
    with ThreadPoolExecutor(options.jobs) as pool:
        pending = {run: pool.submit(told, *run, out, eager=options.eager) for run in runs}
    done = {run: future.result() for run, future in pending.items()}
    result: dict[str, Any] = {}
    for name, part in parts:
        a, b = (done[name, "", letter] for letter in "ab")
        of_modes = {mode: judged(done[name, part, mode], a, b, part) for mode in MODES}
        result.setdefault(name, {})[part] = of_modes
    (out / "result.json").write_text(
        json.dumps({"seconds": round(time.monotonic() - began), "models": result}, indent=1)
    )
    print((out / "result.json").read_text())
    return verdict(result)


def verdict(result: dict[str, dict[str, Any]]) -> int:
    found = [(part, each) for of_model in result.values() for part, each in of_model.items()]
    if not found or any("error" in each[mode] for _, each in found for mode in MODES):
        return 2
    bad = False
    for part, each in found:
        for way, *_ in PARTS[part]:
            if any("failed" in each[mode][way] for mode in MODES):
                continue
            wrong = {mode: each[mode][way]["wrong tokens"] for mode in MODES}
            bad |= wrong["repair"] > 0 or (wrong["off"] > 0 and not each["report"][way]["moved"])
    return int(bad)


def judged(found: dict[str, Any], a: dict[str, Any], b: dict[str, Any], part: str = "weights") -> dict[str, Any]:
    """What one engine did in each way, against fresh engines on these weights."""
    for each in (found, a, b):
        if "error" in each:
            return {"error": each["error"]}
    right = {"a": a["before"]["tokens"], "b": b["before"]["tokens"]}
    of_way: dict[str, Any] = {"vllm": found["vllm"], "graphs": found["graphs"]}
    for way, weights, _ in PARTS[part]:
        if "tokens" not in found.get(way, {}):
            of_way[way] = found.get(way, {"failed": "not come to"})
            continue
        tokens = found[way].pop("tokens")
        pairs = [pair for one, two in zip(tokens, right[weights], strict=True) for pair in zip(one, two, strict=True)]
        of_way[way] = {"tokens": len(pairs), "wrong tokens": sum(one != two for one, two in pairs)} | found[way]
    return of_way


def told(name: str, part: str, what: str, out: Path, *, eager: bool) -> dict[str, Any]:
    """What an engine of its own has answered: a fresh one on A or B, or, in a *part*, one on A that is updated."""
    log = "-".join(filter(None, (name, part, what))) + ".log"
    job = {"model": str(out / f"{name}-{'b' if what == 'b' else 'a'}"), "other": str(out / f"{name}-b")}
    job |= {"part": part, "eager": eager}  # type: ignore[dict-item]
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {
        "VLLM_GRAPHFIX_ADDRESSES": what if what in MODES else "off",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_DEEP_GEMM": "0",  # it packs scales: what is loaded again has another form
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": path,
    }
    return engine_answer(__file__, job, out / log, environment, cwd=out, timeout=TIMEOUT)


def engine(model: str, other: str, part: str, eager: bool) -> dict[str, Any]:
    """One engine, in this process, updated in the ways of a *part*, if one is named."""
    import vllm
    from vllm import LLM, SamplingParams

    compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
    # A size that is given is not measured: engines that start and end beside this one would disturb that.
    graphs: Any = {"compilation_config": compilation, "kv_cache_memory_bytes": 1 << 28}
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=256,
        max_num_seqs=8,
        gpu_memory_utilization=0.05,
        worker_extension_cls="measuring.moved_weights_worker.Updates",
        **({"enforce_eager": True} if eager else graphs),
        **ARGUMENTS.get(part, {}),
    )
    chance = random.Random(5)  # noqa: S311 - the same prompts in every run
    prompts: Any = [{"prompt_token_ids": chance.choices(range(1, VOCABULARY), k=PROMPT)} for _ in range(PROMPTS)]
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    found: dict[str, Any] = {"vllm": vllm.__version__, "graphs": mode.name if mode is not None else "NONE"}
    for way, weights, how in PARTS.get(part, (BEFORE,)):
        began = time.perf_counter()
        try:
            updated(llm, how, other if weights == "b" else model, len(found))
        except Exception as error:  # a release that cannot load into what it has processed
            found[way] = {"failed": f"{type(error).__name__}: {error}"[:500]}
            break
        seconds = time.perf_counter() - began
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        (observed,) = llm.collective_rpc("observed")
        found[way] = {"tokens": [list(each.outputs[0].token_ids) for each in answers], "seconds": round(seconds, 3)}
        found[way] |= observed
    if part:
        (found["before"]["seconds of a look"],) = llm.collective_rpc("seconds_of_a_look")
        (found["before"]["comparison"],) = llm.collective_rpc("comparison")
    return found


def updated(llm: Any, how: str, folder: str, number: int) -> None:
    """Does what one way is: *how* of `PARTS`, with the weights in *folder*; *number* is another one in each way."""
    if how == "reload":
        llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    elif how in ("load", "move and load"):
        llm.collective_rpc("update", args=(folder, how == "move and load"))
    elif how == "sleep":
        llm.sleep(level=1)
        llm.wake_up()
    elif how == "sleep and reload":
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        llm.wake_up(tags=["kv_cache"])
    elif how == "adapter":
        from vllm.lora.request import LoRARequest

        name = adapters.NAMES[number % len(adapters.NAMES)]
        if not llm.llm_engine.add_lora(LoRARequest(name, number, str(Path(folder).parent / name))):
            raise RuntimeError(f"{name} was not loaded")


def write_both(name: str, out: Path, layers: int | None = None) -> None:
    """Makes the weights A and B of *name*, in folders of their own; B are A's matrices from bottom to top.

    *layers*: how many it has, if not as many as the tiny model that it is made from.
    """
    from safetensors.torch import load_file, save_file

    tiny, shapes_of = models.MODELS[MODELS[name]]
    config = tiny | ({"num_hidden_layers": layers} if layers else {})
    made = models.save(config, shapes_of(config), out / MODELS[name])
    if name.endswith("-fp8"):
        quantised = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
        config["quantization_config"] = quantised
    given = load_file(made / "model.safetensors")
    for letter in "ab":
        folder = out / f"{name}-{letter}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        tensors = {
            key: value.flip(0).contiguous() if letter == "b" and value.dim() == 2 else value
            for key, value in given.items()
        }
        if name.endswith("-fp8"):
            tensors = in_blocks(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def in_blocks(tensors: dict[str, Any]) -> dict[str, Any]:
    """These tensors as a checkpoint in fp8 has them: the matrices of layers in blocks, each with its scale."""
    import torch

    found: dict[str, Any] = {}
    largest = torch.finfo(torch.float8_e4m3fn).max
    for key, value in tensors.items():
        if value.dim() != 2 or ".layers." not in key:
            found[key] = value
            continue
        rows, columns = value.shape
        padded = torch.nn.functional.pad(value.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / largest
        quantised = (blocks / scale).flatten(2, 3).flatten(0, 1)[:rows, :columns]
        found[key] = quantised.to(torch.float8_e4m3fn).contiguous()
        found[f"{key.removesuffix('.weight')}.weight_scale_inv"] = scale[:, 0, :, 0].contiguous()
    return found


if __name__ == "__main__":
    sys.exit(main())
