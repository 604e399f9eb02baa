"""The runs of one step: its replay, and eager runs from the state before the replay.

They compare what each run leaves, and restore output, inputs, recurrent rows and rings to what the replay left.
Attention caches keep what the last run wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graphfix.shadow import ranks
from vllm_graphfix.shadow.comparison import row_errors, rows_drawn_alike, state_error, tensors
from vllm_graphfix.shadow.failures import (
    StepError,
    StepNotCheckable,
    clear_traceback,
    description,
    is_device_error,
    is_gpu_lost,
)
from vllm_graphfix.shadow.layers import first_difference
from vllm_graphfix.shadow.snapshot import PythonState, RandomState, Rows, Snapshot, StateRows, copies_of_rows
from vllm_graphfix.shadow.verdict import Graph

if TYPE_CHECKING:
    from torch import Tensor

_COPIES = 4
"""Copies of the recurrent state at one time: before the replay, after it, after each of two eager runs."""
_LEAST_NOISE = 1e-30
MemoryShortage = Callable[[int], "str | None"]
"""Returns why there is no room for copies of so many bytes and for a run without the graph; None if there is."""


class Step(NamedTuple):
    """A replay that is due, in terms of torch alone."""

    graph: Graph
    eager: Callable[[], Any]
    """Runs the model on the same inputs and attention metadata, without replaying a graph of any kind."""
    real_rows: Callable[[], int]
    """Returns the number of rows before the padding; may wait for the device."""
    inputs: Mapping[str, Tensor]
    objects: Sequence[object]
    """Attention metadata and the like, whose attributes a run may set."""
    states: Sequence[StateRows]
    caches: Callable[[], list[tuple[str, Tensor]]]
    """Copies what each layer, in the model's order, has in its cache for this step's tokens."""
    launches: Sequence[Mapping[str, int]] = ()
    """Numbers in *objects*, by attribute, that the capture may have passed to the kernels instead of this step's."""
    results: Callable[[], Any] | None = None
    """Returns what a run has left in tensors of *inputs* and *states* whose first rows are the real ones; None if the
    results are what the run returns."""
    compared: Callable[[list[Tensor], list[Tensor]], None] | None = None
    """Called with the results of the replay and of a run without the graph, copies; raises nothing."""


class Replay:
    """vLLM's replay of a step, with the output of its first call and the error of the latest one."""

    def __init__(self, replay: Callable[[], Any]) -> None:
        self._replay = replay
        self.output: Any = None
        self.done = False
        self.error: Exception | None = None

    def __call__(self) -> Any:
        try:
            output = self._replay()
        except Exception as error:
            self.error = error
            raise
        if not self.done:
            self.output, self.done = output, True
        return output


class CheckedStep:
    """A step whose replay is compared with eager runs, and the state before and after the replay."""

    def __init__(self, step: Step, shortage: MemoryShortage) -> None:
        """Copy the state before the replay; raises StepNotCheckable if there is no room for that and for a run."""
        # Twice where the results are in these states: they are copied apart from the snapshots.
        needed = _COPIES * sum(rows.nbytes for rows in step.states) * (1 if step.results is None else 2)
        # One snapshot before the replay, one after it.
        needed += 2 * sum(tensor.numel() * tensor.element_size() for tensor in step.inputs.values())
        if (reason := shortage(needed)) is not None:
            raise StepNotCheckable(reason)
        self.step = step
        self.python = PythonState(step.objects)
        self.random = RandomState()
        self.before = Snapshot(step.inputs, step.states)
        self.output: list[Tensor] = []
        self._served: list[Tensor] = []
        self._after: Snapshot | None = None
        self._random_after: RandomState | None = None

    def save_replay(self, output: Any) -> None:
        """Copy the *output* of the replay, and the state after it."""
        # The output is memory of the graph's pool, which a further replay overwrites; vLLM serves that very memory.
        self._served = list(tensors(output)) if self.step.results is None else []
        self.output = self._results(output)
        self._after = Snapshot(self.step.inputs, self.step.states)
        self._random_after = RandomState()

    def run_eagerly(self, launch: Mapping[str, int] | None = None) -> list[Tensor]:
        """Return copies of the results of an eager run from the state before the replay.

        *launch*: numbers that the capture may have passed to the kernels, by which some split their work. Raises
        StepError for vLLM's own error in the run.
        """

        def prepare() -> None:
            self._restore_before()
            self.before.make_readable()
            self.python.set_numbers(launch or {})

        return self._results(ranks.run_collectively(prepare, self._run))

    def _run(self) -> Any:
        try:
            return self.step.eager()
        except Exception as error:
            if is_device_error(error):
                raise
            raise StepError(description(error)) from error

    def error_of_another_replay(self, replay: Callable[[], Any]) -> float:
        """Replay once more from the state before the first replay; return the error relative to that one."""
        output = self._results(ranks.run_collectively(self._restore_before, replay))
        rows = self.step.real_rows()
        return max(_worst(row_errors(output, self.output, rows)), state_error(self.states_now(), self.states_of_replay))

    def _restore_before(self) -> None:
        self.before.restore()
        self.python.restore()
        self.random.restore()

    def _results(self, output: Any) -> list[Tensor]:
        return [tensor.clone() for tensor in tensors(output if self.step.results is None else self.step.results())]

    @property
    def states_of_replay(self) -> list[Rows]:
        return self._after.states if self._after is not None else []

    def states_now(self) -> list[Rows]:
        return copies_of_rows(self.step.states)

    def restore(self) -> None:
        """Restore output, inputs, recurrent rows and rings to what the replay left.

        Attention caches keep what the last run wrote. Tries each part, then raises the first error.
        """
        errors: list[Exception] = []
        for restore in (
            self._restore_output,
            *(part.restore for part in (self._after, self.python, self._random_after) if part is not None),
        ):
            try:
                restore()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _restore_output(self) -> None:
        # There are fewer copies where saving failed half-way.
        for served, copy in zip(self._served, self.output, strict=False):
            served.copy_(copy)


class QuarantinedStep:
    """A step that runs once, without its graph; until it has succeeded, it can be restored for a replay."""

    def __init__(self, step: Step, shortage: MemoryShortage) -> None:
        """Copy the state before the run; raises StepNotCheckable if there is no room for that and for the run."""
        needed = sum(rows.nbytes for rows in step.states)
        needed += sum(tensor.numel() * tensor.element_size() for tensor in step.inputs.values())
        if (reason := shortage(needed)) is not None:
            raise StepNotCheckable(reason)
        self._step = step
        self._before, self._python = Snapshot(step.inputs, step.states), PythonState(step.objects)

    def prepare(self) -> None:
        self._before.make_readable()

    def run(self) -> Any:
        output = self._step.eager()
        self._before.restore_block_tables()  # undoes `make_readable`; all else is this step's result
        return output

    def restore(self) -> None:
        self._before.restore()
        self._python.restore()


def run_quarantined(make: Callable[[], QuarantinedStep]) -> Any:
    """Return the result of the step that *make* makes, run on all ranks; an error leaves it as before."""
    step: QuarantinedStep | None = None

    def prepare() -> None:
        nonlocal step
        step = make()  # in here, since it may fail on one rank alone
        step.prepare()

    try:
        # For the type checker: a run follows a `prepare` that succeeded, and then there is a step.
        return ranks.run_collectively(prepare, lambda: step.run() if step is not None else None, ranks.step_timeout())
    except Exception as error:
        if step is not None and not is_gpu_lost(error):
            step.restore()
        raise


class FirstRun:
    """The first eager run, compared with the replay."""

    def __init__(self, checked: CheckedStep, *, locate: bool) -> None:
        """Run the model; every rank of the group calls this.

        *locate*: look for the first layer that the replay has written differently.
        """
        step = checked.step
        # Errors of the search are ignored: this rank has to run, since the others wait for it in the collectives.
        of_replay: list[tuple[str, Tensor]] = []
        with suppress(Exception):
            of_replay = step.caches() if locate else []
        self.output, self.failure = run_again(checked)
        self.layer: str | None = None
        with suppress(Exception):
            self.layer = first_difference(of_replay, step.caches()) if of_replay else None
        self.rows = step.real_rows()
        # A run that failed half-way has no output, which differs in every row.
        self.errors = row_errors(checked.output, self.output, self.rows)
        self.states = checked.states_now()
        self.worst = max(_worst(self.errors), state_error(checked.states_of_replay, self.states))


class FurtherRun:
    """An eager run after the first one, compared with that and with the replay."""

    def __init__(self, checked: CheckedStep, first: FirstRun) -> None:
        """Run the model; every rank of the group calls this."""
        self.changed_inputs: list[str] = []
        with suppress(Exception):  # as in the first run
            self.changed_inputs = checked.before.changed_inputs()
        output, self.failure = run_again(checked)
        rows, states = first.rows, checked.states_now()
        alike = rows_drawn_alike(output, first.output, rows)
        # Rows in which eager runs draw other tokens are no measure; a number above 0 says that they differ at all.
        own = row_errors(output, first.output, rows)
        self.noise = max(_worst(own[alike]), 0.0 if alike.all() else _LEAST_NOISE, state_error(states, first.states))
        of_first, of_this = first.errors, row_errors(checked.output, output, rows)
        if self.noise > 0:
            # A last bit may decide on another token, and then all that follows from it differs.
            alike &= rows_drawn_alike(checked.output, first.output, rows) & rows_drawn_alike(
                checked.output, output, rows
            )
            of_first, of_this = of_first[alike], of_this[alike]
        of_states = state_error(checked.states_of_replay, first.states), state_error(checked.states_of_replay, states)
        self.worst = min(max(_worst(of_first), of_states[0]), max(_worst(of_this), of_states[1]))
        """The largest error of the replay, relative to the run that it is nearer to."""


def error_as_captured(checked: CheckedStep, launch: Mapping[str, int], otherwise: float) -> float:
    """Return the error of the replay relative to a run with the capture's numbers, or *otherwise*, if that is less."""
    output, failure = run_again(checked, launch)
    if failure is not None:
        return otherwise
    rows = checked.step.real_rows()
    error = max(
        _worst(row_errors(checked.output, output, rows)), state_error(checked.states_of_replay, checked.states_now())
    )
    return min(otherwise, error)


def run_again(checked: CheckedStep, launch: Mapping[str, int] | None = None) -> tuple[list[Tensor], StepError | None]:
    """Run the step eagerly; return no tensors, and vLLM's error, if it cannot run without its graph."""
    try:
        return checked.run_eagerly(launch), None
    except StepError as error:
        clear_traceback(error)
        return [], StepError(str(error))


def _worst(errors: Tensor) -> float:
    return float(errors.max()) if len(errors) else 0.0
