"""A report to be pasted into an issue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from vllm_graphfix.commands.doctor.collect import Doctor


def markdown(doctor: Doctor) -> str:
    """To be pasted: plain, and nothing in it is a link, a mention or markup of somebody else's."""
    return "\n".join(_lines(doctor.parts)) + "\n"


def _lines(parts: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield "### vllm-graphfix doctor"
    yield ""
    yield "Secrets, host names and home folders are masked; read it through before you paste it."
    for name, part in parts.items():
        yield ""
        yield f"#### {name.capitalize() if name != 'gpu' else 'GPU'}"
        yield ""
        told = _TELLERS.get(name, _any)(part) if "error" not in part else [f"- not known: {_code(part['error'])}"]
        yield from list(told) or ["- nothing"]


def _any(part: Mapping[str, Any]) -> Iterator[str]:
    for key, value in part.items():
        if value not in (None, [], {}, ""):
            yield f"- {key}: {_code(value)}"


def _variables_told(part: Mapping[str, Any]) -> Iterator[str]:
    for each in part["variables"]:
        yield f"- {_code(each['name'])} = {_code(each['value'])}"


def _status_told(part: Mapping[str, Any]) -> Iterator[str]:
    for fix in part["fixes"]:
        known = "" if fix["known_release"] else ", code that differs from every known stock release"
        yield (
            f"- {fix['name']}: {fix['diagnosis']}{known}; mode {fix['mode']}, would be {fix['would_be']}: "
            f"{_code(fix['reason'])}"
        )
        yield from (f"  - {_code(note)}" for note in fix["notes"])
    if part["misconfigured"]:
        yield f"- misconfigured: {_code(part['misconfigured'])}"
    yield from (f"- note: {_code(note)}" for note in part["notes"])


def _fleet_told(part: Mapping[str, Any]) -> Iterator[str]:
    for engine in part["engines"]:
        yield (
            f"- engine {_code(engine['engine'])}: {engine['status']}, {engine['processes']} processes, "
            f"{engine['ranks']}"
        )
        for key in ("vllm", "vllm-graphfix", "states", "events", "wrong", "notes"):
            if engine[key]:
                yield f"  - {key}: {_code(engine[key])}"
    yield from _any({key: part[key] for key in ("more_engines", "without_a_record", "because", "notes") if part[key]})


def _errors_told(part: Mapping[str, Any]) -> Iterator[str]:
    for each in part["last"]:
        yield f"- {_code(each['of'])} {each['state']}: {_code(each['reason'])}"


_TELLERS: Mapping[str, Callable[[Mapping[str, Any]], Iterable[str]]] = {
    "environment": _variables_told,
    "status": _status_told,
    "fleet": _fleet_told,
    "errors": _errors_told,
}


def _code(value: object) -> str:
    """*value* as code: nothing in it is read as markup."""
    if isinstance(value, Mapping):
        return "; ".join(f"{_code(key)} {_code(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return "; ".join(_code(each) for each in value)
    return f"`{str(value).replace('`', chr(39)) or ' '}`"
