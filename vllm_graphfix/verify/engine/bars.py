"""Progress bars of engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_graphfix.verify.engine.job import Job

if TYPE_CHECKING:
    from rich.console import Console


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
        self._tasks = {job.name: self._progress.add_task(job.name, start=False, doing="waits", total=1) for job in jobs}

    @contextmanager
    def display(self) -> Iterator[None]:
        with self._progress:
            yield

    def doing(self, job: Job, line: str) -> None:
        task = self._tasks[job.name]
        self._progress.start_task(task)
        self._progress.update(task, doing=line)

    def done(self, job: Job, how: str) -> None:
        self._progress.update(self._tasks[job.name], completed=1, doing=how)
        if not self._console.is_terminal:
            self._console.print(f"{job.name}: {how}", highlight=False, markup=False)
