"""A bug report for vLLM, in Markdown, from the records of engines whose replayed graphs were found wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_graphfix.commands.fleet.engine import Engine
    from vllm_graphfix.commands.fleet.survey import Fleet

_HEAD = """# A replayed CUDA graph differs from the same step without it

vLLM {vllm}, model `{model}`, vllm-graphfix {graphfix}. Each checked step was run again
without its graph, on the same inputs: {mismatches} of {checks} replays differed from two such runs. \
Only rows that are not padding were compared. A row's error is its
largest difference divided by its largest value.
"""
_GRAPH = """
## {graph}

- found by {rank}, in its check {check}
- {rows} real rows of {padded_rows}, attention metadata: {backends}
- error of each row: {errors}
- runs without the graph differ from each other by at most {noise}
- {layer}
"""


def markdown(fleet: Fleet) -> str | None:
    """The mismatches of all engines whose records tell of one; None if none does."""
    return "\n".join(filter(None, map(_of_engine, fleet.engines))) or None


def _of_engine(engine: Engine) -> str | None:
    told = [(member, wrong) for member in engine.tellers for wrong in member.record.wrong]
    if not told:
        return None
    counts = engine.counts("shadow")
    text = _HEAD.format(
        vllm=", ".join(engine.values_of("vllm")),
        model=next(iter(engine.values_of("model")), "not known"),
        graphfix=", ".join(engine.values_of("graphfix")),
        checks=counts.get("checks", 0),
        mismatches=counts.get("mismatches", 0),
    )
    for member, wrong in told:
        layer = (
            f"the first layer whose cache was written differently is `{wrong.layer}`; the error is there, "
            "or just before it"
            if wrong.layer
            else ""
        )
        text += _GRAPH.format(
            **{
                **wrong._asdict(),
                "layer": layer
                or (
                    "the layer is not known: the graph was not checked a second time, "
                    "or no cache that could be compared differs"
                ),
            },
            rank=engine.name_of(member),
        )
    fixes = [f"`{fix}` {engine.foremost(fix).state}" for fix in engine.fixes if fix != "shadow"]
    return f"{text}\nFixes of vllm-graphfix in this engine: {', '.join(fixes)}.\n"
