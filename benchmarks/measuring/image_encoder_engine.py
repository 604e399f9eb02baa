"""One engine that is given images, in a process of its own, and says what its encoder has made of them.

    python image_encoder_engine.py DESCRIPTOR

As `shadow_abort.py`, but for what is asked. ``{"images": …, "tokens": …}`` has the engine take these images in one
step, and ``{"memory": …, "budgets": …, "items": …}`` captures the encoder's graphs anew.

The order's ``memory`` says what the graphs' memory holds before they are captured, for a stock engine of a machine that
nobody else uses finds zeros, as a rule, where a busy one finds what others have left:

plain   nothing is done.
driver  GPU memory is filled with NaN and given back to the driver, which a graph's pool then asks for its own.
pool    a graph that writes NaN is captured in the pool first. Its memory is free from then on, and the encoder's graphs
        get it; before each of their batches it is replayed, as any graph of that pool may be.
output  FlashAttention is given memory of NaN to write to, where a graph is captured and nobody gives it any.
zeros   the same with zeros: what no memory can make wrong.
"""

from __future__ import annotations

import functools
import importlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

_MIB = 1 << 20
_FLOATS = _MIB // 4
"""The number of 32-bit numbers in a MiB, the largest block that PyTorch takes from its pool of small ones."""
_TEXT = tuple(range(40, 52))
"""The tokens behind an image in its prompt."""


class Encoder:
    """What this process sees of its encoder, and the memory that its graphs get."""

    def __init__(self, memory: str, gib: float) -> None:
        self.memory, self._gib = memory, gib
        self.manager: Any = None
        """The `EncoderCudaGraphManager` that has captured graphs last; None without graphs."""
        self.encoded: list[list[Any]] | None = None
        """The embeddings of each call, while someone wants them."""
        self.adapters_off: dict[str, bool] = {}
        """Whether kernels of adapters were left out of the graphs, by what of the model they would be for."""
        self._fillers: list[Any] = []

    def watch_captures(self) -> None:
        """Must be called before the engine starts."""
        from vllm.v1.worker import encoder_cudagraph

        manager = encoder_cudagraph.EncoderCudaGraphManager
        stock_capture, stock_execute = manager.capture, manager.execute

        @functools.wraps(stock_capture)
        def capture(this: Any, graph_pool: Any) -> Any:
            self.manager, self._fillers = this, []
            self.adapters_off = _kernels_left_out(this.model)
            if self.memory == "driver":
                _give_nan_to_the_driver(self._gib)
            elif self.memory == "pool":
                self._fillers = _captured_fillers(graph_pool)
            with _written_to({"output": float("nan"), "zeros": 0.0}.get(self.memory)):
                return stock_capture(this, graph_pool)

        @functools.wraps(stock_execute)
        def execute(this: Any, *args: Any, **kwargs: Any) -> Any:
            for filler in self._fillers:
                filler.replay()
            return self._noted(stock_execute(this, *args, **kwargs))

        manager.capture, manager.execute = capture, execute

    def watch_embeddings(self, model: type[Any]) -> None:
        """Notes what is encoded without a graph, too."""
        stock = model.embed_multimodal

        @functools.wraps(stock)
        def embed_multimodal(this: Any, *args: Any, **kwargs: Any) -> Any:
            return self._noted(stock(this, *args, **kwargs))

        model.embed_multimodal = embed_multimodal

    def counted(self) -> dict[str, int]:
        """Images that were encoded in graphs, and those that were too large for them."""
        if self.manager is None:
            return {}
        return {"in graphs": self.manager.graph_hits, "in none": self.manager.graph_misses}

    def _noted(self, embeddings: Any) -> Any:
        if self.encoded is not None and embeddings is not None:  # None: the model runner encodes without a graph
            self.encoded.append([each.detach().clone() for each in embeddings])
        return embeddings

    def capture_again(self, memory: str, budgets: Sequence[int], items: int) -> None:
        """As the engine does it when it starts, with another memory, and graphs of other sizes."""
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.distributed.parallel_state import graph_capture
        from vllm.platforms import current_platform

        manager, self.memory = self.manager, memory
        config = manager.vllm_config.compilation_config
        config.encoder_cudagraph_token_budgets = list(budgets)
        config.encoder_cudagraph_max_vision_items_per_batch = items
        with torch.inference_mode(), set_current_vllm_config(manager.vllm_config):
            type(manager).__init__(manager, manager.vllm_config, manager.device, manager.dtype, manager.model)
            torch.cuda.synchronize()
            with graph_capture(device=manager.device):
                manager.capture(graph_pool=current_platform.graph_pool_handle())
                torch.cuda.synchronize()


def _give_nan_to_the_driver(gib: float) -> None:
    """Fills *gib* of GPU memory, in blocks of all sizes that a pool asks the driver for, and frees it."""
    import torch

    small = min(512, int(gib * 512))
    held = [torch.full((_FLOATS,), float("nan"), device="cuda") for _ in range(small)]
    held += [torch.full((64 * _FLOATS,), float("nan"), device="cuda") for _ in range(int(gib * 1024 - small) // 64)]
    torch.cuda.synchronize()
    held.clear()
    torch.cuda.empty_cache()


def _captured_fillers(pool: Any) -> list[Any]:
    """Graphs in *pool* that write NaN, and keep nothing of its memory.

    They have small blocks alone, which is what an encoder as small as this asks for: a large one may become a workspace
    of cuBLAS, which is not theirs to write to.

    A block that is free is given to its own stream alone. The encoder's graphs are captured on the current stream, and
    up to 0.28 on the one that PyTorch has for it.
    """
    import torch

    fillers = []
    for stream in (None, torch.cuda.current_stream()):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            held = [torch.full((_FLOATS,), float("nan"), device="cuda") for _ in range(64)]
            held.clear()
        graph.replay()
        fillers.append(graph)
    torch.cuda.synchronize()
    return fillers


@contextmanager
def _written_to(value: float | None) -> Iterator[None]:
    """Lets FlashAttention write to memory of *value* in what is captured meanwhile; None: to whatever it gets.

    It stands where the operator looks its kernel up, and a fix that gives the kernel memory is outside of it.
    """
    if value is None:
        yield
        return
    import torch
    from vllm.v1.attention.backends import fa_utils

    kernel = fa_utils.flash_attn_varlen_func

    @functools.wraps(kernel)
    def flash_attn_varlen_func(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is None and torch.cuda.is_current_stream_capturing():
            kwargs["out"] = q.new_full((*q.shape[:-1], v.shape[-1]), value)
        return kernel(q, k, v, *args, **kwargs)

    fa_utils.flash_attn_varlen_func = flash_attn_varlen_func
    try:
        yield
    finally:
        fa_utils.flash_attn_varlen_func = kernel


def _kernels_left_out(model: Any) -> dict[str, bool]:
    """The flag by which vLLM launches no kernel of adapters, of each part of the model that may have some."""
    wrappers = getattr(getattr(model, "lora_manager", None), "punica_wrapper_mapping", {})
    metas = {part: getattr(wrapper, "token_mapping_meta", None) for part, wrapper in wrappers.items()}
    return {part: bool(meta.no_lora_flag_cpu.item()) for part, meta in metas.items() if meta is not None}


def serve(parent: Any, order: dict[str, Any]) -> None:
    plugin = order["plugin"]
    if plugin:
        import vllm_graphfix

        vllm_graphfix.register()  # where it lies on the path only, there is no entry point to find it by
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    arguments = dict(order["arguments"])
    arguments |= {
        name: value for name, value in order["where_known"].items() if name in EngineArgs.__dataclass_fields__
    }
    encoder = Encoder(arguments.pop("memory"), arguments.pop("gib"))
    encoder.watch_captures()
    llm = LLM(**arguments)
    (model,) = llm.collective_rpc(_model_of)
    encoder.watch_embeddings(type(model))
    parent.send(time.monotonic())  # one clock for all processes of a machine
    parent.send(_facts(model, arguments))
    answers: dict[str, Callable[..., dict[str, Any]]] = {"images": _encode, "budgets": _capture, "state": _state}
    while True:
        asked = parent.recv()
        parent.send(next(answers[name] for name in answers if name in asked)(llm, encoder, plugin=plugin, **asked))


def _model_of(worker: Any) -> Any:
    return worker.model_runner.get_model()


def _facts(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    import torch
    import vllm

    attention = model.visual.blocks[0].attn.attn
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "attention": str(getattr(attention, "attn_backend", None)).rpartition(".")[2],
        "flash attention": getattr(attention, "_fa_version", getattr(attention, "fa_version", None)),
        "graphs": arguments.get("compilation_config", {}),
    }


def _encode(
    llm: LLM, encoder: Encoder, images: Sequence[dict[str, Any]], tokens: int, *, plugin: bool
) -> dict[str, Any]:
    """Embeddings and answers, by image, of images that come at once.

    Each has a ``width``, a ``height``, a ``seed``, and an ``adapter``: None, or its number and folder.
    """
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    llm.llm_engine.reset_encoder_cache()  # or what was encoded before is not encoded again
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    prompts: Any = [
        {"prompt_token_ids": [0, *_TEXT], "multi_modal_data": {"image": _drawn(**_size_of(each))}} for each in images
    ]
    adapters = [each["adapter"] and LoRARequest(each["adapter"][1], *each["adapter"]) for each in images]
    before = encoder.counted()
    encoder.encoded = []
    try:
        told = llm.generate(prompts, sampling, use_tqdm=False, **({"lora_request": adapters} if any(adapters) else {}))
        encoded, calls = [each for call in encoder.encoded for each in call], len(encoder.encoded)
    finally:
        encoder.encoded = None
    if len(encoded) != len(images):
        raise RuntimeError(f"{len(encoded)} images were encoded and not {len(images)}")
    return {
        "embeddings": [each.float().cpu().numpy().tobytes() for each in encoded],
        "image tokens": [len(each) for each in encoded],
        "answers": [list(each.outputs[0].token_ids) for each in told],
        "calls": calls,
        **{name: count - before[name] for name, count in encoder.counted().items()},
    }


def _size_of(image: dict[str, Any]) -> dict[str, int]:
    return {name: image[name] for name in ("width", "height", "seed")}


def _drawn(width: int, height: int, seed: int) -> Any:
    from PIL import Image

    pixels = random.Random(seed).randbytes(3 * width * height)  # noqa: S311 - the same images in every engine
    return Image.frombytes("RGB", (width, height), pixels)


def _capture(
    llm: LLM, encoder: Encoder, memory: str, budgets: Sequence[int], items: int, *, plugin: bool
) -> dict[str, Any]:
    if encoder.manager is not None:
        encoder.capture_again(memory, budgets, items)
    return {}


def _state(llm: LLM, encoder: Encoder, state: bool, *, plugin: bool) -> dict[str, Any]:
    """What is left to say: whether graphs have kernels of adapters, and what the fixes have done."""
    said: dict[str, Any] = {}
    if encoder.adapters_off:
        said["kernels of adapters left out"] = encoder.adapters_off
    if plugin:
        import vllm_graphfix

        events = vllm_graphfix.events()
        said["fixes"] = {
            name: {"state": found.state.value, "why": found.reason, "events": events.get(name, {})}
            for name, found in vllm_graphfix.states().items()
            if name.startswith("encoder-")
        }
    return said


if __name__ == "__main__":
    importlib.import_module("asked_engine").begin(serve)
