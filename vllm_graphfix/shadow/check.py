"""One replay that is due for a check: run once more without the graph, compared, and everything put back."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from vllm_graphfix.log import logger
from vllm_graphfix.shadow import process, ranks
from vllm_graphfix.shadow.comparison import drawn_alike, row_errors, state_error, tensors, threshold
from vllm_graphfix.shadow.layers import first_difference
from vllm_graphfix.shadow.rate import NEVER, Action, Rate
from vllm_graphfix.shadow.schedule import Schedule
from vllm_graphfix.shadow.snapshot import PythonState, RandomState, Rows, Snapshot, StateRows, fits, kept_rows
from vllm_graphfix.shadow.verdict import Graph, Mismatch, Results

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

CONFIRMATIONS = 2
"""Mismatches of one graph, each confirmed by a second eager run, after which it is put into quarantine."""
_LEARNING = 8
"""First checks that measure eager against eager, and look for inputs that a run changed, also where nothing differs."""


_COPIES = 4
"""Of the recurrent state, at once: before the replay, after it, after each of two eager runs."""
_LEAST_NOISE = 1e-30
_LOUD = 0.01
"""Beyond this error of eager runs among themselves a step says nothing: eight times as much would pass for rounding."""
_ROUNDING = 0.05
"""The largest error that a kernel which cuts its work otherwise can explain, of a row's largest value, behind all layers."""
_SOUGHT = 2
"""Checks of a wrong graph in which its first wrong layer is sought."""
_GIVEN_UP = 3
"""Steps of a graph in quarantine, one after the other, that cannot be run without it, after which it is replayed again."""


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
    """What the capture may have been told in place of what this step tells the kernels: numbers in *objects*, by attribute."""
    results: Callable[[], Any] | None = None
    """What a run has left, where that is not what it returns, in tensors whose first rows are the real ones; of *inputs* and *states*."""


class UnfitStep(Exception):  # noqa: N818 - no error: the next step may be checked
    """This step cannot be checked."""


class UnsafeError(Exception):
    """No step of this model may run twice; the message says why."""


class _StepError(Exception):
    """vLLM's own error in a run of a step that its graph has gone through: graph and attention metadata are of two kinds."""


class Shadow:
    """The shadow check of one process."""

    def __init__(self, rate: Rate, action: Action) -> None:
        self.schedule = Schedule(rate)
        self.action = action
        self.results = Results()
        self.quarantined: set[Hashable] = set()
        self._known: dict[Hashable, _Known] = {}
        self._noise = 0.0
        """The largest error among runs of one step so far, of any graph: a graph of its own would be known by too few. Never above `_LOUD`,
        so that one step blinds no other.
        """
        self._replayed_in_quarantine = self._was_loud = False
        self._over = False
        """Nothing is checked any more."""
        self.stopped: str | None = None
        """The failure that it is over for."""

    def stop(self, reason: str, error: Exception | None = None) -> None:
        """For good, with one warning. What is in quarantine stays there."""
        if self._over:
            return
        self._over = True
        self.schedule.due = NEVER
        if isinstance(error, UnsafeError):
            process.refuse(str(error))
        else:
            self.stopped = reason
            logger.warning("graphfix: the shadow check is now off; serving goes on: %s", reason, exc_info=error)

    def check(self, key: Hashable, describe: Callable[[], Step], replay: Callable[[], Any]) -> Any:
        """The result of *replay*, vLLM's own, compared with an eager run of the same step. Raises what *replay* raises, and nothing else.

        *describe* tells the step of the graph *key*; what it raises turns the check off. All ranks of the group are here at the same
        step, and each of them takes part in every agreement, whatever failed in it: one that did not would leave the others waiting.
        """
        begun = time.perf_counter()
        run, failed = _tried(lambda: _Run(describe()))
        if not self._all_ready(failed, begun):
            return replay()
        output = replay()
        if run is None:  # the ranks could not agree, and this is not reached
            return output
        self._compare(key, run, replay, _tried(lambda: run.replayed(output))[1])
        _, failed = _tried(run.put_back)
        if failed is not None:
            failed = RuntimeError(
                f"the changes of the eager run could not be undone ({_told(failed)}): requests in this step may be wrong"
            )
            if self._over:  # which has told of another failure, and will not tell of this one
                logger.warning("graphfix: %s", failed)
        cost = time.perf_counter() - begun
        self.results.seconds += cost
        self._plan_next(cost, failed)
        return output

    def without_graph(self, key: Hashable, describe: Callable[[], Step], replay: Callable[[], Any]) -> Any:
        """The result of a step whose graph is in quarantine; by its graph if it cannot be run without, which is what stock does."""
        known = self._known.setdefault(key, _Known())
        begun, failed = _tried(lambda: _Instead(describe()))
        if not _anywhere(failed) and begun is not None:
            output, failed = _tried(begun.run)
            if failed is not None and _is_lost(failed):
                raise failed
            if not _anywhere(failed):  # or some ranks would replay what others have run
                known.failed = 0
                return output
            _, worse = _tried(begun.put_back)
            failed = worse or failed
        if not self._replayed_in_quarantine:
            self._replayed_in_quarantine = True
            logger.warning(
                "graphfix: a step whose graph is in quarantine cannot run without it, so it is replayed as on stock: %s",
                _told(failed) if failed else "it failed on another rank of the same group",
            )
        known.failed += 1
        if known.failed == _GIVEN_UP:
            self.quarantined.discard(key)
            self.results.given_up += 1
            logger.warning(
                "graphfix: %s is replayed again as on stock, although it was found wrong: %s steps in a row cannot run without it",
                known.graph.name if known.graph else key,
                _GIVEN_UP,
            )
        return replay()

    def _agree(self, failed: Exception | None, *values: float) -> tuple[float, ...] | None:
        """Of each value the largest of all ranks; None, and the check is off, if a step before failed on one of them."""
        try:
            anywhere, *agreed = ranks.largest(failed is not None, *values)
        except Exception as error:
            anywhere, agreed, failed = 1.0, [], failed or error
        if anywhere:
            self.stop(_told(failed) if failed else "it failed on another rank of the same group", failed)
            return None
        return tuple(agreed)

    def _all_ready(self, failed: Exception | None, begun: float) -> bool:
        """Whether no rank has a reason against checking this step, which was *begun* at that time of the clock."""
        unfit = isinstance(failed, UnfitStep)
        agreed = self._agree(None if unfit else failed, unfit)
        if agreed is None:
            return False
        if agreed[0]:
            self._leave_out(begun)
            return False
        return True

    def _leave_out(self, begun: float) -> None:
        cost = time.perf_counter() - begun
        self.results.skipped += 1
        self.results.seconds += cost
        if not self._over and (agreed := self._agree(None, self.schedule.wanted_later(cost))):
            self.schedule.checked(int(agreed[0]))

    def _plan_next(self, cost: float, failed: Exception | None) -> None:
        if not self._over and (agreed := self._agree(failed, self.schedule.wanted(cost))):
            self.schedule.checked(int(agreed[0]))

    def _compare(self, key: Hashable, run: _Run, replay: Callable[[], Any], failed: Exception | None) -> None:
        known = self._known.setdefault(key, _Known())
        locate = known.wants_layer
        first, error = _tried(lambda: _First(run, locate=locate))
        learning = self.results.checks < _LEARNING or not known.checks
        agreed = self._agree(failed or error, first.worst if first else 0.0)
        if agreed is None or first is None:
            return
        of_first = agreed[0]
        known.sought += locate
        if of_first <= threshold(self._noise) and not learning:
            self._count(known)
            return
        second, error = _tried(lambda: _Second(run, first, self._noise))
        if second and (first.failure is None) != (second.failure is None):  # by chance, then, and not by the graph
            error = first.failure or second.failure
        agreed = self._agree(error, second.noise if second else 0.0, second.worst if second else 0.0)
        if agreed is None or second is None:
            return
        self.results.changed_inputs.update(second.changed_inputs)
        if not agreed[0] <= _LOUD:
            self._say_nothing(run, replay, agreed[0], of_first)
            return
        self._count(known)
        self._learn(agreed[0])
        if agreed[1] > threshold(self._noise) and not self._is_explained(run, replay, second.worst, agreed[1]):
            here = second.worst > threshold(self._noise)
            self._take(
                key,
                Mismatch(
                    run.step.graph,
                    first.rows,
                    tuple(first.errors.tolist()) if here else (),
                    self._noise,
                    first.layer,
                    self.results.checks,
                    time.time(),
                    here,
                    _told(first.failure) if first.failure is not None else None,
                ),
            )

    def _count(self, known: _Known) -> None:
        known.checks += 1
        self.results.checks += 1

    def _learn(self, noise: float) -> None:
        self._noise = self.results.noise = max(self._noise, noise)

    def _say_nothing(self, run: _Run, replay: Callable[[], Any], noise: float, of_first: float) -> None:
        """Runs without the graph that differ that much say nothing of a replay; others of the same graph may."""
        self.results.skipped += 1
        if not of_first:
            reason = "a first run of a step without its graph equals the replay and a second one does not: the model consumes what it is given"
            self.stop(reason, UnsafeError(reason))
        elif not self._was_loud:
            self._was_loud = True
            logger.warning(
                "graphfix: two runs of one step without its graph differ by %.3g of their largest value; such a step says nothing about its replay",
                noise,
            )
        # In the caches is then what the replay leaves, and not the last run.
        self._tried_by_all(lambda: run.again(replay))

    def _is_explained(self, run: _Run, replay: Callable[[], Any], here: float, anywhere: float) -> bool:
        """Whether the replay, as far apart as rounding may be, differs from run to run, or is launched as at the capture.

        *here*: its error on this rank. In the caches is then what the replay leaves, and otherwise what an eager run does.
        """
        if not anywhere <= _ROUNDING:
            return False
        again = self._tried_by_all(lambda: run.again(replay))
        if again is None:
            return True
        if again <= _LOUD:
            self._learn(again)
        if anywhere <= threshold(self._noise):
            return True
        for launch in run.step.launches:
            then = self._tried_by_all(functools.partial(_as_captured, run, launch, here))
            if then is None or then <= threshold(self._noise):
                self._tried_by_all(lambda: run.again(replay))
                return True
        self._tried_by_all(lambda: float(_run_again(run)[1] is not None))
        return False

    def _tried_by_all(self, error_of: Callable[[], float]) -> float | None:
        """The largest of all ranks; None, and the check is off, where it fails on one."""
        error, failed = _tried(error_of)
        agreed = self._agree(failed, error if error is not None else 0.0)
        return agreed[0] if agreed is not None else None

    def _take(self, key: Hashable, mismatch: Mismatch) -> None:
        known = self._known[key]
        known.graph = mismatch.graph
        known.mismatches += 1
        self.results.add(mismatch)
        if known.mismatches == 1:
            logger.warning("graphfix: %s", mismatch.sentence())
        elif mismatch.first_layer and not known.layer:
            known.layer = mismatch.first_layer
            logger.warning("graphfix: %s first goes wrong in %s, or just before it", mismatch.graph.name, known.layer)
        if self.action is Action.QUARANTINE and known.mismatches == CONFIRMATIONS:
            self.quarantined.add(key)
            self.results.quarantined.append(mismatch.graph)
            logger.warning(
                "graphfix: %s is no longer replayed; its steps now run without a graph, more slowly",
                mismatch.graph.name,
            )


class _Known:
    """What is known of a graph."""

    def __init__(self) -> None:
        self.checks = self.mismatches = 0
        self.graph: Graph | None = None
        """Where it was found wrong."""
        self.failed = 0
        """Steps in quarantine that could not be run without it, since one that could."""
        self.layer: str | None = None
        """Where it goes wrong first."""
        self.sought = 0
        """Checks in which that layer was sought, with copies of all caches."""

    @property
    def wants_layer(self) -> bool:
        return bool(self.mismatches) and self.layer is None and self.sought < _SOUGHT


class _Run:
    """A step, what it found, and what came of it."""

    def __init__(self, step: Step) -> None:
        needed = _COPIES * sum(rows.nbytes for rows in step.states) * (1 if step.results is None else 2)
        needed += 2 * sum(tensor.numel() * tensor.element_size() for tensor in step.inputs.values())
        if not fits(needed):
            raise UnfitStep(f"copies of its inputs and recurrent state need {needed >> 20} MiB, which are not free")
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
        """The tensors of one eager run from where the replay began. Raises _StepError for an error of vLLM's own in it.

        *launch*: told these numbers, which the capture was told, and by which some kernels cut their work.
        """
        self._begin_anew()
        self.before.make_readable()
        self.python.set_numbers(launch or {})
        try:
            output = self.step.eager()
        except Exception as error:
            if _of_the_device(error):
                raise
            raise _StepError(_told(error)) from error
        return self._results(output)

    def again(self, replay: Callable[[], Any]) -> float:
        """The error of one more replay from where the first one began, by the first."""
        self._begin_anew()
        output = self._results(replay())
        rows = self.step.real_rows()
        return max(_worst(row_errors(output, self.output, rows)), state_error(self.states_now(), self.states_of_replay))

    def _begin_anew(self) -> None:
        self.before.put_back()
        self.python.put_back()
        self.random.put_back()

    def _results(self, output: Any) -> list[Tensor]:
        return [tensor.clone() for tensor in tensors(output if self.step.results is None else self.step.results())]

    @property
    def states_of_replay(self) -> list[Rows]:
        return self._after.states if self._after is not None else []

    def states_now(self) -> list[Rows]:
        return kept_rows(self.step.states)

    def put_back(self) -> None:
        """As the replay has left it. All is tried, and the first error raised."""
        failed: list[Exception] = []
        for put_back in (
            self._output_back,
            *(kept.put_back for kept in (self._after, self.python, self._random_after) if kept is not None),
        ):
            try:
                put_back()
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _output_back(self) -> None:
        for served, kept in zip(self._served, self.output, strict=False):
            served.copy_(kept)


class _Instead:
    """A step that is run without its graph, and not twice; until it has come to its end, as the graph would have found it."""

    def __init__(self, step: Step) -> None:
        needed = sum(rows.nbytes for rows in step.states)
        if not fits(needed):
            raise UnfitStep(f"the recurrent state of its rows needs {needed >> 20} MiB, which are not free")
        self._step = step
        self._before, self._python = Snapshot(step.inputs, step.states), PythonState(step.objects)

    def run(self) -> Any:
        self._before.make_readable()
        output = self._step.eager()
        self._before.put_block_tables_back()
        return output

    def put_back(self) -> None:
        self._before.put_back()
        self._python.put_back()


class _First:
    """The first eager run, compared with the replay."""

    def __init__(self, run: _Run, *, locate: bool) -> None:
        step = run.step
        # What one rank cannot look at must not keep it from the run, in whose collectives the others wait.
        of_replay = (_tried(step.caches)[0] if locate else None) or []
        self.output, self.failure = _run_again(run)
        self.layer = _tried(lambda: first_difference(of_replay, step.caches()))[0] if of_replay else None
        self.rows = step.real_rows()
        # What failed half-way has no output: that differs in every row.
        self.errors = row_errors(run.output, self.output, self.rows)
        self.states = run.states_now()
        self.worst = max(_worst(self.errors), state_error(run.states_of_replay, self.states))


class _Second:
    """The second eager run, compared with both. *noise*: that earlier checks have seen."""

    def __init__(self, run: _Run, first: _First, noise: float) -> None:
        self.changed_inputs = _tried(run.before.changed_inputs)[0] or []
        output, self.failure = _run_again(run)
        rows, states = first.rows, run.states_now()
        alike = drawn_alike(output, first.output, rows)
        # Where eager runs draw other tokens, those are no measure; that they differ at all is told by a number above 0.
        own = row_errors(output, first.output, rows)
        self.noise = max(_worst(own[alike]), 0.0 if alike.all() else _LEAST_NOISE, state_error(states, first.states))
        errors, still = first.errors, row_errors(run.output, output, rows)
        if max(noise, self.noise) > 0:
            # A token may be another one for want of the last bit, and then all that follows from it is.
            alike &= drawn_alike(run.output, first.output, rows) & drawn_alike(run.output, output, rows)
            errors, still = errors[alike], still[alike]
        of_states = state_error(run.states_of_replay, first.states), state_error(run.states_of_replay, states)
        self.worst = min(max(_worst(errors), of_states[0]), max(_worst(still), of_states[1]))
        """Of the replay, by the run that it is nearer to."""


def _as_captured(run: _Run, launch: Mapping[str, int], otherwise: float) -> float:
    """The error of the replay against a run that is told what the capture was told, or *otherwise*, if that is less."""
    output, failure = _run_again(run, launch)
    if failure is not None:
        return otherwise
    rows = run.step.real_rows()
    error = max(_worst(row_errors(run.output, output, rows)), state_error(run.states_of_replay, run.states_now()))
    return min(otherwise, error)


def _run_again(run: _Run, launch: Mapping[str, int] | None = None) -> tuple[list[Tensor], _StepError | None]:
    """No tensors where the step cannot be run without its graph."""
    try:
        return run.eagerly(launch), None
    except _StepError as error:
        _let_go(error)
        return [], _StepError(str(error))


def _anywhere(failed: Exception | None) -> bool:
    """Whether something failed on any rank of the group, or they could not agree."""
    try:
        return bool(ranks.largest(failed is not None)[0])
    except Exception:
        return True


def _of_the_device(error: Exception) -> bool:
    """Whether an error is of the GPU or of its memory: of the machine, and not of the step."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or _is_lost(error)


def _is_lost(error: Exception) -> bool:
    """Whether nothing runs on the GPU any more in this process."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(error)


def _worst(errors: Tensor) -> float:
    return float(errors.max()) if len(errors) else 0.0


def _tried(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        _let_go(error)
        return None, error


def _let_go(error: BaseException | None) -> None:
    """Of the tensors in the frames that an error has come through: on a GPU they would be held until Python looks for cycles."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, (UnfitStep, _StepError)) else f"{type(error).__name__}: {text}"
