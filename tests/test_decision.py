"""One decision for an engine: who decides, and who goes by what was decided. With a real vLLM, in real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engine import cpu_engine, environment

from vllm_graphfix import rollout, settings
from vllm_graphfix.verify.engine import models

pytestmark = pytest.mark.xdist_group("decision")

BEFORE = """
import json, multiprocessing, os, subprocess, sys
MODEL = sys.argv[1]

def told(engine):
    from vllm_graphfix import _this_process
    membership = _this_process()
    decision = membership.decision
    print("TOLD", json.dumps({
        "who": engine, "engine": decision.engine, "key": decision.key, "canary": decision.canary, "role": membership.role.value,
        "state": membership.process.states(diagnose=False)["mamba-padding"].state.value,
        "mode": decision.modes["mamba-padding"].value, "starting": membership.telling.record().starting,
    }), flush=True)

def configuration():
    from vllm.engine.arg_utils import EngineArgs
    return EngineArgs(model=MODEL, skip_tokenizer_init=True, max_model_len=256).create_engine_config()

def engine_core(config, who):
    from vllm.v1.engine.core import EngineCore
    try:
        EngineCore(config, None, False)  # loads the plugins, then finds that None is no executor
    except TypeError:
        told(who)

def front_end(who):
    configuration()
    told(who)

def start(method, target, *arguments, name=None):
    process = multiprocessing.get_context(method).Process(target=target, args=arguments, name=name)
    process.start()
    process.join()
    assert process.exitcode == 0
"""


def told(code: str, model: Path, scratch: Path, env: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What the processes of *code*, the body of a main program, said of their decision, by the name that they were given."""
    script = scratch / "program.py"
    script.write_text(BEFORE + "\nif __name__ == '__main__':\n" + textwrap.indent(textwrap.dedent(code), "    "))
    done = subprocess.run(
        [sys.executable, str(script), str(model)],
        cwd=scratch,
        env=environment(scratch, cpu_engine()) | {"VLLM_LOGGING_LEVEL": "WARNING"} | dict(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    return {said["who"]: said for said in (json.loads(line.removeprefix("TOLD ")) for line in lines)}


IN, OUT = (
    next(f"in-{n}" for n in range(99) if rollout.bucket(f"in-{n}") < 5000),
    next(f"out-{n}" for n in range(99) if rollout.bucket(f"out-{n}") >= 5000),
)


PROGRAM = f"""
if len(sys.argv) > 2:
    front_end("program")
    sys.exit()
from vllm.engine.arg_utils import EngineArgs
EngineArgs(model=MODEL)  # loads the plugins; no engine begins here yet
start("fork", front_end, "forked early")
one = configuration()
told("first")
of_the_first = os.environ[{settings.DECISION!r}]

os.environ["VLLM_GRAPHFIX_ROLLOUT_KEY"] = {OUT!r}  # from here on, whoever decides is not in the rollout
os.environ["VLLM_GRAPHFIX_MAMBA_PADDING"] = "observe"
start("spawn", engine_core, one, "core")
start("fork", engine_core, one, "forked core")
start("spawn", front_end, "api server", name="ApiServer_1")

start("spawn", front_end, "child")
start("fork", front_end, "forked child")
subprocess.run([sys.executable, *sys.argv, "as a program"], check=True)

two = configuration()
told("second")
start("spawn", engine_core, two, "core of the second")
start("fork", engine_core, two, "forked core of the second")
start("fork", engine_core, one, "late forked core")
os.environ[{settings.DECISION!r}] = of_the_first
start("spawn", engine_core, two, "core that finds the decision for another engine")
os.environ[{settings.DECISION!r}] = json.dumps(json.loads(of_the_first) | {{"vllm": "0.17.1"}})
start("spawn", engine_core, one, "core that finds the decision of another vLLM")
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    model = models.write("llama", tmp_path_factory.mktemp("models"))
    return told(
        PROGRAM,
        model,
        tmp_path_factory.mktemp("program"),
        {"VLLM_GRAPHFIX_ROLLOUT": "50", "VLLM_GRAPHFIX_ROLLOUT_KEY": IN},
    )


Found = dict[str, dict[str, Any]]


def test_the_first_process_decides(found: Found) -> None:
    assert found["first"] | {"engine": ""} == {
        "who": "first",
        "engine": "",
        "key": IN,
        "canary": True,
        "role": "front-end",
        "state": "not-needed",
        "mode": "auto",
        "starting": False,
    }


@pytest.mark.parametrize("who", ["core", "forked core", "late forked core"])
def test_an_engine_core_starts_from_when_it_loads_the_plugin(who: str, found: Found) -> None:
    assert found[who]["starting"] is True
    assert found["api server"]["starting"] is False


def test_front_ends_that_were_forked_from_one_process_are_engines_of_their_own(found: Found) -> None:
    assert found["forked early"]["engine"] != found["first"]["engine"]
    assert found["forked early"]["canary"] is True


@pytest.mark.parametrize("who", ["core", "forked core", "late forked core", "api server"])
def test_an_engines_processes_go_by_its_decision_whatever_their_own_environment_says(who: str, found: Found) -> None:
    assert found[who]["role"] == ("api-server" if who == "api server" else "engine-core")
    assert {name: found[who][name] for name in ("engine", "key", "canary", "mode")} == {
        name: found["first"][name] for name in ("engine", "key", "canary", "mode")
    }


@pytest.mark.parametrize("who", ["child", "forked child", "program"])
def test_an_engine_that_a_process_of_another_one_starts_decides_for_itself(who: str, found: Found) -> None:
    assert found[who]["engine"] not in (found["first"]["engine"], found["second"]["engine"])
    assert (found[who]["key"], found[who]["canary"], found[who]["state"]) == (OUT, False, "not-in-canary")
    assert found[who]["mode"] == "observe"


def test_two_engines_of_one_process_decide_each_for_itself(found: Found) -> None:
    assert found["second"]["engine"] != found["first"]["engine"]
    assert (found["second"]["canary"], found["second"]["state"]) == (False, "not-in-canary")


@pytest.mark.parametrize("who", ["core of the second", "forked core of the second"])
def test_processes_of_the_second_engine_go_by_the_second_decision(who: str, found: Found) -> None:
    assert found[who]["engine"] == found["second"]["engine"]
    assert (found[who]["canary"], found[who]["state"]) == (False, "not-in-canary")


@pytest.mark.parametrize(
    "who", ["core that finds the decision for another engine", "core that finds the decision of another vLLM"]
)
def test_a_decision_that_was_not_made_for_this_engine_does_not_count(who: str, found: Found) -> None:
    """As on a Ray node that keeps the environment of the engine that started it, which newer executors do not overwrite."""
    assert found[who]["engine"] not in (found["first"]["engine"], found["second"]["engine"])
    assert found[who]["canary"] is False
