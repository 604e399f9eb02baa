"""The gate before a capture, in real process groups of stock releases.

Which ranks start, and which stop with what message.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from stock import release_root, run_in_release
from warm_release import run_in_fork

SOON = {"VLLM_GRAPHFIX_AGREEMENT_TIMEOUT": "1"}
WORLDS: dict[str, tuple[tuple[dict[str, str], bool], ...]] = {
    "agrees": (({}, True), ({}, True)),
    "differs": (({}, True), ({"VLLM_GRAPHFIX_MAMBA_PADDING": "off"}, True)),
    "one is off": (({"VLLM_GRAPHFIX": "off"}, True), ({}, True)),
    "one lacks the plugin": (({}, True), ({}, False)),
    "all are off, one lacks the plugin": (({"VLLM_GRAPHFIX": "off"}, True), ({"VLLM_GRAPHFIX": "off"}, False)),
    "one cannot make a token": (({}, True), ({"FAULT": "token"}, True)),
    "one cannot tell its states": (({}, True), ({"FAULT": "states"}, True)),
    "one has given up": (({}, True), ({"FAULT": "give up"}, True)),
    "all are off, one cannot tell its states": (
        ({"VLLM_GRAPHFIX": "off"}, True),
        ({"VLLM_GRAPHFIX": "off", "FAULT": "states"}, True),
    ),
    "all mistyped the switch, one lacks the plugin": (
        ({"VLLM_GRAPHFIX": "strct", "VLLM_GRAPHFIX_MAMBA_PADDING": "on"}, True),
        ({"VLLM_GRAPHFIX": "strct", "VLLM_GRAPHFIX_MAMBA_PADDING": "on"}, False),
    ),
    "all mistyped the percentage, one lacks the plugin": (
        ({"VLLM_GRAPHFIX_ROLLOUT": "half"}, True),
        ({"VLLM_GRAPHFIX_ROLLOUT": "half"}, False),
    ),
    "all mistyped the switch, both have given up": (
        ({"VLLM_GRAPHFIX": "strct", "VLLM_GRAPHFIX_MAMBA_PADDING": "on", "FAULT": "give up"}, True),
        ({"VLLM_GRAPHFIX": "strct", "VLLM_GRAPHFIX_MAMBA_PADDING": "on", "FAULT": "give up"}, True),
    ),
    "one is off, one mistyped it": (({"VLLM_GRAPHFIX": "off"}, True), ({"VLLM_GRAPHFIX": "offf"}, True)),
    "one mistyped the switch": (({}, True), ({"VLLM_GRAPHFIX": "offf"}, True)),
    "one mistyped a fix": (({}, True), ({"VLLM_GRAPHFIX_MAMBA_PADDING": "onn"}, True)),
    "one mistyped what changes nothing": (({}, True), ({"VLLM_GRAPHFIX_SHADOW_ACTION": "repport"}, True)),
    "one has names that mean nothing": (
        ({}, True),
        ({"VLLM_GRAPHFIX_PORT": "tcp://10.0.0.1:80", "VLLM_GRAPHFIX_MAMBA_PADING": "off"}, True),
    ),
    "one has a name that means nothing, strict": (
        ({"VLLM_GRAPHFIX": "strict"}, True),
        ({"VLLM_GRAPHFIX": "strict", "VLLM_GRAPHFIX_PORT": "1"}, True),
    ),
    "all mistyped a name": (
        ({"VLLM_GRAPHFIX_MAMBA_PADING": "off"}, True),
        ({"VLLM_GRAPHFIX_MAMBA_PADING": "off"}, True),
    ),
    "all mistyped a name, strict": (
        ({"VLLM_GRAPHFIX": "strict", "VLLM_GRAPHFIX_MAMBA_PADING": "off"}, True),
        ({"VLLM_GRAPHFIX": "strict", "VLLM_GRAPHFIX_MAMBA_PADING": "off"}, True),
    ),
    "all mistyped a name that switches off, strict": (
        ({"VLLM_GRAPHFIX": "strict", "VLLM_GRAPHFIX_ROLOUT": "5", "FAULT": "give up"}, True),
        ({"VLLM_GRAPHFIX": "strict", "VLLM_GRAPHFIX_ROLOUT": "5", "FAULT": "give up"}, True),
    ),
    "torch's store is gone": (({"FAULT": "store"}, True), ({"FAULT": "store"}, True)),
    "torch's store is gone, strict": (
        ({"VLLM_GRAPHFIX": "strict", "FAULT": "store"}, True),
        ({"VLLM_GRAPHFIX": "strict", "FAULT": "store", "VLLM_GRAPHFIX_MAMBA_PADDING": "off"}, True),
    ),
    "torch's store is gone, off": (
        ({"VLLM_GRAPHFIX": "off", "FAULT": "store"}, True),
        ({"VLLM_GRAPHFIX": "off", "FAULT": "store"}, True),
    ),
    "differs, on a node without the executor": (
        ({}, True),
        ({"VLLM_GRAPHFIX_MAMBA_PADDING": "off", "NODE": "1"}, True),
    ),
    "the store does not answer": (({"FAULT": "lost", **SOON}, True), ({"FAULT": "lost", **SOON}, True)),
    "the store does not answer, off": (
        ({"VLLM_GRAPHFIX": "off", "FAULT": "lost"}, True),
        ({"VLLM_GRAPHFIX": "off", "FAULT": "lost"}, True),
    ),
    "differs, without graphs": (
        ({"GRAPHS": "NONE"}, True),
        ({"GRAPHS": "NONE", "VLLM_GRAPHFIX_MAMBA_PADDING": "off"}, True),
    ),
}
"""Each rank's environment, and whether it has the plugin."""

PROGRAM = """
import errno, os, sys, threading
from types import SimpleNamespace
sys.path.insert(0, SUPPORT)
import torch
from torch import distributed
from rank_processes import run_worlds
import vllm.v1.attention.backends.mamba_attn
import vllm.v1.worker.gpu_worker as workers

def put_a_fault(fault):
    from vllm_graphfix import _this_process
    from vllm_graphfix.engine import rank_report
    error, process = OSError(errno.EMFILE, "Too many open files"), _this_process().manager
    def fail(*args, **kwargs):
        raise error
    if fault == "token":
        rank_report.new_token = fail
    elif fault == "states":
        process.states = fail
    elif fault == "give up":
        process.give_up(error)
    elif fault == "lost":
        from vllm_graphfix.engine import gate_reports
        from vllm_graphfix.ranks import BoundedStore
        silent = type("SilentStore", (), {"add": lambda *_: threading.Event().wait()})()
        gate_reports.common_store = lambda limit: BoundedStore(silent, min(limit, 1))
    elif fault == "store":
        del distributed.distributed_c10d._get_default_store

def rank(world, number, size, port, given):
    env, plugin = given
    os.environ.update(env)
    if not plugin:
        os.environ["VLLM_PLUGINS"] = ""
    os.environ.setdefault("VLLM_GRAPHFIX_AGREEMENT_TIMEOUT", "4" if "lacks" in world else "60")
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=size)
    distributed.new_group(list(range(size)), backend="gloo")
    ends = []
    if plugin:
        from vllm_graphfix.engine import capture_gate, rank_agreement as agreement
        capture_gate.exit_process = lambda: ends.append(" AND ENDS ITS PROCESS")
        agreement.TIMEOUT_FOR_A_WARNING = 4.0 if "lacks" in world else 60.0
        put_a_fault(os.environ.get("FAULT"))
    mode = SimpleNamespace(name=os.environ.get("GRAPHS", "FULL"))
    worker_double = SimpleNamespace(local_rank=number, use_v2_model_runner=False, vllm_config=SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_rank=0, node_rank_within_dp=int(os.environ.get("NODE", "0"))),
        model_config=SimpleNamespace(enforce_eager=mode.name == "NONE"),
        compilation_config=SimpleNamespace(cudagraph_mode=mode)))
    try:
        workers.Worker.compile_or_warm_up_model(worker_double)
        said = "returned"
    except AttributeError:
        said = "STARTS"  # the stock start-up was called, with an object that is no worker
    except RuntimeError as error:
        said = "".join([f"{type(error).__name__} {error}", *ends])
    return said == "STARTS", said

run_worlds(WORLDS, rank)
"""


@pytest.fixture(scope="module")
def messages() -> dict[str, list[str]]:
    """Return the messages of the ranks of each world of `WORLDS`.

    The process groups are real ones of stock 0.21.0, around a double of a worker.
    """
    code = f"WORLDS = {WORLDS!r}\nSUPPORT = {str(Path(__file__).parent / 'support')!r}\n" + PROGRAM
    done = run_in_release("0.21.0", code, {"VLLM_LOGGING_LEVEL": "WARNING"}, libraries_loaded=True)
    lines = [line.partition(": RANK ") for line in done.stdout.splitlines() if ": RANK " in line]
    return {world: sorted(message for name, _, message in lines if name == world) for world in WORLDS}


@pytest.mark.parametrize(
    "world",
    [
        "agrees",
        "one cannot make a token",
        "all are off, one lacks the plugin",
        "all are off, one cannot tell its states",
        "all mistyped the switch, one lacks the plugin",
        "all mistyped the percentage, one lacks the plugin",
        "all mistyped the switch, both have given up",
        "one is off, one mistyped it",
        "one mistyped what changes nothing",
        "one has names that mean nothing",
        "all mistyped a name",
        "all mistyped a name that switches off, strict",
        "differs, without graphs",
        "torch's store is gone",
        "torch's store is gone, off",
        "the store does not answer, off",
    ],
)
def test_ranks_start(world: str, messages: dict[str, list[str]]) -> None:
    """Ranks start where they agree, and where a difference cannot hang.

    The kill switch brings an engine up in any case, mistyped too.
    """
    assert messages[world] == ["0 STARTS", "1 STARTS"]


@pytest.mark.parametrize(
    ("world", "what"),
    [
        ("differs", "mamba-padding is 'active' on rank 0 ({host}); 'off' on rank 1 ({host})"),
        ("one is off", "VLLM_GRAPHFIX is 'off' on rank 0 ({host}); 'on' on rank 1 ({host})"),
        ("one mistyped the switch", "VLLM_GRAPHFIX is 'on' on rank 0 ({host}); 'off' on rank 1 ({host})"),
        (
            "one mistyped the switch",
            "misconfigured is 'nothing' on rank 0 ({host}); 'VLLM_GRAPHFIX=offf' on rank 1 ({host})",
        ),
        ("one mistyped a fix", "the mode of mamba-padding is 'auto' on rank 0 ({host}); 'off' on rank 1 ({host})"),
        (
            "one has a name that means nothing, strict",
            "misconfigured is 'nothing' on rank 0 ({host}); 'VLLM_GRAPHFIX_PORT=1' on rank 1 ({host})",
        ),
        (
            "all mistyped a name, strict",
            "VLLM_GRAPHFIX_MAMBA_PADING=off is not a variable of vllm-graphfix: correct or unset it",
        ),
        (
            "one cannot tell its states",
            "Which fixes are active is not known on rank 1 ({host}): OSError: [Errno 24] Too many open files.",
        ),
        ("one has given up", "mamba-padding is 'active' on rank 0 ({host}); 'failed' on rank 1 ({host})."),
        (
            "one has given up",
            "The reason on rank 1 ({host}) for capture-state, cutlass-mla-padding, draft-prefill-state, ",
        ),
        (
            "one has given up",  # without what this process has not imported
            "mamba-padding, prefill-dispatch, workspace-growth: OSError: [Errno 24] Too many open files.",
        ),
    ],
)
def test_all_ranks_stop_before_they_capture_where_one_is_set_up_otherwise(
    world: str, what: str, messages: dict[str, list[str]]
) -> None:
    assert len(messages[world]) == 2
    for line in messages[world]:
        assert "GraphfixError vllm-graphfix stops this engine before it captures its CUDA graphs" in line
        assert what.format(host=socket.gethostname()) in line


def test_a_rank_whose_executor_is_on_another_node_ends_its_process(messages: dict[str, list[str]]) -> None:
    """That executor ends with the engine, and its `shutdown` does not reach this process."""
    with_executor, without = sorted(messages["differs, on a node without the executor"], key=len)
    assert "the ranks of this engine do not agree" in with_executor
    assert without[1:] == f"{with_executor[1:]} AND ENDS ITS PROCESS"  # behind the rank


def test_a_rank_stops_if_the_store_does_not_answer_for_as_long_as_it_waits(messages: dict[str, list[str]]) -> None:
    for message in messages["the store does not answer"]:
        assert "GraphfixError vllm-graphfix stops this engine before it captures" in message
        assert "has not answered for 1 s: the host of rank 0" in message


def test_all_ranks_that_insist_stop_where_they_cannot_be_compared(messages: dict[str, list[str]]) -> None:
    stopped = messages["torch's store is gone, strict"]
    assert len(stopped) == 2
    for line in stopped:
        assert "vllm-graphfix stops this engine before it captures its CUDA graphs: whether its ranks agree is" in line
        assert "no attribute '_get_default_store'" in line
        assert "set VLLM_GRAPHFIX=off on all nodes" in line
    # vLLM's executor reads the result of rank 0; of rank 1 it notices the end of the process.
    assert [line.endswith(" AND ENDS ITS PROCESS") for line in stopped] == [False, True]


def test_a_rank_whose_process_keeps_the_plugin_out_is_named_with_its_host(messages: dict[str, list[str]]) -> None:
    with_plugin, without = messages["one lacks the plugin"]
    assert without == "1 STARTS"
    assert "GraphfixError" in with_plugin
    assert f"No report within 4 s: rank 1 on {socket.gethostname()}." in with_plugin


@pytest.mark.xdist_group("0.21.0")
def test_a_fix_without_its_companion_is_no_difference_between_pipeline_stages() -> None:
    """Only the last stage imports the drafter's code, for which `capture-state` needs the companion."""
    code = """
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    import vllm.v1.worker.gpu.cudagraph_utils
    from vllm_graphfix import _this_process
    first = _this_process().gate.reports.report()
    import vllm.v1.worker.gpu.spec_decode.eagle.cudagraph
    last = _this_process().gate.reports.report()
    states = _this_process().manager.states()
    print("SAID", first.states["capture-state"], last.states["capture-state"], states["capture-state"].state.value)
    """
    output = run_in_fork("0.21.0", code, {"VLLM_GRAPHFIX_DRAFT_PREFILL_STATE": "observe"}).stdout
    assert "SAID active waiting incompatible" in output


@pytest.mark.xdist_group("0.21.0")
@pytest.mark.parametrize(
    ("error", "ended"),
    [("vllm-graphfix stops this engine before it captures its CUDA graphs: …", True), ("out of memory", False)],
)
def test_a_core_whose_ranks_stop_it_ends_its_executor(error: str, ended: bool) -> None:
    """A silent rank waits in a collective by then, and the core would wait for that rank when it ends."""
    code = f"""
    from types import SimpleNamespace
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    from vllm.v1.engine.core import EngineCore
    def fail(*args, **kwargs):
        raise RuntimeError({error!r})
    executor_double = SimpleNamespace(get_kv_cache_specs=fail, shutdown=lambda: print("ENDED"))
    try:
        EngineCore._initialize_kv_caches(SimpleNamespace(model_executor=executor_double), SimpleNamespace())
    except RuntimeError as raised:
        print("RAISED", raised)
    """
    output = run_in_fork("0.21.0", code).stdout
    assert f"RAISED {error}" in output
    assert ("ENDED" in output) == ended


@pytest.mark.parametrize("release", ["0.15.0", "0.18.1", "0.21.0", "0.26.0", "0.33.0"])
def test_what_the_gate_stands_on_is_in_vllm(release: str) -> None:
    """The methods that it is put around, by name; and, from 0.18.0 on, the one that measures graphs."""
    root = release_root(release)
    assert "def compile_or_warm_up_model(self" in read(root, "gpu_worker.py")
    assert "def determine_available_memory(self" in read(root, "gpu_worker.py")
    assert "def compile_or_warm_up_model(self" in read(root, "cpu_worker.py")
    assert "def _initialize_kv_caches(" in (root / "vllm" / "v1" / "engine" / "core.py").read_text(encoding="utf-8")
    assert ("def profile_cudagraph_memory(self" in read(root, "gpu_model_runner.py")) == (release >= "0.18")


def read(root: Path, name: str) -> str:
    return (root / "vllm" / "v1" / "worker" / name).read_text(encoding="utf-8")
