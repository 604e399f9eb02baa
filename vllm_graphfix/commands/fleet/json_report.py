"""A fleet as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm_graphfix._version import __version__
from vllm_graphfix.commands.fleet.engine import Engine, user_name
from vllm_graphfix.commands.fleet.prometheus import SeriesEngine
from vllm_graphfix.commands.fleet.survey import Fleet

SCHEMA = 1


def as_json(fleet: Fleet) -> dict[str, Any]:
    """The stable interface; `SCHEMA` changes with it."""
    return {
        "schema": SCHEMA,
        "graphfix": __version__,
        "host": fleet.here.host,
        "folder": str(fleet.folder) if fleet.prometheus is None else None,
        "prometheus": fleet.prometheus,
        "exit_code": fleet.exit_code,
        "engines": [
            _series_json(engine) if isinstance(engine, SeriesEngine) else _engine_json(engine)
            for engine in fleet.engines
        ],
        "unrecorded": [asdict(one) | {"age": round(one.age, 1)} for one in fleet.unrecorded],
        "wrong": list(fleet.wrong),
        "notes": list(fleet.notes),
        "problems": list(fleet.problems),
    }


def _of_either(engine: Engine | SeriesEngine) -> dict[str, Any]:
    """Return what records and series have alike."""
    return {
        "engine": engine.name,
        "status": engine.status,
        "live": engine.live,
        "user": user_name(engine.owner) if engine.owner is not None else None,
        "wrong": list(engine.wrong),
        "notes": list(engine.notes),
        "model": next(iter(engine.values_of("model")), None),
        "vllm": list(engine.values_of("vllm")),
        "graphfix": list(engine.values_of("graphfix")),
    }


def _engine_json(engine: Engine) -> dict[str, Any]:
    starting = engine.starting
    decided = engine.reporting_members[0].record.decision
    return {
        **_of_either(engine),
        "canary": decided.canary,
        "bucket": decided.bucket,
        "percentage": decided.percentage,
        "master": decided.master,
        "misconfigured": engine.misconfigured,
        "hosts": list(engine.values_of("host")),
        "ranks": {
            "expected": engine.expected,
            "recorded": len(engine.ranked),
            "agreeing": engine.agreeing,
            "unreadable": [
                {"host": one.host, "pid": one.pid, "file": str(one.path), "why": one.why} for one in engine.unreadable
            ],
            "missing": [{"ranks": absent, "agreed": agreed} for absent, agreed in engine.missing()],
        },
        "processes": [
            {
                "engine": member.record.engine,
                "role": member.record.role,
                "rank": member.record.rank._asdict() if member.record.rank is not None else None,
                "host": member.record.host,
                "pid": member.record.pid,
                "liveness": member.liveness.value,
                "age": round(member.age, 1),
                "outdated": member.found.outdated,
                "in_step_since": member.record.in_step_since if member.live else None,
                "starting": any(member is one for one in starting),
                "problem": member.record.problem,
            }
            for member in engine.members
        ],
        "fixes": {
            fix: {
                "states": {
                    state: [engine.name_of(member) for member in members]
                    for state, members in engine.states(fix).items()
                },
                "mode": engine.foremost(fix).mode,
                "reason": engine.foremost(fix).reason,
                "events": engine.counts(fix),
            }
            for fix in engine.fixes
        },
    }


def _series_json(engine: SeriesEngine) -> dict[str, Any]:
    """Return the same keys as `_engine_json`; null where no series has it."""
    percentage = engine.facts.get("rollout_ratio")
    return {
        **_of_either(engine),
        "canary": engine.canary,
        "bucket": None,
        "percentage": None if percentage is None else round(percentage * 100, 4),
        "master": None,
        "misconfigured": dict.fromkeys(engine.values_of("misconfigured")),
        "hosts": [],
        "ranks": {
            "expected": engine.whole("ranks_expected"),
            "recorded": None,
            "agreeing": engine.agreeing,
            "unreadable": None,
            "missing": None,
        },
        "processes": None,
        "fixes": None,
    }
