"""The GPU that torch uses here, queried in a process of its own: the parent imports neither torch nor CUDA.

    python -m vllm_graphfix.verify.engine.device [FOLDER MODEL…]

prints a line of JSON with the fields of `Device`, and makes the tiny models *MODEL* in FOLDER.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_graphfix.verify import VerifyError

PACKAGE = Path(__file__).parents[3]
"""Folder that contains this copy of the package."""
GIB = 1 << 30
_NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED of the driver."""
_TIMEOUT = 300.0
"""Seconds to import torch, make some models and query the GPU; most machines take ten."""


@dataclass(frozen=True)
class Device:
    """A GPU, or the reason why there is none."""

    name: str | None
    """None without a GPU."""
    why_not: str
    """Reason, if there is no GPU."""
    capability: tuple[int, int]
    free_gib: float
    total_gib: float
    driver: str
    torch: str
    cuda: str
    python: str
    count: int = 1
    """GPUs that torch sees."""


def find(models: Path | None = None, names: tuple[str, ...] = ()) -> Device:
    """Return the GPU of this machine; make the tiny models *names* in the folder *models* in the same process.

    Raises VerifyError without torch, or if the GPU does not answer in time.
    """
    arguments = [str(models), *names] if models is not None else []
    path = os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH", "")]))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "vllm_graphfix.verify.engine.device", *arguments],
            cwd=models or PACKAGE,  # `-m` imports from there first, and the user's folder may hold a json.py of its own
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT,
        )
    except subprocess.TimeoutExpired as error:
        raise VerifyError(f"the GPU did not answer within {_TIMEOUT:.0f} s; check it with nvidia-smi") from error
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise VerifyError(
            f"torch could not look for a GPU: {last[0]}. Use the Python that runs vLLM; this one is {sys.executable}"
        )
    fields = json.loads(done.stdout.splitlines()[-1])
    return Device(**fields | {"capability": tuple(fields["capability"])})


def _query_torch() -> Device:
    import torch

    name, why_not, capability, free, total, count = None, "", (0, 0), 0, 0, 0
    try:
        if torch.version.cuda is None:
            why_not = "torch was built without CUDA"
        elif not torch.cuda.is_available():
            why_not = "torch sees no GPU"
        else:
            free, total = torch.cuda.mem_get_info()
            capability = torch.cuda.get_device_capability()
            name = torch.cuda.get_device_name()
            count = torch.cuda.device_count()
    except Exception as error:  # a driver that is too old, a GPU that has dropped off the bus
        name, why_not = None, next(iter(str(error).splitlines()), type(error).__name__)
    return Device(
        name,
        why_not,
        capability,
        round(free / GIB, 1),
        round(total / GIB, 1),
        driver(),
        str(torch.__version__),
        torch.version.cuda or "none",
        platform.python_version(),
        count,
    )


def driver() -> str:
    """Return the driver's version from NVML; torch does not report it."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(80)
        if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, len(text)):
            return "unknown"
        return text.value.decode()
    except OSError:
        return "unknown"


def is_touched() -> bool:
    """Return True if this process has initialised CUDA, which then fails in every process that it forks.

    `cuCtxGetCurrent` returns an error before initialisation, and does not initialise.
    """
    try:
        code: int = ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p()))
    except (OSError, AttributeError):
        return False  # no driver
    return code != _NOT_INITIALIZED


if __name__ == "__main__":
    if sys.argv[1:]:
        from vllm_graphfix.verify.engine import models as tiny

        for model in sys.argv[2:]:
            tiny.write(model, Path(sys.argv[1]))
    print(json.dumps(asdict(_query_torch())))  # noqa: T201 - the result
