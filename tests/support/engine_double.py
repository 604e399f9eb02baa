"""A double of vLLM for tests of what starts engines: `install` makes it importable as ``vllm``, without torch or a GPU.

What an engine of it does is the last part of its model's name, or what the environment says for its kind:
``ENGINE_DOUBLE_EAGER``, ``ENGINE_DOUBLE_STOCK`` or ``ENGINE_DOUBLE_PATCHED``. The words are those of
`STARTING` and `ANSWERING`, ``wrong``, ``healed where compared``, ``no numbers``, ``no graphs`` and ``leaves an adapter
out``; whatever else it is called, it answers.
What it does while it is poisoned ``ENGINE_DOUBLE_POISON_STOCK`` and the like say, in words of `POISONED`, ``is wrong``,
``times zero``, ``is written to`` and ``has NaN in padding``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

__version__ = "0.0.double"
DEVICE = "Double of a GPU"
PLATFORMS = "from vllm import current_platform\n"
"""The module ``vllm.platforms``."""
TORCH = '__version__ = "0.0.torch-double"\nclass cuda:\n    is_available = staticmethod(lambda: False)\n'

CORE_FAILED = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
WORKER_FAILED = "ValueError: Following weights were not initialized from checkpoint: {'model.norm.weight'}"
ENGINE_LOG = f"""\
W1121 12:10:32.774000 16271 torch/utils/cpp_extension.py:140] No CUDA runtime is found, using CUDA_HOME='/usr/local'
INFO 11-21 12:10:33 [importing.py:45] Triton is installed but 0 active driver(s) found (expected 1).
WARNING 11-21 12:10:34 [fused_moe.py:45] kernels are slower: ImportError: cannot import name 'fast' from 'kernels'
(Worker pid=16331) INFO 11-21 12:10:56 [cpu_model_runner.py:104] Starting to load model the-model...
\x1b[0;36m(Worker pid=16331)\x1b[0;0m ERROR 11-21 12:10:57 [multiproc_executor.py:870] WorkerProc failed to start.
(Worker pid=16331) ERROR 11-21 12:10:57 [multiproc_executor.py:870] Traceback (most recent call last):
(Worker pid=16331) ERROR 11-21 12:10:57 [multiproc_executor.py:870]   File "multiproc_executor.py", line 837, \
in worker_main
(Worker pid=16331) ERROR 11-21 12:10:57 [multiproc_executor.py:870]     raise ValueError(
\x1b[0;36m(Worker pid=16331)\x1b[0;0m ERROR 11-21 12:10:57 [multiproc_executor.py:870] {WORKER_FAILED}
(EngineCore pid=16317) ERROR 11-21 12:10:58 [core.py:1140] EngineCore failed to start.
(EngineCore pid=16317) ERROR 11-21 12:10:58 [core.py:1140] Traceback (most recent call last):
(EngineCore pid=16317) ERROR 11-21 12:10:58 [core.py:1140]     raise e from None
(EngineCore pid=16317) ERROR 11-21 12:10:58 [core.py:1140] Exception: WorkerProc initialization failed due to an \
exception in a background process. See stack trace for root cause.
(EngineCore pid=16317) Process EngineCore:
(EngineCore pid=16317) Exception: WorkerProc initialization failed due to an exception in a background process. \
See stack trace for root cause.
"""
"""What vLLM 0.21.0 writes when a worker of a worker fails, shortened."""
ABORTED_LOG = """\
terminate called after throwing an instance of 'c10::AcceleratorError'
  what():  CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call
"""


def install(folder: Path) -> Path:
    """Makes ``vllm`` and ``torch`` of *folder* doubles, and returns it: a folder for the Python path."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text(SOURCE)
    (folder / "vllm" / "platforms.py").write_text(PLATFORMS)
    (folder / "torch.py").write_text(TORCH)
    return folder


SOURCE = Path(__file__).read_text()
current_platform = SimpleNamespace(get_device_name=lambda: DEVICE)


class SamplingParams:
    def __init__(self, *, max_tokens: int, prompt_logprobs: int | None = None, **rest: Any) -> None:
        self.max_tokens, self.prompt_logprobs = max_tokens, prompt_logprobs


class LogProbability(NamedTuple):
    logprob: float


class DraftMode(NamedTuple):
    name: str


class LLM:
    """The engine: the answer to a prompt depends on the prompt and its adapter alone."""

    def __init__(self, *, model: str, enforce_eager: bool = False, **rest: Any) -> None:
        self.kind = "EAGER" if enforce_eager else "STOCK" if os.environ.get("VLLM_GRAPHFIX", "") == "off" else "PATCHED"
        self.behaviour = os.environ.get(f"ENGINE_DOUBLE_{self.kind}", Path(model).name)
        self.speculator = SimpleNamespace(generate_draft=lambda *args, **kwargs: None)
        self.calls = 0
        self.poison: tuple[list[str], list[str] | None, bool] | None = None
        self.compared: int | None = None
        """Passes whose replays are compared; None while none is."""
        self.poisoned = os.environ.get(f"ENGINE_DOUBLE_POISON_{self.kind}", "")
        print(f"INFO 11-21 10:00:00 [core.py:1] the double of an engine starts, {self.kind} {self.behaviour}")  # noqa: T201 - as vLLM
        STARTING.get(self.behaviour, does_nothing)(self)

    def generate(
        self,
        prompts: Sequence[dict[str, list[int]]],
        sampling: Sequence[SamplingParams],
        *,
        use_tqdm: bool,
        lora_request: Sequence[Any] | None = None,
    ) -> list[SimpleNamespace]:
        ANSWERING.get(self.behaviour, does_nothing)(self)
        if self.poison is not None:
            POISONED.get(self.poisoned, does_nothing)(self)
        self.calls += 1
        self.compared = None if self.compared is None else self.compared + 1
        token_ids = [prompt["prompt_token_ids"] for prompt in prompts]
        adapters = [each.lora_int_id if each else 0 for each in lora_request or [None] * len(token_ids)]
        if self.behaviour == "leaves an adapter out":
            adapters = [adapter if adapter < max(adapters) else 0 for adapter in adapters]
        return [self._answer(*each) for each in zip(token_ids, sampling, adapters, strict=True)]

    def _answer(self, prompt: list[int], sampling: SamplingParams, adapter: int) -> SimpleNamespace:
        first, count = sum(prompt) + 100 * adapter, sampling.max_tokens
        wrong = self.poison is not None and (
            self.poisoned == "is wrong" or (self.poisoned == "times zero" and not self.poison[2])
        )
        wrong |= self.behaviour == "wrong" or (self.behaviour == "healed where compared" and self.compared is None)
        tokens = [(first + i + (wrong and i > 1)) % 1000 for i in range(count)]
        best = -0.1 - 0.01 * (self.calls > 1)  # the engine's own noise
        best = float("nan") if self.behaviour == "no numbers" else best
        top = [{token: LogProbability(best), token + 1: LogProbability(best - 3.0)} for token in tokens]
        # Each token is the one before it and one, so that an answer's right tokens are the most likely when scored.
        counted = [{(one + 1) % 1000: LogProbability(best)} for one in prompt[:-1]]
        scored = [
            None,
            *({token: LogProbability(best - 3.0)} | at for token, at in zip(prompt[1:], counted, strict=True)),
        ]
        return SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=tokens, logprobs=top)],
            prompt_token_ids=prompt,
            prompt_logprobs=scored if sampling.prompt_logprobs else None,
        )

    def collective_rpc(self, method: str | Callable[[Any], Any], args: Any = ()) -> list[Any]:
        if method == "graphfix_poison":
            self.poison = args
            return [None]
        if method == "graphfix_poison_result":
            self.poison = None
            written = [[2, "layer 0: block 5, which nobody holds, was written to", True]]
            return [
                {
                    "steps": 3,
                    "findings": written if self.poisoned == "is written to" else [],
                    "most": {"padded rows": 9},
                    "buffers": [],
                    "padded": 2 if self.poisoned == "has NaN in padding" else None,
                    "notes": [],
                    "error": None,
                }
            ]
        if method == "graphfix_exact":
            self.compared = 0
            return [None]
        if method == "graphfix_exact_result":
            from vllm_graphfix.verify.codec import to_builtins
            from vllm_graphfix.verify.engine.exact import ExactRank

            compared, self.compared = self.compared, None
            assert compared is not None
            return [to_builtins(ExactRank(compared, 0, 0, 0, 0.0, 0.0, 0.0, {}, (), None))]
        if method == "graphfix_cudagraph_mode":
            return ["NONE" if self.behaviour == "no graphs" else "FULL_DECODE_ONLY"]
        if method == "graphfix_states":
            from vllm_graphfix.fixes import BY_NAME

            state = "off" if os.environ.get("VLLM_GRAPHFIX", "") == "off" else "active"
            modes = {
                name: os.environ.get("VLLM_GRAPHFIX_" + name.upper().replace("-", "_"), "auto") for name in BY_NAME
            }
            return [{name: state if mode == "auto" else mode for name, mode in modes.items()}]
        if callable(method):
            return [method(SimpleNamespace(model_runner=SimpleNamespace(speculator=self.speculator)))]
        raise NotImplementedError(f"this double of an engine does not know {method!r}")

    def get_metrics(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=f"vllm:spec_decode_num_{what}_tokens", value=8) for what in ("accepted", "draft")]

    def reset_prefix_cache(self) -> None:
        pass


def does_nothing(engine: LLM) -> None:
    pass


def fails_in_a_worker(engine: LLM) -> None:
    sys.stdout.write(ENGINE_LOG)
    raise RuntimeError(CORE_FAILED.removeprefix("RuntimeError: "))


def hangs_with_a_child(engine: LLM) -> None:
    """Leaves a file ``pids of …`` with its own process and the child's, beside the log."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    partial = Path(f"{os.getpid()}.partial")
    partial.write_text(f"{os.getpid()} {child.pid}")
    partial.rename(f"pids of {os.getpid()}")
    time.sleep(600)


def aborts(engine: LLM) -> None:
    sys.stdout.write(ABORTED_LOG)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def drafts_and_is_killed(engine: LLM) -> None:
    for mode in ("NONE", "PIECEWISE", "PIECEWISE"):
        engine.speculator.generate_draft(3, 4, None, None, cudagraph_runtime_mode=DraftMode(mode))
    os.kill(os.getpid(), signal.SIGKILL)


def meets_an_illegal_access(engine: LLM) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress'")


def runs_out_of_memory(engine: LLM) -> None:
    raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")


def lacks_a_module(engine: LLM) -> None:
    raise ImportError("libcudart.so.13: cannot open shared object file")


def tells_of_its_environment(engine: LLM) -> None:
    raise LookupError(
        " ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("TEST_"))
    )


def is_alone(engine: LLM) -> None:
    with Path("alone").open("x"):
        time.sleep(0.2)
    Path("alone").unlink()


def hangs(engine: LLM) -> None:
    time.sleep(600)


def is_confused(engine: LLM) -> None:
    raise IndexError("index 2048 is out of bounds")


STARTING: dict[str, Callable[[LLM], None]] = {
    "fails in a worker": fails_in_a_worker,
    "hangs with a child": hangs_with_a_child,
    "lacks a module": lacks_a_module,
    "tells of its environment": tells_of_its_environment,
    "is alone": is_alone,
}
ANSWERING: dict[str, Callable[[LLM], None]] = {
    "aborts": aborts,
    "drafts and is killed": drafts_and_is_killed,
    "ends without a word": lambda engine: os._exit(3),
    "illegal access": meets_an_illegal_access,
    "out of memory": runs_out_of_memory,
    "exits": lambda engine: sys.exit("enough"),
    "hangs when asked again": lambda engine: hangs(engine) if engine.calls else None,
}
POISONED: dict[str, Callable[[LLM], None]] = ANSWERING | {"hangs": hangs, "is confused": is_confused}
