"""DSpark with adaptive verification on FlashAttention 3: whether graphs answer right where a step has fewer drafts.

It runs on the installed vLLM, or the one on the Python path, and one Hopper GPU; 0.28.0 or later, model runner V2.

    python benchmarks/adaptive_verification.py --out FOLDER [--shapes "head 64" "group 16"] [--parallel N] [--timeout S]

A graph of decodes is captured with K+1 tokens a request, and replayed where the step's longest request has fewer: the
schedule of FlashAttention 3 is made for the step. A tiny Llama drafts with a tiny DSpark, both with random weights; no
draft is accepted, so that each step has one position that counts. Prompts are asked in batches of 1, 3 and 8:

uneven   answers of different lengths: most steps have all drafts
to end   to the last token that `max_model_len` allows: all requests of the last K steps have fewer drafts
cut to N `long_prefill_token_threshold` of N, which cuts decodes, too, beside other requests: N tokens in all steps

Right is what an engine without graphs and drafts answers, token by token; what it says with drafts is the noise.
`replays` counts steps, `FULL 8 1`: in a graph for 8 tokens a request, and builders told that the longest has 1. In a
graph without a limit, as all are without adaptive verification, it is 0. Engines are stock; those that are `patched`
have the plugin with the fix `adaptive-schedule` alone, whose state and events they tell in place of `replays`.

Shapes of heads, by what a kernel makes of its longest query: up to `head 64`, and beyond 128 (`head 192`, `head 256`),
it is not causal for one token; with `group 16`, and heads 128 wide, it has another tile for up to 64 rows (4 tokens);
`head 128`, as most models have them, is neither.

Exit code 1 if a patched engine gives a wrong answer, or its fix was not at work; 2 if an engine has not come to its
end, or no stock one has replayed a graph for more tokens than builders were told of.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import vllm_graphfix
from measuring import engine_answer
from vllm_graphfix.fix import variable
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.settings.environment import PREFIX
from vllm_graphfix.verify.comparison import Answer, Kind, compare, noise_between
from vllm_graphfix.verify.engine import models

FIX = "adaptive-schedule"
SHAPES = {
    "head 64": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
    "group 16": {"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 128},
    "head 128": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128},
    "head 192": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 192},
    "head 256": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
}
DRAFTS, RANK, LONGEST, PROMPT, BEST = 7, 32, 96, 40, 5
DSPARK: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "block_size": DRAFTS,
    "markov_rank": RANK,
    "mask_token_id": models.VOCABULARY - 1,
    "target_layer_ids": [0],
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
ENGINES: dict[str, dict[str, Any]] = {
    "eager": {},
    "eager, drafts": {"drafts": True},
    "fixed, piecewise": {"drafts": True, "graphs": "FULL_AND_PIECEWISE"},
    "fixed, decodes": {"drafts": True, "graphs": "FULL_DECODE_ONLY"},
    "adaptive, piecewise": {"drafts": True, "adaptive": True, "graphs": "FULL_AND_PIECEWISE"},
    "adaptive, decodes": {"drafts": True, "adaptive": True, "graphs": "FULL_DECODE_ONLY"},
    "patched, piecewise": {"drafts": True, "adaptive": True, "graphs": "FULL_AND_PIECEWISE", "patched": True},
    "patched, decodes": {"drafts": True, "adaptive": True, "graphs": "FULL_DECODE_ONLY", "patched": True},
}
ASKED = {
    f"{name}, {count}": (count, answers, cut)
    for name, answers, cut in (
        ("uneven", (48, 32, 41, 37, 44, 33, 46, 39), 0),
        ("to end", (LONGEST - PROMPT,) * 8, 0),
        ("cut to 1", (40,) * 8, 1),
        ("cut to 3", (40,) * 8, 3),
    )
    for count in ((3, 8) if cut else (1, 3, 8))
}
"""How many prompts, the tokens of their answers, and `long_prefill_token_threshold`."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for result.json, models and logs")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--parallel", type=int, default=6, help="engines side by side")
    parser.add_argument("--timeout", type=float, default=200.0, help="seconds for each engine")
    parser.add_argument("--engine", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        print(json.dumps(engine(**json.loads(options.engine))), flush=True)
        return 0
    out = options.out.resolve()
    for shape in options.shapes:
        write(shape, out)
    runs = [(shape, name) for shape in options.shapes for name in ENGINES]
    with ThreadPoolExecutor(options.parallel) as pool:
        pending = {run: pool.submit(told, *run, out, options.timeout) for run in runs}
    done = {run: future.result() for run, future in pending.items()}
    result = [
        {"shape": shape, "engine": name} | judged(done[shape, name], done[shape, "eager"], done[shape, "eager, drafts"])
        for shape, name in runs
    ]
    for each in result:
        print(json.dumps(each))
    (out / "result.json").write_text(json.dumps(result, indent=1))
    return verdict(result)


def verdict(result: list[dict[str, Any]]) -> int:
    """The exit code; see above."""
    if any("error" in each for each in result):
        return 2
    patched = [each for each in result if each["engine"].startswith("patched")]
    if any(each["wrong"] or each["state"] != "active" or not each["events"] for each in patched):
        return 1
    stock = [each for each in result if each["engine"].startswith("adaptive")]
    steps = [step.split() for each in stock for step in each["replays"]]
    return 0 if any(mode == "FULL" and int(graph) > int(longest) for mode, graph, longest in steps) else 2


def judged(found: dict[str, Any], eager: dict[str, Any], drafts: dict[str, Any]) -> dict[str, Any]:
    """What one engine said, against eager; the noise is what drafts change without graphs."""
    for each in (found, eager):
        if "error" in each:
            return {"error": each["error"]}
    drafts = eager if "error" in drafts else drafts
    asked: dict[str, Any] = {}
    for name in ASKED:
        reference, said, other = ([answer(each) for each in of["answers"][name]] for of in (eager, found, drafts))
        compared = compare(reference, said, noise_between(reference, other))
        corrupt = compared.of(Kind.CORRUPT)
        asked[name] = {"tokens": compared.tokens, "agreed": compared.agreed, "ties": len(compared.of(Kind.TIE))}
        asked[name] |= {"wrong": len(corrupt), "first wrong": [each.position for each in corrupt]}
        asked[name] |= {"distance": round(compared.distance, 4), "noise": round(compared.noise, 4)}
    rest = {key: value for key, value in found.items() if key != "answers"}
    return rest | {"wrong": sum(each["wrong"] for each in asked.values()), "asked": asked}


def answer(said: dict[str, Any]) -> Answer:
    return Answer(tuple(said["tokens"]), tuple({int(token): value for token, value in top} for top in said["top"]))


def told(shape: str, name: str, out: Path, timeout: float) -> dict[str, Any]:
    """What an engine of its own has answered."""
    log = f"{shape}-{name}.log".replace(", ", "-").replace(" ", "-")
    job = {"target": str(out / shape / "target"), "draft": str(out / shape / "dspark")} | ENGINES[name]
    patched = ENGINES[name].get("patched", False)
    environment = os.environ | {
        # An installed plugin is there for all of them: only the one that is to have it loads it.
        "VLLM_PLUGINS": "graphfix" if patched else "",
        PREFIX: "on" if patched else "off",
        **{variable(fix): "on" if fix == FIX else "off" for fix in BY_NAME},
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # to the log: the answer is on the other
        "HF_HUB_OFFLINE": "1",
    }
    return engine_answer(__file__, job, out / log, environment, cwd=Path.cwd(), timeout=timeout)


def arguments(target: str, draft: str, drafts: bool, adaptive: bool, graphs: str) -> dict[str, Any]:
    """Keywords of `vllm.LLM`."""
    # Pieces need a compiler, but not Inductor, which rounds otherwise and takes its time.
    compilation: dict[str, Any] = {"cudagraph_mode": graphs, "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 64]}
    compilation |= {"mode": 3, "backend": "eager"} if graphs == "FULL_AND_PIECEWISE" else {"mode": 0}
    speculative = {
        "method": "dspark",
        "model": draft,
        "num_speculative_tokens": DRAFTS,
        "attention_backend": "FLASH_ATTN",
        "enable_adaptive_verification": adaptive,
    }
    return {
        "model": target,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": LONGEST,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 1 << 28,  # not measured: other engines start and end beside this one
        "attention_backend": "FLASH_ATTN",
        **({"compilation_config": compilation} if graphs else {"enforce_eager": True}),
        **({"speculative_config": speculative} if drafts else {}),
    }


def engine(
    target: str, draft: str, drafts: bool = False, adaptive: bool = False, graphs: str = "", patched: bool = False
) -> dict[str, Any]:
    """One engine, in this process."""
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    # Not beside the plugin: what is patched by others, too, it does not serve with. The fix counts these steps itself.
    replays = Counter() if patched else watched()
    llm = LLM(**arguments(target, draft, drafts, adaptive, graphs))
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    chance = random.Random(5)  # noqa: S311 - the same prompts in every run
    tokens = [chance.choices(range(1, models.VOCABULARY - 1), k=PROMPT) for _ in range(8)]
    said: dict[str, list[dict[str, Any]]] = {}
    for name, (count, lengths, cut) in ASKED.items():
        scheduler.scheduler_config.long_prefill_token_threshold = cut
        prompts: Any = [{"prompt_token_ids": each} for each in tokens[:count]]
        sampling = [
            SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=BEST)
            for length in lengths[:count]
        ]
        outputs = [each.outputs[0] for each in llm.generate(prompts, sampling, use_tqdm=False)]
        said[name] = [
            {
                "tokens": list(each.token_ids),
                "top": [[(token, one.logprob) for token, one in best.items()] for best in each.logprobs or ()],
            }
            for each in outputs
        ]
    mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    found = {"vllm": vllm.__version__, "graphs": mode.name if mode is not None else "NONE"}
    if patched:
        found |= {"state": vllm_graphfix.states()[FIX].state.value, "events": vllm_graphfix.events().get(FIX, {})}
    else:
        found["replays"] = dict(replays)
    return found | {"flash attention": get_flash_attn_version(), "answers": said}


def watched() -> Counter[str]:
    """Counts what graphs a step's batch is for, and what longest query builders are told."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    counted: Counter[str] = Counter()
    stock = GPUModelRunner.prepare_inputs

    def prepare_inputs(self: Any, output: Any, state: Any, graph: Any, *rest: Any) -> Any:
        batch = stock(self, output, state, graph, *rest)
        longest = batch.max_query_len or int(batch.num_scheduled_tokens.max())
        of_graph = getattr(graph, "max_query_len", None) or 0
        counted[f"{graph.cg_mode.name} {of_graph} {longest}"] += 1
        return batch

    GPUModelRunner.prepare_inputs = prepare_inputs
    return counted


def write(shape: str, out: Path) -> None:
    """Makes the target and its DSpark, in folders of their own; embeddings and output matrix are the target's."""
    tiny, shapes_of = models.MODELS["llama"]
    target = tiny | SHAPES[shape]
    models.save(target, shapes_of(target), out / shape / "target")
    config = target | DSPARK
    hidden, head, layer = config["hidden_size"], config["head_dim"], "layers.0"
    shapes = {name.removeprefix("model."): each for name, each in shapes_of(config).items() if f".{layer}." in name}
    shapes |= {f"{layer}.self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
    shapes |= {"fc.weight": (hidden, hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    shapes |= {f"markov_head.markov_w{number}.weight": (models.VOCABULARY, RANK) for number in (1, 2)}
    shapes |= {"confidence_head.proj.weight": (1, hidden + RANK), "confidence_head.proj.bias": (1,)}
    models.save(config, shapes, out / shape / "dspark")


if __name__ == "__main__":
    sys.exit(main())
