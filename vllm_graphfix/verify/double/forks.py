"""Runs `worker` for stock and for patched code, in two forks of a process that has imported the libraries of vLLM.

    python -m vllm_graphfix.verify.double.forks JOB…

Each JOB is a `Job` as JSON. These imports are half of the start of vLLM. Before the fork the process imports nothing of
vLLM and nothing of the plugin that reads the environment.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NamedTuple, NoReturn

from vllm_graphfix.verify.double import worker

_LIBRARIES = (
    "torch._inductor.standalone_compile",
    "torch._dynamo.repro.after_dynamo",
    "torch.utils.cpp_extension",
    "transformers.models.auto.image_processing_auto",
    "transformers.models.auto.modeling_auto",
    "openai.types.responses",
    "fastapi",
    "aiohttp",
    "gguf",
    "xgrammar",
)
"""The slow imports of vLLM 0.14 to 0.33."""


class Job(NamedTuple):
    """One fork."""

    arguments: list[list[str]]
    """`names`, `others` and `unrecognised` of `worker.main`."""
    environment: dict[str, str]
    """Variables of this fork alone."""
    results: int
    """Descriptor for the results. The last line has the exit code."""
    log: int
    """Descriptor for whatever else the fork writes."""


def main(folder: str, jobs: Sequence[Job]) -> None:
    """Run *jobs* on the vLLM in *folder*, each in a fork."""
    sys.path[0] = folder  # libraries beside that vLLM come first, as for vLLM itself
    gc.disable()  # modules stay
    for name in _LIBRARIES:
        with suppress(Exception):  # if vLLM imports it, the fork fails with that error
            import_module(name)
    gc.enable()
    gc.freeze()  # else the first collection in each fork would write to, and so copy, every page
    sys.stdout.flush()  # else each fork would write what a library has printed among its results
    running: dict[int, Job] = {}
    for job in jobs:
        pid = os.fork()
        if not pid:
            _run(folder, job, jobs)
        running[pid] = job
    while running:
        pid, status = os.wait()
        job = running.pop(pid)
        os.write(job.results, json.dumps({"event": "ended", "code": os.waitstatus_to_exitcode(status)}).encode())
        os.close(job.results)


def _run(folder: str, job: Job, jobs: Sequence[Job]) -> NoReturn:
    code = 1
    try:
        os.dup2(job.results, 1)
        os.dup2(job.log, 2)
        for each in jobs:
            os.close(each.results)
            os.close(each.log)
        os.environ.update(job.environment)
        worker.main(*job.arguments, folder=folder, recheck=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:  # libraries that are torn down would write to the log after the error
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], [Job(*json.loads(job)) for job in sys.argv[2:]])
