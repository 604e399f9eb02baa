"""The runs of one step: its replay, and eager ones from where the replay began.

It says what they left and how far apart that is, and puts all back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graphfix.shadow import ranks
from vllm_graphfix.shadow.comparison import row_errors, rows_drawn_alike, state_error, tensors
from vllm_graphfix.shadow.failures import StepError, UnfitStep, clear_traceback, description, is_of_the_device
from vllm_graphfix.shadow.layers import first_difference
from vllm_graphfix.shadow.snapshot import PythonState, RandomState, Rows, Snapshot, StateRows, copies_of_rows
from vllm_graphfix.shadow.verdict import Graph

if TYPE_CHECKING:
    from torch import Tensor

_COPIES = 4
"""The number of copies of the recurrent state at once: before the replay, after it, after each of two eager runs."""
_LEAST_NOISE = 1e-30
Lacks = Callable[[int], "str | None"]
"""Why there is no room for copies of so many bytes and for a run without the graph; None if there is."""


class Step(NamedTuple):
    """A replay that is due, in terms of torch alone."""

    graph: Graph
    eager: Callable[[], Any]
    """The same model on the same inputs and attention metadata, no graph of any kind replayed."""
    real_rows: Callable[[], int]
    """How many rows, the first ones, are no padding; may wait for the device."""
    inputs: Mapping[str, Tensor]
    objects: Sequence[object]
    """Attention metadata and the like, whose attributes a run may set."""
    states: Sequence[StateRows]
    caches: Callable[[], list[tuple[str, Tensor]]]
    """What the layers have in their caches for this step's tokens, in the model's order: copies."""
    launches: Sequence[Mapping[str, int]] = ()
    """What the capture may have been told in place of what this step tells the kernels: numbers in *objects*, by
    attribute."""
    results: Callable[[], Any] | None = None
    """What a run has left, where that is not what it returns, in tensors whose first rows are the real ones; of
    *inputs* and *states*."""


class Replay:
    """vLLM's replay of a step, and what came of it the first time."""

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
    """A step, what it found, and what came of it."""

    def __init__(self, step: Step, lacks: Lacks) -> None:
        needed = _COPIES * sum(rows.nbytes for rows in step.states) * (1 if step.results is None else 2)
        needed += 2 * sum(tensor.numel() * tensor.element_size() for tensor in step.inputs.values())
        if (reason := lacks(needed)) is not None:
            raise UnfitStep(reason)
        self.step = step
        self.python = PythonState(step.objects)
        self.random = RandomState()
        self.before = Snapshot(step.inputs, step.states)
        self.output: list[Tensor] = []
        self._served: list[Tensor] = []
        self._after: Snapshot | None = None
        self._random_after: RandomState | None = None

    def replayed(self, output: Any) -> None:
        # A graph's output is memory of its pool, by address alone, and what is served is at that address.
        self._served = list(tensors(output)) if self.step.results is None else []
        self.output = self._results(output)
        self._after = Snapshot(self.step.inputs, self.step.states)
        self._random_after = RandomState()

    def eagerly(self, launch: Mapping[str, int] | None = None) -> list[Tensor]:
        """The tensors of one eager run from where the replay began. Raises StepError for an error of vLLM's own in it.

        *launch*: told these numbers, which the capture was told, and by which some kernels cut their work.
        """

        def prepare() -> None:
            self._put_inputs_back()
            self.before.make_readable()
            self.python.set_numbers(launch or {})

        return self._results(ranks.paired(prepare, self._run))

    def _run(self) -> Any:
        try:
            return self.step.eager()
        except Exception as error:
            if is_of_the_device(error):
                raise
            raise StepError(description(error)) from error

    def again(self, replay: Callable[[], Any]) -> float:
        """The error of one more replay from where the first one began, by the first."""
        output = self._results(ranks.paired(self._put_inputs_back, replay))
        rows = self.step.real_rows()
        return max(_worst(row_errors(output, self.output, rows)), state_error(self.states_now(), self.states_of_replay))

    def _put_inputs_back(self) -> None:
        self.before.put_back()
        self.python.put_back()
        self.random.put_back()

    def _results(self, output: Any) -> list[Tensor]:
        return [tensor.clone() for tensor in tensors(output if self.step.results is None else self.step.results())]

    @property
    def states_of_replay(self) -> list[Rows]:
        return self._after.states if self._after is not None else []

    def states_now(self) -> list[Rows]:
        return copies_of_rows(self.step.states)

    def put_back(self) -> None:
        """Puts everything back to what the replay has left. All is tried, and the first error raised."""
        failed: list[Exception] = []
        for put_back in (
            self._put_output_back,
            *(kept.put_back for kept in (self._after, self.python, self._random_after) if kept is not None),
        ):
            try:
                put_back()
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _put_output_back(self) -> None:
        for served, kept in zip(self._served, self.output, strict=False):
            served.copy_(kept)


class QuarantinedStep:
    """A step that is run without its graph, and not twice.

    Until it has come to its end, it can be put back as the graph would have found it.
    """

    def __init__(self, step: Step, lacks: Lacks) -> None:
        needed = sum(rows.nbytes for rows in step.states)
        needed += sum(tensor.numel() * tensor.element_size() for tensor in step.inputs.values())
        if (reason := lacks(needed)) is not None:
            raise UnfitStep(reason)
        self._step = step
        self._before, self._python = Snapshot(step.inputs, step.states), PythonState(step.objects)

    def prepare(self) -> None:
        self._before.make_readable()

    def run(self) -> Any:
        output = self._step.eager()
        self._before.put_block_tables_back()
        return output

    def put_back(self) -> None:
        self._before.put_back()
        self._python.put_back()


class FirstRun:
    """The first eager run, compared with the replay."""

    def __init__(self, checked: CheckedStep, *, locate: bool) -> None:
        step = checked.step
        # What one rank cannot look at must not keep it from the run, in whose collectives the others wait.
        of_replay: list[tuple[str, Tensor]] = []
        with suppress(Exception):
            of_replay = step.caches() if locate else []
        self.output, self.failure = run_again(checked)
        self.layer: str | None = None
        with suppress(Exception):
            self.layer = first_difference(of_replay, step.caches()) if of_replay else None
        self.rows = step.real_rows()
        # What failed half-way has no output: that differs in every row.
        self.errors = row_errors(checked.output, self.output, self.rows)
        self.states = checked.states_now()
        self.worst = max(_worst(self.errors), state_error(checked.states_of_replay, self.states))


class SecondRun:
    """The second eager run, compared with both."""

    def __init__(self, checked: CheckedStep, first: FirstRun) -> None:
        self.changed_inputs: list[str] = []
        with suppress(Exception):
            self.changed_inputs = checked.before.changed_inputs()
        output, self.failure = run_again(checked)
        rows, states = first.rows, checked.states_now()
        alike = rows_drawn_alike(output, first.output, rows)
        # Where eager runs draw other tokens, those are no measure; that they differ at all is told by a number above 0.
        own = row_errors(output, first.output, rows)
        self.noise = max(_worst(own[alike]), 0.0 if alike.all() else _LEAST_NOISE, state_error(states, first.states))
        errors, still = first.errors, row_errors(checked.output, output, rows)
        if self.noise > 0:
            # A token may be another one for want of the last bit, and then all that follows from it is.
            alike &= rows_drawn_alike(checked.output, first.output, rows) & rows_drawn_alike(
                checked.output, output, rows
            )
            errors, still = errors[alike], still[alike]
        of_states = state_error(checked.states_of_replay, first.states), state_error(checked.states_of_replay, states)
        self.worst = min(max(_worst(errors), of_states[0]), max(_worst(still), of_states[1]))
        """The largest error of the replay, by the run that it is nearer to."""


def as_captured(checked: CheckedStep, launch: Mapping[str, int], otherwise: float) -> float:
    """The error of the replay against a run that is told what the capture was told, or *otherwise*, if that is less."""
    output, failure = run_again(checked, launch)
    if failure is not None:
        return otherwise
    rows = checked.step.real_rows()
    error = max(
        _worst(row_errors(checked.output, output, rows)), state_error(checked.states_of_replay, checked.states_now())
    )
    return min(otherwise, error)


def run_again(checked: CheckedStep, launch: Mapping[str, int] | None = None) -> tuple[list[Tensor], StepError | None]:
    """No tensors where the step cannot be run without its graph."""
    try:
        return checked.eagerly(launch), None
    except StepError as error:
        clear_traceback(error)
        return [], StepError(str(error))


def _worst(errors: Tensor) -> float:
    return float(errors.max()) if len(errors) else 0.0
