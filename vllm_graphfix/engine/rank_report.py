"""The report of one rank to the others of its engine, and its form in the store."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm_graphfix.settings.environment import effective, is_brief
from vllm_graphfix.settings.json_object import JsonObject
from vllm_graphfix.text import printable

_LONGEST = 255
"""Limit of characters of a text in another rank's report."""
MOST_GRAPHS = 4096
"""Limit of graphs in another rank's report: more than vLLM captures, for all fixes."""
_LARGEST = 2 * 1024 * 1024
"""Bytes of another rank's report: more than one with all its texts at their limits."""
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_GRAPH = re.compile(r"[A-Za-z0-9_.]{1,80} (FULL|PIECEWISE) [0-9]{1,9}")
HEX_ID = r"[0-9a-f]{16}"
"""The form of engines and tokens."""


class RankReport(NamedTuple):
    """The report of one rank to the others."""

    host: str
    pid: int
    engine: str
    """The engine of the rank's decision. Not compared: nodes that start on their own have one each."""
    graphfix: str
    vllm: str
    canary: bool
    master: str
    modes: Mapping[str, str]
    states: Mapping[str, str]
    token: str
    """Random, for each rank and comparison; that of rank 0 names the group."""
    reasons: Mapping[str, str] = {}
    """Reasons of fixes that should be applied and are not, by name. Not compared; part of the message if states
    differ."""
    off: bool = False
    """Its settings disable the fixes everywhere: the kill switch, or an invalid percentage."""
    misconfigured: Mapping[str, str] = {}
    """Variables with an invalid value or an unknown name on this rank, each with its value."""
    fault: str = ""
    """The error of a rank that cannot determine its states: a difference, even if all ranks report the same error."""
    failed: Mapping[str, str] = {}
    """Fixes that failed while graphs were captured, each with its first error: no difference, but all ranks have to act
    on it."""
    graphs: Sequence[tuple[str, str]] = ()
    """Pairs of a fix in `failed` and a graph in which it failed; an empty name if the graph cannot be taken out of
    dispatch."""
    can_leave_out: bool = True
    """vLLM's dispatch on this rank is known well enough to take a graph out of it."""
    ended: bool = False
    """The capture on this rank has ended in an error of vLLM, which vLLM will report."""

    def compared(self) -> dict[str, str]:
        """Return the values that must be equal on all ranks, the most telling first.

        Without fixes that are `waiting`: they concern code that this rank does not run, such as a drafter, which only
        the last stage of a pipeline has.
        """
        values = {
            "vllm-graphfix": self.graphfix,
            "vLLM": self.vllm,
            "VLLM_GRAPHFIX": self.master,
            "in the rollout": "yes" if self.canary else "no",
            "misconfigured": ", ".join(effective(self.misconfigured, self.master, self.modes)) or "nothing",
        }
        values |= {f"the mode of {name}": mode for name, mode in sorted(self.modes.items())}
        return values | {name: state for name, state in sorted(self.states.items()) if state != "waiting"}

    @property
    def needs_action(self) -> bool:
        """The ranks may have to act on failures of a capture in this report, even if all report the same."""
        return bool(self.failed) or self.ended or not self.can_leave_out

    def encode(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def decode(cls, data: str | bytes) -> RankReport | None:
        """Return the report in *data*; None if another version or somebody else has written it."""
        if len(data) > _LARGEST:  # decoding it could take minutes
            return None
        try:
            fields = JsonObject(json.loads(data), "the report")
            return cls(**{name: _FIELDS[name](fields, name) for name in cls._fields if name in fields})
        except (ValueError, TypeError, RecursionError):
            return None

    def digest(self) -> str:
        fields = [
            self.compared(),
            self.fault,
            dict(self.failed),
            list(self.graphs),
            self.can_leave_out,
            self.ended,
        ]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:16]


def _one_text(fields: JsonObject, key: str) -> str:
    return fields.line(key, _LONGEST)


def _hex_id(fields: JsonObject, key: str) -> str:
    return fields.name(key, HEX_ID)


def _table_of_texts(fields: JsonObject, key: str) -> dict[str, str]:
    return fields.table(key, lambda name, value: _NAME.fullmatch(name) is not None and _is_line(value))


def _is_line(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST and value.isprintable()


def _graphs(fields: JsonObject, key: str) -> list[tuple[str, str]]:
    graphs = fields.get(key)
    if not isinstance(graphs, list) or len(graphs) > MOST_GRAPHS or not all(map(_is_graph, graphs)):
        fields.refuse(key, "pairs of a fix and a graph")
    return [(fix, name) for fix, name in graphs]


def _is_graph(graph: object) -> bool:
    if not isinstance(graph, list) or len(graph) != 2 or not all(isinstance(part, str) for part in graph):
        return False
    fix, name = graph
    return _NAME.fullmatch(fix) is not None and (not name or _GRAPH.fullmatch(name) is not None)


# Strict, since all fields are displayed and stored in records.
_FIELDS: dict[str, Callable[[JsonObject, str], Any]] = {
    **dict.fromkeys(("host", "graphfix", "vllm", "master", "fault"), _one_text),
    **dict.fromkeys(("engine", "token"), _hex_id),
    **dict.fromkeys(("modes", "states", "reasons", "failed"), _table_of_texts),
    **dict.fromkeys(("canary", "off", "can_leave_out", "ended"), JsonObject.truth),
    "pid": JsonObject.whole,
    "misconfigured": lambda fields, key: fields.table(key, is_brief),
    "graphs": _graphs,
}


def one_line(text: str | bytes) -> str:
    """Return *text* on one line, cut to the limit of a report's texts; from the store, as bytes of UTF-8."""
    if isinstance(text, bytes):
        text = text[: 4 * _LONGEST].decode(errors="replace")  # at most four bytes a character
    return printable(text[:_LONGEST])


def new_token() -> str:
    return os.urandom(8).hex()
