"""Doctor's report as text in the form of vLLM's `collect-env`, and as Markdown for bug reports to vLLM or to us."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from vllm_graphfix._version import __version__
from vllm_graphfix.commands.doctor.collect import Doctor
from vllm_graphfix.fix import Verdict

_RULE = "=" * 30
_KEY = 29
"""Width of a key, as in vLLM's report."""


def markdown(doctor: Doctor) -> str:
    """Return the report for an issue: a line of verdict, and the rest folded and fenced.

    In the fence no text of a third party becomes a link, a mention or markup, and no line can close it.
    """
    return (
        f"**vllm-graphfix {__version__}**: {_plain(doctor.verdict)}\n"
        "\n"
        "<details>\n"
        "<summary>The output of <code>vllm-graphfix doctor</code></summary>\n"
        "\n"
        "```text\n"
        f"{text(doctor)}\n"
        "```\n"
        "\n"
        "</details>\n"
    )


def text(doctor: Doctor) -> str:
    """Return the report as plain text, without a final newline."""
    return "\n".join(_lines(doctor)).replace("`", "'")


def _lines(doctor: Doctor) -> Iterator[str]:
    yield from (_RULE, "vllm-graphfix".center(len(_RULE)).rstrip(), _RULE)
    yield from _pairs({"Version": __version__, "Verdict": doctor.verdict})
    for name, part in doctor.parts.items():
        yield ""
        yield f"{_TITLES.get(name, name.capitalize())}:"
        lines = _LINES_OF_PART.get(name, _pairs)(part) if "error" not in part else [f"not known: {part['error']}"]
        yield from [f"  {line}" for line in lines] or ["  nothing"]


_TITLES = {
    "gpu": "GPU",
    "environment": "Environment of this process",
    "status": "What an engine started in this environment would do",
    "fleet": "What the records of engines say, each with the settings that it was started with",
}


def _pairs(part: Mapping[str, Any]) -> Iterator[str]:
    for key, value in part.items():
        if value not in (None, [], {}, ""):
            yield f"{key:<{_KEY}}: {_words(value)}"


def _environment(part: Mapping[str, Any]) -> Iterator[str]:
    for each in part["variables"]:
        yield f"{each['name']}={each['value']}"


def _status(part: Mapping[str, Any]) -> Iterator[str]:
    absent = []
    for fix in part["fixes"]:
        known = "" if fix["known_release"] else ", code that differs from every known stock release"
        if fix["diagnosis"] in (Verdict.FIXED.value, Verdict.ABSENT.value):
            absent.append(f"{fix['name']} ({fix['diagnosis']}{known})")
            continue
        yield (
            f"{fix['name']}: {fix['diagnosis']}{known}; mode {fix['mode']}, would be {fix['would_be']}: {fix['reason']}"
        )
        yield from (f"  {note}" for note in fix["notes"])
    yield from _pairs({"not in this vLLM": absent, "misconfigured": part["misconfigured"]})
    yield from (f"note: {note}" for note in part["notes"])


def _fleet(part: Mapping[str, Any]) -> Iterator[str]:
    for engine in part["engines"]:
        yield f"engine {engine['engine']}: {engine['status']}, {engine['processes']} processes, {engine['ranks']}"
        facts = {key: engine[key] for key in ("vllm", "vllm-graphfix", "settings")}
        yield from (f"  {line}" for line in _pairs(facts | {"CUDA graphs": _GRAPHS[engine["graphs"]]}))
        for key in ("states", "events"):
            yield from (f"  {line}" for line in _lines_by_account(key, engine[key]))
        for key in ("wrong", "notes"):
            yield from (f"  {key}: {each}" for each in engine[key])
    yield from _pairs({key: part[key] for key in ("more_engines", "without_a_record", "because", "notes") if part[key]})


_GRAPHS = {True: "yes", False: "no", None: "not known yet"}


def _lines_by_account(key: str, of_fixes: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield a line for each set of counts, with all fixes that have it."""
    fixes: dict[str, list[str]] = {}
    for fix, counts in of_fixes.items():
        fixes.setdefault(_words(counts), []).append(fix)
    for account, names in fixes.items():
        yield f"{key}: {account}: {', '.join(names)}"


def _errors(part: Mapping[str, Any]) -> Iterator[str]:
    for each in part["last"]:
        yield f"{each['of']} {each['state']}: {each['reason']}"


_LINES_OF_PART: Mapping[str, Callable[[Mapping[str, Any]], Iterable[str]]] = {
    "environment": _environment,
    "status": _status,
    "fleet": _fleet,
    "errors": _errors,
}


def _words(value: object) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_words(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return "; ".join(_words(each) for each in value)
    return str(value)


def _plain(verdict: str) -> str:
    """Return *verdict* without markup, for outside the fence: a version of vLLM may be any text."""
    return "".join(letter if letter.isalnum() or letter in " .,:;+-()" else "?" for letter in verdict)
