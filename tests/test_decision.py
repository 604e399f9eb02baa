"""One decision for an engine: who decides, and who goes by what was decided. With a real vLLM, in real processes."""

from __future__ import annotations

import json
import subprocess
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import warm_python
from engine import cpu_engine, environment, forking_python
from stock import run_in_release
from vllm_graphfix.settings import decision
from vllm_graphfix.settings import environment as settings
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
        "state": membership.manager.states(diagnose=False)["mamba-padding"].state.value,
        "mode": decision.modes["mamba-padding"].value, "starting": membership.status_record.record().starting,
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
"""  # noqa: E501


def run_program(code: str, model: Path, scratch: Path, env: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the decisions that the processes of *code* print, by the processes' names.

    *code* is the body of a main program.
    """
    script = scratch / "program.py"
    script.write_text(BEFORE + "\nif __name__ == '__main__':\n" + textwrap.indent(textwrap.dedent(code), "    "))
    python, around = forking_python(environment(scratch, cpu_engine()))
    done = subprocess.run(
        [python, str(script), str(model)],
        cwd=scratch,
        env=around | {"VLLM_LOGGING_LEVEL": "WARNING"} | dict(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    return {entry["who"]: entry for entry in (json.loads(line.removeprefix("TOLD ")) for line in lines)}


IN, OUT = (
    next(f"in-{n}" for n in range(99) if decision.bucket(f"in-{n}") < 5000),
    next(f"out-{n}" for n in range(99) if decision.bucket(f"out-{n}") >= 5000),
)


PROGRAM = f"""
if len(sys.argv) > 2:
    front_end("program")
    sys.exit()
import vllm.v1.engine.core  # once for all forks
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
def decisions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    model = models.write("llama", tmp_path_factory.mktemp("models"))
    return run_program(
        PROGRAM,
        model,
        tmp_path_factory.mktemp("program"),
        {"VLLM_GRAPHFIX_ROLLOUT": "50", "VLLM_GRAPHFIX_ROLLOUT_KEY": IN},
    )


Decisions = dict[str, dict[str, Any]]


def test_the_first_process_decides(decisions: Decisions) -> None:
    assert decisions["first"] | {"engine": ""} == {
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
def test_an_engine_core_starts_from_when_it_loads_the_plugin(who: str, decisions: Decisions) -> None:
    assert decisions[who]["starting"] is True
    assert decisions["api server"]["starting"] is False


def test_front_ends_that_were_forked_from_one_process_are_engines_of_their_own(decisions: Decisions) -> None:
    assert decisions["forked early"]["engine"] != decisions["first"]["engine"]
    assert decisions["forked early"]["canary"] is True


@pytest.mark.parametrize("who", ["core", "forked core", "late forked core", "api server"])
def test_an_engines_processes_go_by_its_decision_whatever_their_own_environment_says(
    who: str, decisions: Decisions
) -> None:
    assert decisions[who]["role"] == ("api-server" if who == "api server" else "engine-core")
    assert {name: decisions[who][name] for name in ("engine", "key", "canary", "mode")} == {
        name: decisions["first"][name] for name in ("engine", "key", "canary", "mode")
    }


@pytest.mark.parametrize("who", ["child", "forked child", "program"])
def test_an_engine_that_a_process_of_another_one_starts_decides_for_itself(who: str, decisions: Decisions) -> None:
    assert decisions[who]["engine"] not in (decisions["first"]["engine"], decisions["second"]["engine"])
    assert (decisions[who]["key"], decisions[who]["canary"], decisions[who]["state"]) == (OUT, False, "not-in-canary")
    assert decisions[who]["mode"] == "observe"


def test_two_engines_of_one_process_decide_each_for_itself(decisions: Decisions) -> None:
    assert decisions["second"]["engine"] != decisions["first"]["engine"]
    assert (decisions["second"]["canary"], decisions["second"]["state"]) == (False, "not-in-canary")


@pytest.mark.parametrize("who", ["core of the second", "forked core of the second"])
def test_processes_of_the_second_engine_go_by_the_second_decision(who: str, decisions: Decisions) -> None:
    assert decisions[who]["engine"] == decisions["second"]["engine"]
    assert (decisions[who]["canary"], decisions[who]["state"]) == (False, "not-in-canary")


@pytest.mark.parametrize(
    "who", ["core that finds the decision for another engine", "core that finds the decision of another vLLM"]
)
def test_a_decision_that_was_not_made_for_this_engine_does_not_count(who: str, decisions: Decisions) -> None:
    """A Ray node may keep the environment of the engine that started it, which newer executors do not overwrite."""
    assert decisions[who]["engine"] not in (decisions["first"]["engine"], decisions["second"]["engine"])
    assert decisions[who]["canary"] is False


# -- nodes that decide separately --------------------------------------------------------------------------------------

SEPARATE = """
import json, os
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
vllm.platforms._current_platform = CpuPlatform()  # vLLM's own, which it finds only in a build for CPUs
from vllm.engine.arg_utils import EngineArgs
import vllm.v1.attention.backends.mamba_attn as target
for name, headless, flags, further in SHAPES:
    kept = {each: os.environ.get(each) for each in further}
    os.environ.update(further)
    made = EngineArgs(model=MODEL, skip_tokenizer_init=True, max_model_len=256, load_format="dummy", **flags)
    from vllm_graphfix.settings import decision as rollout
    from vllm_graphfix import _this_process
    before = _this_process().decision
    try:
        made.create_engine_config(headless=headless)
    except Exception as error:
        print("TOLD", json.dumps([name, f"{type(error).__name__}: {error}"]), flush=True)
        continue
    finally:
        for each, value in kept.items():
            os.environ.pop(each) if value is None else os.environ.update({each: value})
    decision, left = _this_process().decision, rollout.decode(os.environ["VLLM_GRAPHFIX_DECISION"])
    assert (left, decision.engine) == (decision, before.engine if name == "first" else decision.engine)
    state = _this_process().manager.states()["mamba-padding"]
    layered = target.BaseMambaAttentionMetadataBuilder._compute_common_metadata.__globals__["__name__"]
    assert (state.state.value in ("active", "observing")) == layered.startswith("vllm_graphfix"), (state, layered)
    here = _this_process().status_record.ranks_here
    print("TOLD", json.dumps([name, decision.canary, decision.withheld, state.state.value, here]), flush=True)
"""
"""Real engine configurations of a release, of which `SHAPES` has the flags. Mamba's code, which a fix concerns, is
imported by then."""
DP: dict[str, Any] = {"data_parallel_size": 2}
TOGETHER: list[tuple[str, bool, dict[str, Any], dict[str, str]]] = [
    ("first", False, {}, {}),
    ("tensor parallelism", False, {"tensor_parallel_size": 2}, {}),
    ("data parallelism on one node", False, DP, {}),
    ("data parallelism on one node, as it says", False, DP | {"data_parallel_size_local": 2}, {}),
    ("data parallelism on Ray", False, DP | {"data_parallel_backend": "ray", "data_parallel_size_local": 1}, {}),
    ("Ray", False, {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, {}),
    ("one node of one", False, {"nnodes": 1}, {}),
]
SEPARATELY: list[tuple[str, bool, dict[str, Any], dict[str, str]]] = [
    ("--nnodes 2", False, {"nnodes": 2, "tensor_parallel_size": 2}, {}),
    ("--nnodes 2", True, {"nnodes": 2, "node_rank": 1, "tensor_parallel_size": 2}, {}),
    ("--nnodes 2", False, DP | {"nnodes": 2, "node_rank": 1, "data_parallel_external_lb": True}, {}),
    ("--headless", True, DP | {"data_parallel_size_local": 1, "data_parallel_start_rank": 1}, {}),
    ("1 of 2 data-parallel ranks on this node", False, DP | {"data_parallel_size_local": 1}, {}),
    ("1 of 2 data-parallel ranks on this node", False, {}, {"VLLM_DP_SIZE": "2", "VLLM_DP_RANK": "1"}),
    ("external data-parallel load balancing (--data-parallel-rank)", False, DP | {"data_parallel_rank": 1}, {}),
    (
        "hybrid data-parallel load balancing",
        False,
        {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True},
        {},
    ),
    (
        "hybrid data-parallel load balancing",
        False,
        {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_start_rank": 2},
        {},
    ),
    (
        "an external launcher, such as torchrun,",
        False,
        {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
        {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    ),
]
"""The name of the flags, the `headless` of `create_engine_config`, the flags, and variables."""
KEYLESS = {"VLLM_GRAPHFIX_ROLLOUT": "99.99", "VLLM_GRAPHFIX_MAMBA_PADDING": "auto"}
NODES: dict[str, Any] = {"nnodes": 2, "tensor_parallel_size": 2}
ALIKE: list[tuple[str, bool, dict[str, Any], dict[str, str]]] = [
    ("a key", False, NODES, {"VLLM_GRAPHFIX_ROLLOUT_KEY": "the-group"}),
    ("everybody", False, NODES, {"VLLM_GRAPHFIX_ROLLOUT": "100"}),
    ("a key that is in", True, NODES, {"VLLM_GRAPHFIX_ROLLOUT": "50", "VLLM_GRAPHFIX_ROLLOUT_KEY": IN}),
    ("a key that is not", True, NODES, {"VLLM_GRAPHFIX_ROLLOUT": "50", "VLLM_GRAPHFIX_ROLLOUT_KEY": OUT}),
]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts: newer releases refuse external data parallelism of anything else."""
    return models.write("mixtral", tmp_path_factory.mktemp("models"))


def shapes(release: str, model: Path, environment: Mapping[str, str], of: list[Any]) -> list[list[Any]]:
    code = f"MODEL, SHAPES = {str(model)!r}, {of!r}\n{SEPARATE}"
    spawned = {warm_python.SPAWNED: warm_python.executable()}  # where vLLM looks at the model's class
    done = run_in_release(release, code, {**environment, **spawned}, libraries_loaded=True)
    return [json.loads(line.removeprefix("TOLD ")) for line in done.stdout.splitlines() if line.startswith("TOLD ")]


@pytest.fixture(
    scope="module",
    params=[
        "0.21.0",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("0.14.1", "0.18.1", "0.27.0", "0.33.0")),
    ],
)
def decided(request: pytest.FixtureRequest, mixture: Path) -> tuple[str, list[list[Any]]]:
    """State of a fix in an engine of one process, and what each of the shapes came to."""
    separately = [each for each in SEPARATELY if request.param >= "0.21" or "launcher" not in each[0]]
    outcomes = shapes(request.param, mixture, KEYLESS, [*TOGETHER[:1], *separately, *TOGETHER[1:], *ALIKE])
    assert [each[0] for each in outcomes[1 : 1 + len(separately)]] == [each[0] for each in separately]
    return outcomes[0][3], outcomes


def test_an_engine_whose_nodes_decide_separately_is_out_without_a_key_and_says_why(
    decided: tuple[str, list[list[Any]]],
) -> None:
    """All of it, on each node: what was applied before the configuration was known is taken back."""
    named = {name for name, *_ in SEPARATELY}
    for name, canary, withheld, state, _ in decided[1]:
        if name in named:
            assert (canary, state) == (False, "not-in-canary")
            assert withheld.startswith("VLLM_GRAPHFIX_ROLLOUT=99.99 % without VLLM_GRAPHFIX_ROLLOUT_KEY: ")
            assert f" with {name} the nodes of an engine decide separately" in withheld


def test_an_engine_that_one_process_decides_for_needs_no_key(decided: tuple[str, list[list[Any]]]) -> None:
    """On Ray, too, whatever is set on its nodes."""
    affected, outcomes = decided
    assert affected in ("active", "not-needed")
    together = {name: rest for name, *rest, _ in outcomes if name in {each for each, *_ in TOGETHER}}
    assert together == {name: [True, None, affected] for name, *_ in TOGETHER}


def test_a_front_end_knows_the_ranks_on_its_host_unless_somebody_else_places_them(
    decided: tuple[str, list[list[Any]]], request: pytest.FixtureRequest
) -> None:
    # Before 0.21.0 vLLM's CPU platform takes processes of its own in place of Ray.
    on_ray = "Ray" if request.node.callspec.params["decided"] >= "0.21" else "on Ray"
    for name, *_, here in decided[1]:
        known = 2 if name.startswith(("tensor", "data parallelism on one node", "hybrid", "Ray")) else 1
        assert here == (None if on_ray in name or "launcher" in name else known), name


def test_with_a_key_the_nodes_decide_alike(decided: tuple[str, list[list[Any]]]) -> None:
    affected, outcomes = decided
    *inside, outside = (each[:4] for each in outcomes[-len(ALIKE) :])
    assert inside == [[name, True, None, affected] for name, *_ in ALIKE[:-1]]
    assert (outside[1], outside[3]) == (False, "not-in-canary")
    assert " is not among the first 50 % " in outside[2]
