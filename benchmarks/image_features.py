"""Answers of compiled code to images: a tiny Qwen3-VL with random weights, on one GPU.

    python benchmarks/image_features.py FOLDER [--train SECONDS]

FOLDER is for the model, the cache of compiled code, and the logs. The vLLM that is installed answers prompts with an
image without torch.compile (eager), as stock with its default flags, with `deepstack-features` observing, with it, and
as stock again, all with one cache. A line of JSON for each engine: seconds to start, the answers that differ from those
of eager, the largest difference of a log-probability that both gave, the state of the fix and its counts.

On 0.20.2 to 0.22.1 stock and observing have to differ by far more than rounding, and with the fix nothing may, but at
ties. The exit code is 1 if that is not so.

With --train the model first learns to name the colours of an image of 4 by 4 fields, and a line has the answers that
are right, too; eager, stock and patched alone run then. Training takes torchvision, and SECONDS at most.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measuring import trained_images
from vllm_graphfix.verify.engine import models

NAME, IMAGES, TOKENS = "qwen3-vl", 8, 8
_HIDDEN, _WIDTH, _DEPTH, _PATCH, _HEAD = 512, 128, 3, 16, 64
CONFIG: models.Config = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": models.LLAMA
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3_vl_text",
        "num_hidden_layers": 4,
        "attention_bias": False,
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [12, 10, 10]},
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": _DEPTH,
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_heads": 2,
        "out_hidden_size": _HIDDEN,
        "patch_size": _PATCH,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1],
    },
    "image_token_id": 0,
    # Behind the vocabulary: no prompt has them.
    "video_token_id": models.VOCABULARY,
    "vision_start_token_id": models.VOCABULARY + 1,
    "vision_end_token_id": models.VOCABULARY + 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
ENGINES = {"eager": "off", "stock": "off", "observe": "observe", "patched": "on", "stock again": "off"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("engine", nargs="?", choices=ENGINES, help="answer as this one alone, for this script itself")
    parser.add_argument("--train", type=float, metavar="SECONDS")
    options = parser.parse_args()
    folder, trained = options.folder.resolve(), options.train is not None
    if options.engine:
        return _answer(folder, eager=options.engine == "eager")
    write(folder)
    if trained:
        trained_images.train(folder / NAME, CONFIG, options.train)
    answers: dict[str, Any] = {}
    for name, mode in ENGINES.items():
        if trained and name not in ("eager", "stock", "patched"):
            continue
        environment = {
            "VLLM_GRAPHFIX": "on",
            "VLLM_GRAPHFIX_DEEPSTACK_FEATURES": mode,
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the states of the fixes are this process's
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "HF_HUB_OFFLINE": "1",
        }
        with (folder / f"{name}.log").open("w") as log:
            subprocess.run(
                [sys.executable, __file__, str(folder), name],
                env=os.environ | environment,
                check=True,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        result = answers[name] = json.loads((folder / "answer.json").read_text())
        result |= _compared(answers["eager"], result)
        print(json.dumps({"engine": name} | {key: value for key, value in result.items() if key != "answers"}))
    wrong = {name: result["differ"] for name, result in answers.items() if name not in ("eager", "patched")}
    return int(not all(wrong.values()) or answers["patched"]["differ"] > 1)


def _compared(eager: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    apart = [
        abs(one - other)
        for mine, its in zip(eager["answers"], result["answers"], strict=True)
        for one, other in zip(mine["logprobs"], its["logprobs"], strict=True)
    ]
    differ = sum(mine["tokens"] != its["tokens"] for mine, its in zip(eager["answers"], result["answers"], strict=True))
    return {"differ": differ, "of": len(result["answers"]), "logprobs apart": round(max(apart), 3)}


def _answer(folder: Path, *, eager: bool) -> int:
    import numpy as np
    from PIL import Image
    from vllm import LLM, SamplingParams

    import vllm_graphfix

    began = time.monotonic()
    llm = LLM(
        model=str(folder / NAME),
        enforce_eager=eager,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        limit_mm_per_prompt={"image": 1, "video": 0},
        kv_cache_memory_bytes=1 << 28,
        gpu_memory_utilization=0.1,
        enable_prefix_caching=False,
        seed=0,
    )
    started = time.monotonic() - began
    if (folder / NAME / trained_images.TRAINED).exists():
        images, colours = trained_images.images(np.random.default_rng(0), trained_images.ASKED)
        right = colours.tolist()
        prompts = [[*trained_images.BEFORE, 0, *trained_images.AFTER]] * len(images)
    else:
        images = np.random.default_rng(0).integers(0, 256, (IMAGES, 256, 256, 3), dtype=np.uint8)
        prompts, right = [[*range(1, 9 + number), 0, *range(20, 30)] for number in range(IMAGES)], []
    inputs = [
        {"prompt_token_ids": prompt, "multi_modal_data": {"image": Image.fromarray(image)}}
        for prompt, image in zip(prompts, images, strict=True)
    ]
    tokens = len(right[0]) if right else TOKENS
    sampling = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, detokenize=False, ignore_eos=True)
    # One at a time: a batch has the same shapes in each engine.
    outputs = [llm.generate([each], sampling)[0].outputs[0] for each in inputs]
    answers = [
        {
            "tokens": list(output.token_ids),
            # Of the first token alone: later ones may follow another token.
            "logprobs": [each.logprob for each in list(output.logprobs[0].values())[:1]],
        }
        for output in outputs
    ]
    state = vllm_graphfix.states()["deepstack-features"]
    result = {
        "seconds to start": round(started),
        "answers": answers,
        "right": sum(each["tokens"] == row for each, row in zip(answers, right, strict=False)),
        "state": f"{state.state.value}: {state.reason}",
        "counted": vllm_graphfix.events()["deepstack-features"],
    }
    (folder / "answer.json").write_text(json.dumps(result))
    return 0


def write(folder: Path) -> None:
    """Make the model in *folder*, with a tokenizer and an image processor; token 0 is where an image goes."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    made = models.save(CONFIG, _shapes(), folder / NAME)
    special = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    words = [special[0], *(f"w{number}" for number in range(1, models.VOCABULARY)), *special[1:]]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[1]))
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(made / "tokenizer.json"))
    processors = {
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": words[2]},
        "preprocessor_config": {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
            "patch_size": _PATCH,
            "size": {"shortest_edge": 64**2, "longest_edge": 256**2},
        },
        "video_preprocessor_config": {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "processor_class": "Qwen3VLProcessor",
            "patch_size": _PATCH,
            "size": {"shortest_edge": 64**2, "longest_edge": 256**2},
        },
    }
    for name, value in processors.items():
        (made / f"{name}.json").write_text(json.dumps(value))


def _shapes() -> models.Shapes:
    text = models.MODELS["llama"][1](CONFIG["text_config"])
    shapes = {name.replace("model.", "model.language_model.", 1): shape for name, shape in text.items()}
    for layer in range(CONFIG["text_config"]["num_hidden_layers"]):
        attention = f"model.language_model.layers.{layer}.self_attn"
        shapes |= {f"{attention}.q_norm.weight": (_HEAD,), f"{attention}.k_norm.weight": (_HEAD,)}
    visual = "model.visual"
    shapes |= _biased(f"{visual}.patch_embed.proj", _WIDTH, 3, 2, _PATCH, _PATCH)
    shapes[f"{visual}.pos_embed.weight"] = (256, _WIDTH)
    for number in range(_DEPTH):
        block = f"{visual}.blocks.{number}"
        shapes |= _biased(f"{block}.norm1", _WIDTH) | _biased(f"{block}.norm2", _WIDTH)
        shapes |= _biased(f"{block}.attn.qkv", 3 * _WIDTH, _WIDTH) | _biased(f"{block}.attn.proj", _WIDTH, _WIDTH)
        shapes |= _biased(f"{block}.mlp.linear_fc1", 2 * _WIDTH, _WIDTH)
        shapes |= _biased(f"{block}.mlp.linear_fc2", _WIDTH, 2 * _WIDTH)
    merged = 4 * _WIDTH  # patches of two by two
    mergers = {f"{visual}.merger": _WIDTH, **{f"{visual}.deepstack_merger_list.{n}": merged for n in range(2)}}
    for merger, normed in mergers.items():
        shapes |= _biased(f"{merger}.norm", normed) | _biased(f"{merger}.linear_fc1", merged, merged)
        shapes |= _biased(f"{merger}.linear_fc2", _HIDDEN, merged)
    return shapes


def _biased(name: str, *shape: int) -> models.Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


if __name__ == "__main__":
    sys.exit(main())
