"""Progress bars of engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_graphfix.verify.engine.job import Job

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID


class EngineBars:
    """Shows the last line of each engine's log; without a terminal, a line for each engine that has ended."""

    def __init__(self, console: Console, jobs: Sequence[Job]) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.table import Column

        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[doing]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            console=console,
            transient=True,
            expand=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        for job in jobs:
            self._task(job)

    def _task(self, job: Job) -> TaskID:
        """Return the bar of *job*; one that was not announced gets it now."""
        if job.name not in self._tasks:
            self._tasks[job.name] = self._progress.add_task(job.name, start=False, doing="waits", total=1)
        return self._tasks[job.name]

    @contextmanager
    def display(self) -> Iterator[None]:
        with self._progress:
            yield

    def doing(self, job: Job, line: str) -> None:
        task = self._task(job)
        self._progress.start_task(task)
        self._progress.update(task, doing=line)

    def done(self, job: Job, how: str) -> None:
        self._progress.update(self._task(job), completed=1, doing=how)
        if not self._console.is_terminal:
            self._console.print(f"{job.name}: {how}", highlight=False, markup=False)
