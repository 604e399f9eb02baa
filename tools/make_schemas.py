"""Writes docs/schemas/*.json: JSON Schemas of all that the commands print with `--json`.

    python tools/make_schemas.py

Values that come from a list in the code are taken from there. Objects are open: a later release may add keys. Keys are
neither renamed nor removed, and no value changes its type, without another number in `schema`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from vllm_graphfix.commands import explain, status
from vllm_graphfix.commands.compare import report as compare
from vllm_graphfix.commands.doctor import collect as doctor
from vllm_graphfix.commands.fleet import json_report as fleet
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Mode, State, Verdict
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.fixes._about import RESTS_ON
from vllm_graphfix.records.liveness import Liveness
from vllm_graphfix.verify import report as verify
from vllm_graphfix.verify.comparison import Kind

FOLDER = Path(__file__).parent.parent / "docs" / "schemas"
Schema = dict[str, Any]


def of(kind: str, text: str = "", **more: Any) -> Schema:
    """Return the schema of a value of *kind*; `null` is allowed too where that ends in a question mark."""
    types = [kind.rstrip("?"), "null"] if kind.endswith("?") else kind
    return {"type": types, **({"description": text} if text else {}), **more}


def one_of(values: Iterable[Enum | str | None], text: str = "") -> Schema:
    """Return the schema of one of *values*, as the JSON has them."""
    listed = [value.value if isinstance(value, Enum) else value for value in values]
    return {"enum": listed, **({"description": text} if text else {})}


def array(items: Schema, text: str = "") -> Schema:
    return of("array", text, items=items)


def table(values: Schema, text: str = "") -> Schema:
    """Return the schema of an object whose keys are names of something, and whose values are *values*."""
    return of("object", text, additionalProperties=values)


def record(text: str = "", optional: Sequence[str] = (), /, **properties: Schema) -> Schema:
    """Return the schema of an object with *properties*, all but the *optional* ones always there."""
    required = [name for name in properties if name not in optional]
    return of("object", text, properties=properties, required=required)


def nullable(schema: Schema, text: str) -> Schema:
    return {"anyOf": [schema, {"type": "null"}], "description": text}


TEXT, TEXT_OR_NULL, TEXTS, COUNT = of("string"), of("string?"), array(of("string")), of("integer")
NUMBERS = array(of("number?"), "null: not finite")
FIX = of("string", "name of a fix, such as `idle-rank`")
PR = of("integer?", "upstream's pull request; null without one")
VERSIONS = {"graphfix": of("string", "version of the plugin"), "vllm": of("string?", "version of vLLM")}
MISCONFIGURED = table(TEXT, "variables with an invalid name or value")
ROW = record(
    "one fix",
    ("concern",),
    name=FIX,
    pr=PR,
    references=array(TEXT, "upstream's other threads"),
    diagnosis=one_of(Verdict),
    reason=of("string", "what the diagnosis rests on"),
    where=of("string?", "file:line in vLLM"),
    known_release=of("boolean", "the code is that of a stock release"),
    defect_seen=of("boolean?", "of unrecognised code: the defect itself was seen"),
    tree=of("string?", "hash of the code, for `VLLM_GRAPHFIX_X=on:HASH`"),
    rests_on=one_of(RESTS_ON, "why it is applied by default; null: it is only counted"),
    ran_on=array(TEXT, "GPUs on which engines ran with the fix"),
    mode=one_of(Mode),
    would_be=one_of(State, "state in an engine that starts in this environment"),
    notes=TEXTS,
    concern=record("with `--for` or `--running`", answer=one_of(Concern), reason=TEXT),
)
STATUS = record(
    "",
    ("process",),
    process=record("with `--running`: the server", pid=COUNT, command=TEXT),
    schema=of("integer"),
    **VERSIONS,
    source=of("string", "the vLLM that was judged"),
    default_runner=of("string?", "model runner by default"),
    misconfigured=MISCONFIGURED,
    notes=array(TEXT, "messages that call for action"),
    fixes=array(ROW),
)
WATCH = record(
    "the shadow check on each replay",
    checks=COUNT,
    mismatches=COUNT,
    first=of("integer?"),
    state=TEXT_OR_NULL,
    error=TEXT_OR_NULL,
    graphs=TEXT,
    further=array(of("object")),
)
PROOF = {
    "name": FIX,
    "pr": PR,
    "diagnosis": one_of(Verdict),
    "outcome": of("string", "such as `proven`, `nothing patched`, `skipped`, `not decided`"),
    "holds": of("boolean"),
    "tree": TEXT_OR_NULL,
    "failure": of("string?", "why it does not hold"),
    "skipped": of("string?", "why it was not run"),
    "numbers": of("string?", "what was compared"),
    "eager": nullable(NUMBERS, "without graphs"),
    "stock": nullable(NUMBERS, "with graphs, without the plugin"),
    "stock_error": TEXT_OR_NULL,
    "patched": nullable(NUMBERS, "with graphs and the plugin"),
    "patched_error": TEXT_OR_NULL,
    "details": TEXTS,
    "counted": nullable(table(record(expected=COUNT, counted=COUNT)), "events of the fix"),
    "shadow": nullable(table(WATCH), "by mode"),
    "unwatched": of("string?", "why the shadow check cannot see it"),
    "poison": nullable(table(TEXTS), "effects of poison, by mode"),
    "poison_notes": nullable(table(TEXT), "by mode"),
    "state": one_of([*State, "not started", ""]),
    "state_reason": TEXT,
}
POISON = record(
    found=of("boolean"),
    inconclusive=TEXT_OR_NULL,
    error=TEXT_OR_NULL,
    padded=of("integer?", "first step in which padded rows of the model's output were NaN"),
    noise=of("number?"),
    passes=array(of("object")),
)
EXACT = record(
    wrong=of("boolean"),
    inconclusive=TEXT_OR_NULL,
    error=TEXT_OR_NULL,
    ranks=array(
        record(
            compared=of("integer", "replays that were compared"),
            wrong=COUNT,
            skipped=of("integer", "replays that could not be judged"),
            unseen=of("integer", "replays of pieces and other graphs, which are not compared"),
            noise=of("number", "largest relative difference of two runs of one step without its graph"),
            graphs=table(COUNT, "replays by graph"),
            findings=TEXTS,
            reason=of("string?", "why not every replay was compared"),
        )
    ),
)
PROMPT = record(
    prompt=COUNT,
    kind=one_of(Kind),
    length=COUNT,
    compared=COUNT,
    position=of("integer?", "of the first difference"),
    expected=of("integer?", "token without graphs"),
    found=of("integer?", "token with graphs"),
    margin=of("number?", "between the two best tokens"),
    gap=of("number?"),
    distance=of("number?"),
)
PROCESS = record(
    engine=TEXT,
    role=TEXT,
    rank=nullable(
        record(rank=COUNT, local_rank=of("integer?"), world_size=COUNT, data_parallel_rank=COUNT), "null: no worker"
    ),
    host=TEXT,
    pid=COUNT,
    liveness=one_of(Liveness),
    age=of("number", "seconds since its last report"),
    outdated=of("boolean"),
    in_step_since=of("number?", "seconds since the epoch"),
    starting=of("boolean"),
    problem=TEXT_OR_NULL,
)
ENGINE = record(
    engine=TEXT,
    status=TEXT,
    live=of("boolean"),
    user=TEXT_OR_NULL,
    wrong=TEXTS,
    notes=TEXTS,
    model=TEXT_OR_NULL,
    vllm=TEXTS,
    graphfix=TEXTS,
    canary=of("boolean", "it gets the fixes"),
    bucket=of("integer?"),
    percentage=of("number?", "of `VLLM_GRAPHFIX_ROLLOUT`"),
    master=of("string", "value of `VLLM_GRAPHFIX`"),
    misconfigured=MISCONFIGURED,
    hosts=TEXTS,
    ranks=record(
        expected=COUNT,
        recorded=COUNT,
        agreeing=COUNT,
        unreadable=array(record(host=TEXT, pid=COUNT, file=TEXT, why=TEXT)),
        missing=array(record(ranks=array(COUNT), agreed=of("boolean"))),
    ),
    processes=array(PROCESS),
    fixes=table(
        record(states=table(TEXTS, "state to processes"), mode=TEXT, reason=TEXT, events=table(COUNT)), "by fix"
    ),
)
PAIR = nullable(array(COUNT), "accepted, proposed")
PART = of("object", "`error` alone where it could not be gathered")
SECTIONS = dict.fromkeys([*explain.as_json(FIXES[0]), "goes_with"], TEXT)
for each in ("schema", "name", "pr"):
    del SECTIONS[each]
OUTPUTS: dict[str, tuple[int, str, Schema]] = {
    "status": (status.SCHEMA, "status --json", STATUS),
    "running": (status.SCHEMA, "status --running --json", record(servers=array(STATUS))),
    "explain": (
        explain.SCHEMA,
        "explain FIX --json",
        record("", ("goes_with",), name=FIX, pr=PR, **SECTIONS),
    ),
    "fixes": (
        explain.SCHEMA,
        "explain --json",
        record(fixes=array(record(name=FIX, pr=PR, summary=TEXT, releases=TEXT))),
    ),
    "verify": (
        verify.SCHEMA,
        "verify --json",
        record(
            **VERSIONS,
            source=TEXT,
            device=TEXT,
            environment=table({}),
            holds=of("boolean", "all proofs were run and hold"),
            complete=of("boolean", "none was skipped"),
            logs=TEXT_OR_NULL,
            seconds=of("number?"),
            engines=array(of("object")),
            fixes=array(record(**PROOF, further=array(record(case=TEXT, **PROOF)))),
        ),
    ),
    "compare": (
        compare.SCHEMA,
        "compare MODEL --json",
        record(
            **dict.fromkeys(("vllm", "graphfix", "torch", "python", "device", "driver", "switches", "seed"), TEXT),
            model=TEXT,
            flags=TEXTS,
            twin=nullable(
                record(folder=TEXT, parameters=COUNT, changes=array(of("object"))), "with `--twin`: what was compared"
            ),
            corrupt=of("boolean"),
            inconclusive=of("string?", "why there is no verdict"),
            error=of("string?", "of the engine with graphs"),
            note=TEXT_OR_NULL,
            logs=TEXT_OR_NULL,
            cudagraph_mode=TEXT_OR_NULL,
            fixes=nullable(table(table(TEXT)), "states, by rank and fix"),
            drafts=record(eager=PAIR, graphs=PAIR, lost=of("boolean")),
            poison=nullable(POISON, "with `--poison`"),
            exact=nullable(EXACT, "with `--exact`"),
            noise=of("number?", "of log-probabilities, eager against itself"),
            tolerance=of("number?"),
            distance=of("number?"),
            tokens=of("integer?"),
            compared=of("integer?"),
            prompts=array(PROMPT),
        ),
    ),
    "fleet": (
        fleet.SCHEMA,
        "fleet --json",
        record(
            graphfix=TEXT,
            host=TEXT,
            folder=TEXT_OR_NULL,
            prometheus=of("string?", "address of the server that was asked; null: records were read"),
            exit_code=COUNT,
            engines=array(ENGINE),
            unrecorded=array(
                record(
                    "a process of vLLM without a record",
                    pid=COUNT,
                    user=TEXT,
                    command=TEXT,
                    age=of("number"),
                    reason=TEXT,
                    elsewhere=of("boolean"),
                    starting=of("boolean"),
                )
            ),
            wrong=TEXTS,
            notes=TEXTS,
            problems=TEXTS,
        ),
    ),
    "doctor": (
        doctor.SCHEMA,
        "doctor --json",
        record(
            graphfix=TEXT,
            verdict=TEXT,
            **dict.fromkeys(
                ("versions", "gpu", "platform", "plugin", "environment", "status", "fleet", "errors"), PART
            ),
        ),
    ),
}
"""File to the number in its `schema`, the command that prints it, and its keys besides `schema`."""


def schema_of(name: str) -> Schema:
    """Return the JSON Schema of the output *name* of `OUTPUTS`."""
    number, command, keys = OUTPUTS[name]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"vllm-graphfix {command}",
        "type": "object",
        "required": list(dict.fromkeys(["schema", *keys["required"]])),
        "properties": keys["properties"] | {"schema": {"const": number}},
    }


def written(name: str) -> str:
    """Return the file of the output *name*."""
    return json.dumps(schema_of(name), indent=2, ensure_ascii=False) + "\n"


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for name in OUTPUTS:
        (FOLDER / f"{name}.json").write_text(written(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
