"""One engine, in a process of its own, that answers with vectors: embeddings, or the hidden states of prompts.

    python vectors_engine.py DESCRIPTOR

It makes its model from what the order says in ``model``: the configuration, the tensors' shapes and further files.
Asked are ``{"what": "embeddings" or "hidden states", "prompts": …, "tokens": …}``, where *tokens* has the length of
each answer. Each answer has ``vectors``, for each prompt a list of its vectors, float32; and if the engine has failed
on the way, ``failed``, its error in a line.
"""

from __future__ import annotations

import importlib
import json
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
Vectors = list["array[float]"]


def serve(parent: Any, order: dict[str, Any]) -> None:
    if order["plugin"]:
        import vllm_graphfix

        vllm_graphfix.register()  # where it lies on the path only, there is no entry point to find it by
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    from vllm_graphfix.verify.engine import models

    arguments = dict(order["arguments"])
    arguments |= {
        name: value for name, value in order["where_known"].items() if name in EngineArgs.__dataclass_fields__
    }
    model = order["model"]
    folder = models.save(model["config"], model["shapes"], Path(arguments["model"]))
    for name, content in model["files"].items():
        (folder / name).write_text(json.dumps(content))
    llm = LLM(**arguments)
    parent.send(time.monotonic())  # one clock for all processes of a machine
    parent.send(_facts(llm))
    while True:
        asked = parent.recv()
        parent.send(_asked(llm, asked) | (_of_the_plugin() if order["plugin"] else {}))


def _asked(llm: LLM, asked: dict[str, Any]) -> dict[str, Any]:
    vectors: list[Vectors] = []
    answer: dict[str, Any] = {"vectors": vectors}
    try:
        if asked["what"] == "embeddings":
            _embed(llm, asked["prompts"], vectors)
        else:
            vectors += _hidden_states(llm, asked["prompts"], asked["tokens"])
    except Exception as error:  # the vectors up to here count
        line = next(iter(str(error).strip().splitlines()), "")
        answer["failed"] = f"{type(error).__name__}: {line}"
    return answer


def _embed(llm: LLM, prompts: list[list[int]], vectors: list[Vectors]) -> None:
    """One request at a time; the embedding of each is in *vectors* before the next."""
    for prompt in prompts:
        (told,) = llm.embed([{"prompt_token_ids": prompt}], use_tqdm=False)
        vectors.append([array("f", told.outputs.embedding)])


def _hidden_states(llm: LLM, prompts: list[list[int]], tokens: list[int]) -> list[Vectors]:
    """All requests together; those of a prompt's token are one vector, all layers' one after the other."""
    from vllm import SamplingParams

    def generate(prompts: list[list[int]], tokens: list[int]) -> list[Any]:
        sampling = [
            SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for count in tokens
        ]
        return list(llm.generate([{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False))

    told = generate(prompts, tokens)
    # From 0.22 on, the connector saves in the step after a request's last one: one request more has such steps.
    generate(prompts[:1], tokens[:1])
    load = _loader()
    found = []
    for prompt, each in zip(prompts, told, strict=True):
        saved = load(each.kv_transfer_params["hidden_states_path"])
        if saved["token_ids"].tolist() != prompt:
            raise ValueError(f"the file of request {each.request_id} is of another prompt")
        found.append([array("f", row) for row in saved["hidden_states"].float().flatten(1).tolist()])
    return found


def _loader() -> Callable[[str], Any]:
    """What reads a connector's file; a release's own, if there is one, waits until the file is complete."""
    from safetensors.torch import load_file

    return getattr(importlib.import_module(_CONNECTOR), "load_hidden_states", load_file)


def _facts(llm: LLM) -> dict[str, Any]:
    import torch
    import vllm

    compilation = llm.llm_engine.vllm_config.compilation_config
    mode = getattr(compilation, "mode", None)
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "compiled": getattr(mode, "name", str(mode)),
        "backend": compilation.backend,
        "graphs": getattr(compilation.cudagraph_mode, "name", str(compilation.cudagraph_mode)),
        "sizes": list(compilation.cudagraph_capture_sizes or ()),
    }


def _of_the_plugin() -> dict[str, Any]:
    import vllm_graphfix

    return {
        "states": {name: state.state.value for name, state in vllm_graphfix.states().items()},
        "events": vllm_graphfix.events(),
    }


if __name__ == "__main__":
    importlib.import_module("asked_engine").begin(serve)
