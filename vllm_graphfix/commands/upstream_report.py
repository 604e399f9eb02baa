"""Bug reports for vLLM, in Markdown, from the status records of engines.

They cover wrong replays, by the shadow check; finished cache blocks that changed; and tensors that moved away from the
addresses that graphs captured.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm_graphfix.commands.doctor.collect import hosts_of, models_of
from vllm_graphfix.commands.redaction import Mask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_graphfix.commands.fleet.engine import Engine
    from vllm_graphfix.commands.fleet.survey import Fleet
    from vllm_graphfix.records import MovedTensor, OverwrittenBlock, Wrong

_HEAD = """# {title}

vLLM {vllm}, vllm-graphfix {graphfix}, a model whose name is left out here. {text}
"""
_REPLAYS = (
    "A replayed CUDA graph differs from the same step without it",
    """Each checked step was run again
without its graph, on the same inputs: {mismatches} of {checks} replays differed from two such runs. \
Only rows that are not padding were compared. A row's error is its
largest difference divided by its largest value.""",
)
_GRAPH = """
## {graph}

- found by {rank}, in its check {check}
- {rows} real rows of {padded_rows}, attention metadata: {backends}
- error of each row: {errors}
- runs without the graph differ from each other by at most {noise}
- {first}{drafts}
"""
_LAYER = "the first layer whose cache was written differently is {}; the error is there, or just before it"
_NO_LAYER = (
    "the layer is not known: the graph was not checked a second time, or no cache that could be compared differs"
)
_BLOCKS = (
    "A finished block of the prefix cache changes",
    """Blocks whose tokens were all computed,
and that were not allocated anew, were summed over their bytes on the device, and again later:
{changed} of {marks} had changed, so that a request that hits them attends to somebody else's keys and values.""",
)
_BLOCK = (
    "- {rank}: block {block} of cache group {group}, block {place} of its request, in {layers}; in between ran: {ran}"
)
_TENSORS = (
    "Tensors move after CUDA graphs were captured",
    """Graphs hold the addresses of the capture,
and go on with what lies there. {comparisons} comparisons found tensors elsewhere {moved} times:""",
)
_TENSOR = "- {rank}: {kind} {name}, noticed after {after}: {outcome}"


def markdown(fleet: Fleet) -> str | None:
    """Report what detectors saw in all engines, as Markdown; None if they saw nothing.

    Hosts, models, values of settings and secrets are masked. Records may be another user's: their texts become code.
    """
    mask = Mask(os.environ, hosts_of(fleet), models_of(fleet))
    return "\n".join(part for engine in fleet.engines for part in _of_engine(engine, mask)) or None


def _of_engine(engine: Engine, mask: Mask) -> Iterator[str]:
    ranks = [(mask.whole_text(engine.name_of(member)), member.record) for member in engine.reporting_members]
    if wrong := [(rank, each) for rank, record in ranks for each in record.wrong]:
        graphs = [
            _GRAPH.format(
                **_fields(each, mask),
                first=_LAYER.format(mask.code(each.layer)) if each.layer else _NO_LAYER,
                drafts=f"\n- {mask.code(each.accepted)}" if each.accepted else "",
                rank=rank,
            )
            for rank, each in wrong
        ]
        yield _render(engine, mask, _REPLAYS, "shadow", "".join(graphs))
    if blocks := [
        _BLOCK.format(**_fields(each, mask), rank=rank) for rank, record in ranks for each in record.overwritten
    ]:
        yield _render(engine, mask, _BLOCKS, "kv-marks", "\n" + "\n".join(blocks) + "\n")
    if tensors := [_TENSOR.format(**_fields(each, mask), rank=rank) for rank, record in ranks for each in record.moved]:
        yield _render(engine, mask, _TENSORS, "addresses", "\n" + "\n".join(tensors) + "\n")


def _fields(finding: Wrong | MovedTensor | OverwrittenBlock, mask: Mask) -> dict[str, object]:
    return {name: mask.code(value) if isinstance(value, str) else value for name, value in finding._asdict().items()}


def _render(engine: Engine, mask: Mask, about: tuple[str, str], detector: str, findings: str) -> str:
    title, text = about
    counts = dict.fromkeys(("checks", "mismatches", "marks", "changed", "comparisons", "moved"), 0)
    head = _HEAD.format(
        title=title,
        vllm=", ".join(map(mask.code, engine.values_of("vllm"))),
        graphfix=", ".join(map(mask.code, engine.values_of("graphfix"))),
        text=text.format(**counts | engine.counts(detector)),
    )
    fixes = [f"{mask.code(fix)} {engine.foremost(fix).state}" for fix in engine.fixes if fix not in _DETECTORS]
    return f"{head}{findings}\nFixes of vllm-graphfix in this engine: {', '.join(fixes)}.\n"


_DETECTORS = ("shadow", "kv-marks", "addresses", "abort")
