"""Differences of rows, tokens and bits, and the agreement of a group's ranks on them."""

from __future__ import annotations

import math
import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graphfix.fix import Code, Mode, State
from vllm_graphfix.patching.applied_fix import FixState
from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import process
from vllm_graphfix.shadow.check import Shadow
from vllm_graphfix.shadow.snapshot import PythonState
from vllm_graphfix.shadow.verdict import Graph


def test_an_error_is_relative_to_its_rows_largest_value_without_padding() -> None:
    import torch

    from vllm_graphfix.shadow.comparison import row_errors

    expected = torch.tensor([[4.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    actual = torch.tensor([[4.0, 2.0], [1.0, 0.0], [9.0, 9.0]])
    assert row_errors([actual], [expected], 2).tolist() == [0.25, 0.0]


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        (math.nan, math.nan, 0.0),
        (math.inf, math.inf, 0.0),
        (math.nan, 1.0, math.inf),
        (1.0, math.nan, math.inf),
        (math.inf, -math.inf, math.inf),
        (-0.0, 0.0, 0.0),
        (1e-30, 0.0, 1e-30 / 1.1754943508222875e-38),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_is_a_difference_where_it_is_on_one_side_alone(
    actual: float, expected: float, error: float, dtype: str
) -> None:
    import torch

    from vllm_graphfix.shadow.comparison import row_errors

    one, other = (torch.tensor([[value, 0.0]], dtype=getattr(torch, dtype)) for value in (actual, expected))
    assert row_errors([one], [other], 1).item() == pytest.approx(error, rel=0.01)


def test_tuples_stages_of_a_pipeline_and_tokens_are_compared() -> None:
    import torch

    from vllm_graphfix.shadow.comparison import row_errors, tensors

    class IntermediateTensors:
        def __init__(self, **arguments: torch.Tensor) -> None:
            self.tensors = arguments

    hidden, tokens = torch.ones(2, 3), torch.tensor([5, 6])
    arguments = (hidden, [IntermediateTensors(residual=hidden * 2, hidden=hidden)], tokens, None)
    actual = list(tensors(arguments))
    assert [tuple(tensor.shape) for tensor in actual] == [(2, 3)] * 3 + [(2,)]
    assert row_errors(actual, [*actual[:3], torch.tensor([5, 7])], 2).tolist() == [0.0, 1 / 7]
    assert row_errors(actual, actual[:3], 2).tolist() == [math.inf] * 2
    assert row_errors([hidden], [hidden[:1]], 2).tolist() == [math.inf] * 2
    with pytest.raises(TypeError, match="str"):
        list(tensors("text"))


def test_numbers_of_many_rows_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from vllm_graphfix.shadow import comparison

    monkeypatch.setattr(comparison, "_CHUNK", 7)
    expected = torch.arange(1.0, 41.0).view(10, 4)
    actual = expected.clone()
    actual[9, 3] = 0
    assert comparison.row_errors([actual], [expected], 10).tolist() == [0.0] * 9 + [1.0]
    assert comparison.row_errors([actual], [expected], 9).tolist() == [0.0] * 9


def drafts_checked(runs: list[tuple[list[float], list[int]]]) -> int:
    """Mismatches of a replay, the first of *runs*, that two others are compared with.

    Each run has numbers and drawn tokens.
    """
    import torch

    from vllm_graphfix.shadow.runs import Step

    values, tokens = torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.int64)
    remaining = iter(runs)

    def run() -> None:
        numbers, drawn = next(remaining, runs[0])  # whatever comes after them is one more replay
        values[:, 0], tokens[:, 0] = torch.tensor(numbers), torch.tensor(drawn)

    step = Step(
        Graph("draft decode", 2, ()),
        run,
        lambda: 2,
        {"values": values, "tokens": tokens},
        (),
        (),
        list,
        results=lambda: [values, tokens],
    )
    shadow = Shadow(Rate(every=1), Action.REPORT, process.refuse)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("vllm_graphfix.shadow.ranks.all_reduce_max", lambda *arguments: arguments)
        shadow.check("graph", lambda: step, run)
    assert shadow.stopped is None
    assert (values[:, 0].tolist(), tokens[:, 0].tolist()) == runs[0]
    return shadow.results.mismatches


@pytest.mark.parametrize(
    ("replay", "eager", "again", "mismatches"),
    [
        (([1.0, 1.0], [5, 6]), ([1.0, 1.0], [5, 6]), ([1.0, 1.0], [5, 6]), 0),
        (([1.0, 1.0], [5, 7]), ([1.0, 1.0], [5, 6]), ([1.0, 1.0], [5, 6]), 1),
        (([1.0, 1.0], [5, 7]), ([1.0, 1.25], [5, 6]), ([1.0, 1.0], [5, 6]), 0),
        (([9.0, 1.0], [5, 6]), ([1.0, 9.0], [5, 7]), ([1.0, 1.0], [5, 6]), 1),
    ],
    ids=["equal", "another token", "runs differ", "a row that is drawn alike"],
)
def test_another_token_is_a_difference_where_runs_without_graph_never_differ(
    replay: Any, eager: Any, again: Any, mismatches: int
) -> None:
    assert drafts_checked([replay, eager, again]) == mismatches


class OfNumbers:
    """A shadow check of graphs that return a row of numbers, whose runs without a graph have errors as planned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("vllm_graphfix.shadow.ranks.all_reduce_max", lambda *arguments: arguments)
        self.shadow = Shadow(Rate(every=1), Action.REPORT, process.refuse)

    def wrong(self, name: str, replay: float, *eager: float) -> int:
        """The number of mismatches after a step of the graph *name*: errors of its replay and of runs without it."""
        import torch

        from vllm_graphfix.shadow.runs import Step

        right, errors = torch.linspace(1.0, 2.0, 16, dtype=torch.float64).reshape(1, -1), iter(eager)
        step = Step(Graph(name, 1, ()), lambda: right * (1 + next(errors, eager[-1])), lambda: 1, {}, (), (), list)
        self.shadow.check(name, lambda: step, lambda: right * (1 + replay))
        assert self.shadow.stopped is None
        return self.shadow.results.mismatches


def test_noise_of_other_steps_hides_nothing_where_eager_runs_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    of = OfNumbers(monkeypatch)
    for _ in range(20):
        assert of.wrong("a", 0.0, 0.0) == of.wrong("b", 0.0, 0.0) == 0
    assert of.wrong("b", 0.0, 0.0095, 0.0) == 0
    assert of.wrong("b", 0.0, 0.0095, 0.0) == 0
    assert of.shadow.results.noise == pytest.approx(0.0095, rel=0.02)
    assert [of.wrong("a", 0.07, 0.0) for _ in range(3)] == [1, 2, 3]
    assert [of.wrong("b", 1e-6, 0.0) for _ in range(3)] == [4, 5, 6]
    assert [each.noise for each in of.shadow.results.first_mismatches] == [0.0] * 6


def test_a_graph_whose_steps_are_all_skipped_shows_in_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    of = OfNumbers(monkeypatch)
    monkeypatch.setattr(process, "SHADOW", of.shadow)
    runner = FixState("shadow-v1", Mode.AUTO, None, State.ACTIVE, "applied to CUDAGraphWrapper.__init__")

    def reported() -> tuple[State, Code]:
        actual = process.state({"shadow-v1": runner})
        return actual.state, actual.code

    assert of.wrong("a", 0.0, 0.0) == 0
    for _ in range(4):
        of.wrong("b", 0.0, 0.3, 0.6, 0.9, 1.2)
    assert (of.shadow.results.skipped, reported()) == (4, (State.ACTIVE, Code.NONE))
    of.wrong("b", 0.0, 0.3, 0.6, 0.9, 1.2)
    of.wrong("a", 0.0, 0.0)  # that another one is checked says nothing of it
    assert reported() == (State.ACTIVE, Code.GRAPH_EXCLUDED)
    of.wrong("b", 0.0, 0.0)
    assert reported() == (State.ACTIVE, Code.NONE)


def test_a_graph_for_whose_steps_memory_is_always_short_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    of = OfNumbers(monkeypatch)
    monkeypatch.setattr(of.shadow, "_memory_for", lambda key: lambda copies: "memory is short" if key == "b" else None)
    for _ in range(5):
        assert not of.shadow.skips_a_graph()
        of.wrong("a", 0.0, 0.0)
        of.wrong("b", 0.0, 0.0)
    assert of.shadow.skips_a_graph()


@pytest.mark.parametrize(
    ("field", "state", "code"),
    [("stopped", State.FAILED, Code.ERROR), ("cannot_abort", State.ACTIVE, Code.CANNOT_ABORT)],
)
def test_each_way_not_to_check_or_not_to_act_has_a_state_and_a_code(
    monkeypatch: pytest.MonkeyPatch, field: str, state: State, code: Code
) -> None:
    shadow = Shadow(Rate(every=1), Action.ABORT, process.refuse)
    setattr(shadow if field == "stopped" else shadow.consequences, field, "as planned")
    monkeypatch.setattr(process, "SHADOW", shadow)
    actual = process.state({"shadow-v1": FixState("shadow-v1", Mode.AUTO, None, State.ACTIVE, "applied")})
    assert (actual.state, actual.code) == (state, code)
    monkeypatch.setattr(process, "REFUSED", "a KV connector")
    actual = process.state({"shadow-v1": FixState("shadow-v1", Mode.AUTO, None, State.ACTIVE, "applied")})
    assert (actual.state, actual.code) == (State.INCOMPATIBLE, Code.ENGINE)


def test_noise_of_a_graph_fades_and_is_no_other_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    of = OfNumbers(monkeypatch)
    assert of.wrong("a", 0.009, 0.0095, 0.0) == 0
    assert of.wrong("a", 0.01, 1e-6, 0.0) == 0  # its noise a check ago explains this
    assert of.wrong("b", 0.01, 1e-6, 0.0) == 1
    for _ in range(40):
        assert of.wrong("a", 0.0, 1e-6, 0.0) == 1
    assert of.wrong("a", 0.01, 1e-6, 0.0) == 2
    assert of.shadow.results.first_mismatches[-1].noise < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool"])
def test_the_same_bits_are_the_same_however_they_lie_in_memory(dtype: str) -> None:
    import torch

    from vllm_graphfix.shadow.snapshot import same_bits

    table = torch.arange(12).view(3, 4).to(getattr(torch, dtype))
    for part in (table[:1, 1], table[:, 1], table[1, 2], table[:0], table.T):
        assert same_bits(part, part.clone())
    assert not same_bits(table[:, 1], table[:, 0])
    nan = torch.tensor([math.nan])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def _ask(rank: int, port: int, answers: Any) -> None:
    import sys
    from types import ModuleType, SimpleNamespace

    import torch

    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    state: Any = ModuleType("vllm.distributed.parallel_state")
    state.get_tp_group = lambda: SimpleNamespace(world_size=2, cpu_group=torch.distributed.group.WORLD)
    sys.modules |= {"vllm": ModuleType("vllm"), "vllm.distributed": ModuleType("vllm.distributed")}
    sys.modules["vllm.distributed.parallel_state"] = state
    from vllm_graphfix.shadow.ranks import all_reduce_max

    answers.put(all_reduce_max(float(rank), 3.0 - rank, math.inf * rank if rank else 0.0))


def test_ranks_of_a_group_agree_on_the_maximum() -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    started = [context.Process(target=_ask, args=(rank, port, answers)) for rank in range(2)]
    for each in started:
        each.start()
    assert [answers.get(timeout=300) for _ in started] == [(1.0, 3.0, math.inf)] * 2
    for each in started:
        each.join()


def test_a_run_with_the_captures_numbers_has_no_plan_of_the_step() -> None:
    import torch

    metadata = type("Metadata", (), {"__module__": "vllm.of_a_test"})()
    plan: Any = torch.zeros(5)
    metadata.max_query_len, metadata.scheduler_metadata = 1, plan
    latent = type("Latent", (), {"__module__": "vllm.of_a_test"})()
    latent.scheduler_metadata = needed = object()
    state = PythonState([{"layer": metadata, "other": latent}])
    state.set_numbers({})
    assert metadata.scheduler_metadata is plan
    state.set_numbers({"max_query_len": 64})
    assert (metadata.max_query_len, metadata.scheduler_metadata) == (64, None)
    assert latent.scheduler_metadata is needed
    state.restore()
    assert metadata.max_query_len == 1
    assert metadata.scheduler_metadata is plan


@pytest.mark.parametrize(
    ("replayed", "uniform", "mismatches"),
    [(3.0, None, 0), (4.0, None, 1), (3.0, 2, 1)],
    ids=["the bound of its lengths", "another number", "a graph of one length"],
)
def test_a_graph_of_varying_lengths_is_right_where_its_kernels_are_launched_for_the_longest(
    monkeypatch: pytest.MonkeyPatch, replayed: float, uniform: int | None, mismatches: int
) -> None:
    """A bound of 3 tokens a request in a graph of 8: fewer than its rows, and yet an upper bound of each query."""
    import torch

    from vllm_graphfix.shadow.forward import _launches
    from vllm_graphfix.shadow.runs import Step

    monkeypatch.setattr("vllm_graphfix.shadow.ranks.all_reduce_max", lambda *arguments: arguments)
    metadata = type("Metadata", (), {"__module__": "vllm.of_a_test"})()
    metadata.max_query_len, metadata.max_seq_len = 2, 64
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64))
    descriptor = SimpleNamespace(num_tokens=8, uniform_token_count=uniform, max_query_len=None if uniform else 3)
    # More than rounding explains: an attention that picks one key of many has turned a last bit into that.
    step = Step(
        Graph("target model", 8, ()),
        lambda: torch.full((4, 2), float(metadata.max_query_len)),
        lambda: 4,
        {},
        (metadata,),
        (),
        list,
        _launches(config, descriptor),
    )
    shadow = Shadow(Rate(every=1), Action.REPORT, process.refuse)
    shadow.check("graph", lambda: step, lambda: torch.full((4, 2), replayed))
    assert (shadow.results.mismatches, shadow.stopped) == (mismatches, None)
