"""A real engine for tests: PyPI's vLLM for CPUs, the plugin beside it, tiny models, and `compare` as users call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import fetch_cpu_engine
import warm_python
from stock import isolated_environment
from vllm_graphfix.verify.engine import models

UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}
"""For engines of which none is about what is compiled: even with ``enforce_eager`` vLLM compiles its sampler, for half
a minute."""
_LIMIT = 600
"""Seconds; each engine takes some 15, and more where other tests share the machine."""


@cache
def cpu_engine() -> Path:
    """The folder to put on the Python path; fetched if it is missing, and an error, never a skip, if that fails."""
    return fetch_cpu_engine.engine()


def environment(scratch: Path, *path: Path) -> dict[str, str]:
    """Return an environment in which *path* comes before all else that is imported; caches are in *scratch*."""
    return isolated_environment(str(scratch)) | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "NO_COLOR": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a third of the time to start; what needs more processes has them
    }


def forking_python(environment: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """A Python for *environment*, and the environment in which all that an engine starts are forks, too.

    Of the eight seconds that a process of vLLM takes to start, the libraries take seven, and an engine has four. All of
    vLLM's and of the plugin's own is imported in each process, as ever.
    """
    read = ("PYTHONPATH", "TORCHDYNAMO_DISABLE")  # where torch is, and what it reads when it is imported
    python = warm_python.executable(**{name: environment[name] for name in read if name in environment})
    return python, {**environment, warm_python.SPAWNED: python}


def check_answer(script: str, folder: Path, *arguments: str, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the JSON that *script*, a module beside this one, prints of an engine with a tiny Llama.

    It must succeed.
    """
    path, model = Path(__file__).with_name(script), models.write("llama", folder)
    python, around = forking_python(environment(folder, cpu_engine()) | UNCOMPILED)
    around["PYTHONPATH"] = os.pathsep.join(map(str, (path.parent, cpu_engine())))
    done = subprocess.run(
        [python, str(path), str(model), *arguments],
        env=around | dict(env),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return answer


def check_compare(
    folder: Path, *arguments: str, env: Mapping[str, str] | None = None, path: tuple[Path, ...] = (), code: int = 0
) -> subprocess.CompletedProcess[str]:
    """`vllm-graphfix compare` in *folder* with a real engine on the CPU; it must end with *code*."""
    python, around = forking_python(environment(folder, cpu_engine()) | UNCOMPILED)
    around["PYTHONPATH"] = os.pathsep.join(map(str, (*path, cpu_engine())))
    return check_call(folder, *arguments, env=around | dict(env or {}), code=code, python=python)


def check_call(
    folder: Path, *arguments: str, env: Mapping[str, str], code: int, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """`vllm-graphfix compare` in *folder* with the environment *env*.

    It must end with *code*, and not with a traceback.
    """
    done = subprocess.run(
        [python, "-m", "vllm_graphfix", "compare", *arguments],
        cwd=folder,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT,
        check=False,
    )
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return what `--json` printed; NaN and Infinity, which JSON has not, are an error."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    result: dict[str, Any] = json.loads(done.stdout, parse_constant=refuse)
    return result


def write_llama(folder: Path) -> Path:
    """A tiny Llama, with a tokenizer whose words are ``w3`` to ``w1023``, each the token of its number."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    made = models.write("llama", folder)
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    words = [*special.values(), *(f"w{number}" for number in range(len(special), models.VOCABULARY))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(list(special.values()))
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | special))
    return made
