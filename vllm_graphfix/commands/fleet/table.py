"""A fleet in tables and colours, once or again and again."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_graphfix.commands.fleet.engine import BAD, Engine, user_name
from vllm_graphfix.commands.fleet.prometheus import SeriesEngine
from vllm_graphfix.commands.fleet.survey import Fleet, FleetError
from vllm_graphfix.commands.fleet.unrecorded import Unrecorded
from vllm_graphfix.fix import State
from vllm_graphfix.records import Liveness, path_text
from vllm_graphfix.settings.decision import BUCKETS
from vllm_graphfix.settings.environment import STATUS_DIR
from vllm_graphfix.text import ago

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_SEVERAL = 3
"""Engines from which on each has a line instead of its details."""
_NAMED = 5
"""Engines that are named of those of which the same is wrong."""
_WRONG = "WRONG"
_COUNTING = frozenset({State.ACTIVE.value, State.OBSERVING.value})
_SHORTEST_LOOK, _LONGEST_LOOK = 0.1, 86400.0
_SERVE = re.compile(r"^\S*python\S* (-m vllm\.entrypoints\.cli\.main|\S*/vllm) ")
"""How the operator's `vllm serve` reads in a list of processes."""
_STATUS_COLOURS = {
    "in order": "green",
    "starting": "cyan",
    "not in order": "bold red",
    "stopped": "bold red",
    "ended": "dim",
    "silent": "dim",
}
_STATE_COLOURS = {
    State.ACTIVE.value: "bold green",
    State.OBSERVING.value: "cyan",
    State.OFF.value: "yellow",
    State.NOT_IN_CANARY.value: "yellow",
    State.NOT_NEEDED.value: "dim",
    State.WAITING.value: "dim",
    State.UNKNOWN.value: "yellow",
    **dict.fromkeys(BAD, "bold red"),
}
_LIVENESS_COLOURS = {Liveness.ALIVE: "green", Liveness.DEAD: "red", Liveness.SILENT: "yellow"}


def render(fleet: Fleet, *, everything: bool = False, engine: str | None = None) -> RenderableType:
    """One line of verdict, then what is wrong; the details of one engine, or of all, if they are asked for.

    A single engine is shown whole. *engine*: a name, or the beginning of several. Raises FleetError where no engine has
    it.
    """
    from rich.console import Group

    if engine is not None:
        # A name may be the beginning of another one: `…/10.0.0.7:80` of `…/10.0.0.7:8000`.
        engines = [each for each in fleet.engines if each.name == engine]
        engines = engines or [each for each in fleet.engines if each.name.startswith(engine)]
        if not engines:
            there = ", ".join(each.name for each in fleet.engines[:5]) or "none"
            raise FleetError(f"no engine whose name begins with {engine!r}; there are: {there}")
        return Group(*(part for each in engines for part in _engine_details(each)))
    if everything or len(fleet.engines) < _SEVERAL:
        return Group(*_verdict(fleet), _details(fleet))
    return Group(*_verdict(fleet), *_summary_lines(fleet))


def _verdict(fleet: Fleet) -> list[RenderableType]:
    """Count the engines, and those that have the fixes."""
    from rich.text import Text

    if not fleet.engines:
        return []
    live = [engine for engine in fleet.engines if engine.live or engine.status == "starting"]
    hosts = len({host for engine in live for host in engine.values_of("host")})
    kinds = Counter(map(kind, fleet.engines))
    wrong = sum(kind(engine) == _WRONG for engine in live)
    parts = [
        f"{kinds[each]} {each}" for each in ("fixed", "counting", "stock", "without graphs", "starting") if kinds[each]
    ]
    where = "" if fleet.prometheus is not None else f" on {_counted_noun(hosts, 'host')}"
    line = Text(f"{_counted_noun(len(live), 'engine')}{where}: ", style="bold")
    none = "none is heard from" if kinds["silent"] else "none is running"
    line.append(", ".join(parts) if live else none, style="bold")
    if wrong:
        line.append(f"{', ' if parts else ''}{wrong} {_WRONG}", style="bold red")
    if kinds[_WRONG] > wrong:
        line.append(f"; {kinds[_WRONG] - wrong} not running and {_WRONG}", style="bold red")
    if fleet.skipped:
        s = "" if fleet.skipped == 1 else "s"
        what = "ANSWERS MAY LACK ENGINES" if fleet.prometheus else f"{fleet.skipped} file{s} or folder{s} NOT READ"
        line.append(f"; {what}", style="bold red")
    if fleet.wrong:
        line.append(f"; {_counted_noun(len(fleet.wrong), 'engine')} NOT READABLE", style="bold red")
    for gone in ("silent", "ended"):
        if kinds[gone]:
            line.append(f"; {kinds[gone]} {gone}", style="dim")
    line.append(f"   {time.strftime('%H:%M:%S')}", style="dim")
    return [line]


def _counted_noun(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def kind(engine: Engine) -> str:
    """Sum an engine up for its operator, in a word or two."""
    if engine.status in ("not in order", "stopped") or (engine.wrong and not engine.live):
        return _WRONG
    if not engine.live:
        return engine.status
    if engine.starting:
        return "starting"
    if engine.graphs is False:
        return "without graphs"
    states = engine.states_of_fixes
    if State.ACTIVE.value in states:
        return "fixed"
    return "counting" if State.OBSERVING.value in states else "stock"


_SINCE = re.compile(
    r"(?P<state>not heard from|record not written|in one step) for [^:]*: [^.]*"
    r"|(?P<stop>stopped by vllm-graphfix) [^:]*"
    r"| \(\d[^()]*\)$"
)
"""The parts of a finding that differ between engines with the same trouble: durations, ranks and their number."""


def _summary_lines(fleet: Fleet) -> list[RenderableType]:
    """Return a line for each problem and each note, with the engines that have it."""
    from rich.text import Text

    engines_of: dict[tuple[str, str], list[tuple[Engine, str]]] = {}
    for engine in fleet.engines:
        for what in engine.wrong:
            engines_of.setdefault(
                ("✗", _SINCE.sub(lambda match: match["state"] or match["stop"] or "", what)), []
            ).append((engine, what))
    for engine in fleet.engines:
        for what in engine.notes if engine.live or engine.status == "starting" else ():
            engines_of.setdefault(("!", what), []).append((engine, what))
    lines: list[RenderableType] = []
    for (mark, alike), of_each in engines_of.items():
        (engine, what), *others = of_each
        text = f"{len(of_each)} engines: {alike}" if others else f"{_engine_label(engine)}: {what}"
        lines.append(Text(f"{mark} {text}", style="red" if mark == "✗" else "yellow"))
        if others and mark == "✗":
            hosts_of = [(each.name, ", ".join(each.values_of("host")[:2])) for each, _ in of_each[:_NAMED]]
            named = [" on ".join(filter(None, both)) for both in hosts_of]
            more = f" and {len(of_each) - _NAMED} more" if len(of_each) > _NAMED else ""
            lines.append(Text(f"  {', '.join(named)}{more}", style="dim"))
    for one in dict.fromkeys(one.reason for one in fleet.unrecorded):
        number = sum(each.reason == one for each in fleet.unrecorded)
        lines.append(
            Text(f"! {number} vLLM process{'es' if number > 1 else ''} without a record: {one}", style="yellow")
        )
    lines += [Text(f"✗ {what}", style="red") for what in fleet.wrong]
    lines += [Text(f"! {note}", style="yellow") for note in (*fleet.notes, *fleet.problems)]
    lines.append(Text("details: vllm-graphfix fleet ENGINE, or --all", style="dim"))
    return lines


def _engine_label(engine: Engine) -> str:
    of = [*engine.values_of("model")[:1], *engine.values_of("host")[:2], *_foreign(engine)]
    return f"{engine.name} ({', '.join(of)})" if of else engine.name


def _foreign(engine: Engine) -> list[str]:
    """The user whose records these are, if it is another one."""
    return [f"records of {user_name(engine.owner)}"] if engine.owner not in (None, os.geteuid()) else []


def _details(fleet: Fleet) -> RenderableType:
    from rich.console import Group
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    for engine in fleet.engines:
        parts += [*_engine_details(engine), Text()]
    if fleet.unrecorded:
        parts.append(Text.from_markup("[bold]vLLM processes without a record[/]"))
        reasons: dict[str, list[Unrecorded]] = {}
        for one in fleet.unrecorded:
            reasons.setdefault(one.reason, []).append(one)
        for reason, processes in reasons.items():
            mark = "[yellow]![/]" if all(one.elsewhere or one.starting for one in processes) else "[red]✗[/]"
            table = Table("pid", "user", "started", box=None, pad_edge=False, expand=True)
            table.add_column("command", ratio=1, no_wrap=True)  # the others keep their width
            for one in processes:
                table.add_row(str(one.pid), escape(one.user), ago(one.age), escape(_SERVE.sub("vllm ", one.command)))
            parts += [Padding(Text.from_markup(f"{mark} {escape(reason)}"), (0, 0, 0, 2)), Padding(table, (0, 0, 0, 4))]
        parts.append(Text())
    parts += [Text.from_markup(f"[red]✗ {escape(what)}[/]") for what in fleet.wrong]
    if not fleet.engines and fleet.prometheus is not None:
        parts.append(Text(f"{fleet.prometheus} has no series of vLLM's for these labels."))
    elif not (fleet.engines or fleet.unrecorded or fleet.wrong or fleet.skipped):
        parts.append(
            Text.from_markup(
                f"No records in {escape(path_text(fleet.folder))}, and no vLLM process on {escape(fleet.here.host)}. "
                f"Engines on other machines show up if {STATUS_DIR} names the same "
                "folder on shared storage there and here."
            )
        )
    parts += [Text.from_markup(f"[yellow]![/] {escape(note)}") for note in (*fleet.notes, *fleet.problems)]
    return Group(*parts)


def _engine_details(engine: Engine) -> list[RenderableType]:
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    if isinstance(engine, SeriesEngine):
        return _series_details(engine)
    decided = engine.reporting_members[0].record.decision
    model = escape(next(iter(engine.values_of("model")), "model not known yet"))
    dim = "" if engine.live else "dim"
    rollout = "in the rollout" if decided.canary else "[yellow]not in the rollout[/]"
    if decided.bucket is not None and decided.percentage is not None:
        rollout += f" of {decided.percentage:g} % (bucket {decided.bucket} of {BUCKETS:,})"
    chosen = decided.percentage is not None or not decided.canary
    facts = [
        f"vLLM {escape(', '.join(engine.values_of('vllm')))}",
        f"vllm-graphfix {escape(', '.join(engine.values_of('graphfix')))}",
        *([f"VLLM_GRAPHFIX={escape(decided.master)}"] if decided.master != "on" else []),
        *([rollout] if chosen else []),
        f"on {escape(', '.join(engine.values_of('host')))}",
        *map(escape, _foreign(engine)),
    ]
    head = f"[bold]{model}[/]  engine {engine.name}  [{_STATUS_COLOURS[engine.status]}]{engine.status}[/]"
    parts: list[RenderableType] = [
        Text.from_markup(head, style=dim),
        Padding(Text.from_markup(", ".join(facts), style=dim), (0, 0, 0, 2)),
    ]
    if engine.live and engine.agreeing is not None and engine.expected > 1:
        colour = "green" if engine.agreeing == engine.expected else "red"
        agree = f"[{colour}]{engine.agreeing} of {engine.expected} ranks agree[/]"
        parts.append(Padding(Text.from_markup(agree), (0, 0, 0, 2)))
    parts += [Padding(Text.from_markup(f"[red]✗ {escape(what)}[/]"), (0, 0, 0, 2)) for what in engine.wrong]
    parts += [Padding(Text.from_markup(f"[yellow]![/] {escape(what)}"), (0, 0, 0, 2)) for what in engine.notes]
    if not engine.live:
        for what in (Liveness.DEAD, Liveness.SILENT):
            if members := [member for member in engine.members if member.liveness is what]:
                heard = [m.age for m in members if m.record.kept or m.record.rank is not None]
                line = f"{what.value}: {engine.several(members)}" + (
                    f", last heard from {ago(min(heard))}" if heard else ""
                )
                parts.append(Padding(Text(line, style="dim"), (0, 0, 0, 2)))
        return parts
    processes = Table("process", "rank", "host", "pid", "", "last heard from", box=None, pad_edge=False)
    for member in engine.members:
        record = member.record
        processes.add_row(
            record.role,
            engine.name_of(member).removeprefix("rank ") if record.rank is not None else "",
            escape(record.host),
            str(record.pid),
            f"[{_LIVENESS_COLOURS[member.liveness]}]{member.liveness.value}[/]",
            # The others have nothing more to say after their start.
            ago(member.age) if record.kept or record.rank is not None or not member.live else "",
        )
    fixes = Table("fix", "mode", "state", "events", "because", box=None, pad_edge=False)
    fixes.columns[-1].overflow = "fold"  # names of modules are long words
    alike: dict[tuple[str, ...], list[str]] = {}
    for fix in engine.fixes:
        states, first = engine.states(fix), engine.foremost(fix)
        several = len(states) > 1
        counts = bool(_COUNTING & states.keys())
        account: tuple[str, ...] = (
            first.mode,
            "\n".join(
                f"[{_STATE_COLOURS[state]}]{state}[/]" + (f" ({escape(engine.several(members))})" if several else "")
                for state, members in states.items()
            ),
            "\n".join(f"{escape(event)} {count}" for event, count in engine.counts(fix).items() if counts or count),
            escape(first.reason),
        )
        alike.setdefault(account, []).append(f"[bold]{escape(fix)}[/]")
    for account, names in alike.items():
        fixes.add_row("\n".join(names), *account)
    return [*parts, Padding(processes, (0, 0, 0, 2)), Padding(fixes, (0, 0, 0, 2))]


def _series_details(engine: SeriesEngine) -> list[RenderableType]:
    """Return the details of an engine that series have: no processes, and only the number of its ranks."""
    from rich.padding import Padding
    from rich.text import Text

    expected, agreeing = engine.whole("ranks_expected"), engine.agreeing
    facts = [
        *(f"vLLM {version}" for version in engine.values_of("vllm")),
        *(f"vllm-graphfix {version}" for version in engine.values_of("graphfix")),
        *([] if engine.canary is None else ["in the rollout" if engine.canary else "not in the rollout"]),
        *([f"{agreeing} of {expected} ranks agree"] if None not in (agreeing, expected) else []),
    ]
    lines = [Text(", ".join(facts)) if facts else None]
    lines += [Text(f"✗ {what}", style="red") for what in engine.wrong]
    lines += [Text(f"! {what}", style="yellow") for what in engine.notes]
    head = Text(next(iter(engine.values_of("model")), "model not known"), style="bold")
    head.append(f"  {engine.name}  ").append(engine.status, style=_STATUS_COLOURS[engine.status])
    return [head, *(Padding(line, (0, 0, 0, 2)) for line in lines if line is not None)]


def _page(console: Console, what: RenderableType) -> RenderableType:
    """The part of *what* that fits the terminal, and how much more there is."""
    from rich.console import Group
    from rich.segment import Segment, Segments
    from rich.text import Text

    lines = console.render_lines(what, pad=False)
    room = max(console.height - 1, 1)
    visible_lines = lines if len(lines) <= room else lines[: room - 1]
    segments = [segment for line in visible_lines for segment in (*line, Segment.line())]
    more = [Text(f"… {len(lines) - len(visible_lines)} more lines: --all without --watch", style="dim")]
    return Group(Segments(segments), *(more if len(lines) > room else []))


def watch(look: Callable[[], Fleet], seconds: float, console: Console) -> None:
    """Call *look* every so many *seconds*, until it is interrupted. Raises FleetError as *look* does."""
    from rich.live import Live

    if not _SHORTEST_LOOK <= seconds <= _LONGEST_LOOK:
        raise FleetError(f"--watch takes {_SHORTEST_LOOK:g} to {_LONGEST_LOOK:g} seconds, not {seconds:g}")
    try:
        if not console.is_terminal:
            while True:
                console.print(render(look()))
                time.sleep(seconds)
        with Live(_page(console, render(look())), console=console, auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(seconds)
                live.update(_page(console, render(look())), refresh=True)
    except KeyboardInterrupt:
        return
