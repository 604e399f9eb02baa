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
    known_release=of("boolean", "the functions that decide are, whole, those of one stock release"),
    defect_seen=of("boolean?", "of unrecognised code: the defect itself was seen; else null"),
    tree=of("string?", "TREE of the mode `on:TREE` where a patch would fit unrecognised code; else null"),
    rests_on=one_of(RESTS_ON, "why it is applied by default; null: it is only counted"),
    ran_on=array(TEXT, "GPUs on which engines ran with the fix"),
    mode=one_of(Mode),
    would_be=one_of(State, "state in an engine that starts in this environment"),
    notes=TEXTS,
    concern=record("with `--for` or `--running`", answer=one_of(Concern), reason=TEXT),
)
LOOK_ALIKE = record(
    name=of("string", "heading in docs/looked-at.md"),
    seen=TEXT,
    answer=of("string", "`concerns you`, or `cannot tell without` what stands in `reason`"),
    reason=TEXT,
    remedy=TEXT,
    page=TEXT,
)
STATUS = record(
    "",
    ("process", "not_corrected"),
    process=record("with `--running`: the server; `command` is without secrets", pid=COUNT, command=TEXT),
    schema=of("integer"),
    **VERSIONS,
    source=of("string", "the vLLM that was judged"),
    default_runner=of("string?", "model runner by default"),
    misconfigured=MISCONFIGURED,
    notes=array(TEXT, "messages that call for action"),
    fixes=array(ROW),
    not_corrected=array(LOOK_ALIKE, "with `--for` or `--running`: defects of this release that no fix corrects"),
)
WATCH = record(
    "the shadow check on each replay",
    checks=COUNT,
    mismatches=COUNT,
    first=of("integer?", "the check that had the first mismatch"),
    state=TEXT_OR_NULL,
    error=TEXT_OR_NULL,
    graphs=of("string", "on the CPU double: which were checked"),
    further=array(of("object"), "the same of other graphs"),
)
PROOF = {
    "name": FIX,
    "pr": PR,
    "diagnosis": one_of(Verdict),
    "outcome": of("string", "such as `proven`, `nothing patched`, `skipped`, `not decided`"),
    "holds": of("boolean"),
    "tree": of("string?", "as in `status --json`"),
    "failure": of("string?", "why it does not hold"),
    "skipped": of("string?", "why it was not run"),
    "numbers": of("string?", "what was compared"),
    "eager": nullable(NUMBERS, "without graphs"),
    "stock": nullable(NUMBERS, "with graphs, without the plugin"),
    "stock_error": of("string?", "first line of the error that the graphs ended in"),
    "patched": nullable(NUMBERS, "with graphs and the plugin"),
    "patched_error": TEXT_OR_NULL,
    "details": array(TEXT, "on a GPU: sentences about the two runs"),
    "counted": nullable(table(record(expected=COUNT, counted=COUNT)), "by event: how often the scenario makes it"),
    "shadow": nullable(
        table(WATCH), "by mode: `checks`, `mismatches`, `first`, `state` and `error` of the shadow check"
    ),
    "unwatched": of("string?", "why the shadow check cannot see it"),
    "poison": nullable(table(TEXTS), "effects of poison, by mode; a mode without a verdict is missing"),
    "poison_notes": nullable(table(TEXT), "by mode: why there is no verdict, or why no effect is no fault"),
    "state": one_of([*State, "not started", ""], "of the patched process"),
    "state_reason": TEXT,
}
POISON = record(
    found=of("boolean", "exit code 1"),
    inconclusive=TEXT_OR_NULL,
    error=TEXT_OR_NULL,
    padded=of("integer?", "first step with NaN in padded rows of the model's output that no cache had"),
    noise=of("number?", "the engine's own"),
    passes=array(
        of("object"),
        "`kinds` of poison, `finite` (large numbers for NaN), `inputs` if not all, whether it `shows`, `prompts` whose "
        "answers differ and by what `distance`; by rank `steps` poisoned, at `most` how much, `findings`, `notes`, "
        "`error`",
    ),
)
EXACT = record(
    wrong=of("boolean", "exit code 1"),
    inconclusive=TEXT_OR_NULL,
    error=TEXT_OR_NULL,
    ranks=array(
        record(
            compared=of("integer", "replays of full graphs that were compared"),
            wrong=COUNT,
            skipped=of("integer", "replays that could not be judged"),
            unseen=of("integer", "replays of other graphs, which are not compared"),
            noise=of("number", "largest relative difference of two runs of one step without its graph"),
            rounding=of("number", "largest one of a replay and such a run that counts as rounding"),
            as_captured=of(
                "number", "largest one of a replay that equals a run split by the capture's longest request"
            ),
            graphs=table(COUNT, "replays by graph"),
            findings=TEXTS,
            reason=of("string?", "why not every replay was compared"),
        )
    ),
)
GAP = record(
    source=of("string", "what the engine has that the one before has not"),
    tokens=of("integer", "chosen by both engines in the same context"),
    mean=of("number?", "difference of log-probabilities"),
    largest=of("number?"),
    diverging=of("integer", "answers with another token"),
    share=of("number?", "of the means of all sources; null: no source of its own"),
)
PROMPT = record(
    prompt=of("integer", "its number, from 0"),
    kind=one_of(Kind),
    length=of("integer", "tokens of the answer"),
    compared=COUNT,
    position=of("integer?", "of the first difference, from 0"),
    expected=of("integer?", "token there without graphs; null: the answer has ended"),
    found=of("integer?", "token there with graphs"),
    margin=of("number?", "between the two best log-probabilities of the reference there"),
    gap=of("number?", "how much less likely than its own token the reference finds the other, at least"),
    distance=of("number?", "largest difference of log-probabilities up to there"),
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
    outdated=of("boolean", "the process could not write it anew"),
    in_step_since=of("number?", "when a step of over two minutes began, in epoch seconds"),
    starting=of("boolean"),
    problem=of("string?", "why the plugin stopped the engine"),
)
ENGINE = record(
    engine=of("string", "16 hexadecimal digits, of several nodes those of rank 0; of Prometheus, labels of the target"),
    status=of(
        "string",
        "`in order`, `not in order`, `starting`, `stopped` (by the plugin), `ended`, `silent` (with something in "
        "`wrong` if its processes exist here)",
    ),
    live=of("boolean", "any of its processes is alive"),
    user=of("string?", "whose records these are"),
    wrong=array(TEXT, "what makes the exit code 1"),
    notes=TEXTS,
    model=of("string?", "null as long as it is not known"),
    vllm=TEXTS,
    graphfix=TEXTS,
    canary=of("boolean", "it gets the fixes"),
    bucket=of("integer?", "of 10,000; null without a rollout"),
    percentage=of("number?", "of `VLLM_GRAPHFIX_ROLLOUT`"),
    master=of("string", "value of `VLLM_GRAPHFIX`"),
    misconfigured=MISCONFIGURED,
    hosts=TEXTS,
    ranks=record(
        expected=COUNT,
        recorded=COUNT,
        agreeing=COUNT,
        unreadable=array(record(host=TEXT, pid=COUNT, file=TEXT, why=TEXT), "records that cannot be read"),
        missing=array(record(ranks=array(COUNT), agreed=of("boolean")), "ranks without a record, and if they agreed"),
    ),
    processes=array(PROCESS),
    fixes=table(
        record(
            states=table(TEXTS, "state to processes"),
            mode=TEXT,
            reason=TEXT,
            events=table(COUNT, "over the ranks that are alive"),
        ),
        "by fix",
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
    "explain": (explain.SCHEMA, "explain FIX --json", record("", ("goes_with",), name=FIX, pr=PR, **SECTIONS)),
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
            source=of("string", "the vLLM that was run"),
            device=of("string", "the GPU's name, or `CPU double`"),
            environment=table({}, "torch, Python, modes of the fixes; on a GPU also driver, CUDA, capability, seed"),
            holds=of("boolean", "all proofs were run and hold"),
            complete=of("boolean", "none was skipped"),
            logs=of("string?", "folder with the engines' logs, where one failed or a proof does not hold"),
            seconds=of("number?", "on a GPU: of the run"),
            engines=array(
                of("object"),
                "on a GPU: `name` of each run, `error`, `forked` or `why_not_forked`, and seconds: `began`, `seconds`, "
                "`imports`, `start`, `answers`, and `cpu` of all processors",
            ),
            fixes=array(record(**PROOF, further=array(record(case=TEXT, **PROOF), "other cases of the fix"))),
        ),
    ),
    "compare": (
        compare.SCHEMA,
        "compare MODEL --json",
        record(
            **dict.fromkeys(("vllm", "graphfix", "torch", "python", "device", "driver"), TEXT),
            switches=of("string", "variables of the plugin in the environment"),
            seed=of("string", "of the made-up prompts"),
            model=TEXT,
            flags=array(TEXT, "as passed; of a twin, all that its engines have"),
            twin=nullable(
                record(
                    folder=TEXT,
                    parameters=COUNT,
                    changes=array(of("object"), "`key`, `before`, `after`, the fixes that it `hides`, `why`"),
                ),
                "with `--twin`: what was compared",
            ),
            corrupt=of("boolean", "an answer is, or drafts are lost: exit code 1"),
            inconclusive=of("string?", "exit code 3: why there is no verdict"),
            error=of("string?", "of the engine with graphs"),
            note=of("string?", "what the third and fourth engine were for, or why one did not run"),
            logs=of("string?", "folder with the engines' logs, where one ended in an error"),
            cudagraph_mode=of("string?", "of the engine with graphs, as its workers had it in the end"),
            fixes=nullable(table(table(TEXT)), "states, by rank and fix; empty if the workers did not answer"),
            drafts=record(
                "tokens of drafts; null without speculative decoding", eager=PAIR, graphs=PAIR, lost=of("boolean")
            ),
            poison=nullable(POISON, "with `--poison`"),
            exact=nullable(EXACT, "with `--exact`"),
            gap=nullable(array(GAP), "with `--gap`"),
            noise=of("number?", "of log-probabilities, eager against itself"),
            tolerance=of("number?", "up to where a difference counts as rounding"),
            distance=of("number?", "largest difference between eager and graphs"),
            tokens=of("integer?", "of all answers"),
            compared=of("integer?", "tokens before which a reference had the same text"),
            prompts=array(PROMPT),
        ),
    ),
    "fleet": (
        fleet.SCHEMA,
        "fleet --json",
        record(
            graphfix=TEXT,
            host=TEXT,
            folder=of("string?", "of the records; null with `--prometheus`"),
            prometheus=of("string?", "address of the server that was asked; null: records were read"),
            exit_code=COUNT,
            engines=array(ENGINE, "running ones first"),
            unrecorded=array(
                record(
                    "",
                    pid=COUNT,
                    user=TEXT,
                    command=of("string", "without secrets"),
                    age=of("number", "in seconds"),
                    reason=TEXT,
                    elsewhere=of("boolean", "its records are in another folder"),
                    starting=of("boolean"),
                ),
                "processes of vLLM without a record",
            ),
            wrong=array(TEXT, "on engines of which no record can be read; each makes the exit code 1"),
            notes=TEXTS,
            problems=array(TEXT, "on files that could not be read"),
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
