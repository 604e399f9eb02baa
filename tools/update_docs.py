"""Writes the generated parts of the pages: tables and texts on fixes and releases.

They are taken from the fixes' records, the pages beside these, their trials and the manifest. A fix without a page in
docs/ gets one.

    python tools/update_docs.py [--check]

What is generated stands between `<!-- generated: NAME -->` and `<!-- end -->`; everything else is left alone. With
--check nothing is written, and the exit code is 1 if something would be. Exit code 2: a record, the manifest or a page
lacks what the pages need.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Any, TypeVar

import yaml
from typer.testing import CliRunner

import evidence_tables
import looked_at_tables
import make_schemas
import measure_claims
import runtime_modules
from fetch_vllm import ALL_RELEASES
from vllm_graphfix import manifest
from vllm_graphfix.commands import cli
from vllm_graphfix.commands.explain import by_default, references
from vllm_graphfix.commands.links import thread
from vllm_graphfix.deployment.needs import Need, briefly, by_choice, described
from vllm_graphfix.fix import Fix, Mode, Verdict
from vllm_graphfix.fixes import BY_NAME, FIXES, about
from vllm_graphfix.fixes._about import NEWEST, About
from vllm_graphfix.shadow.process import DRAFTER
from vllm_graphfix.shadow.runners import RUNNERS
from vllm_graphfix.verify.trial import trial_of

T = TypeVar("T")


class DocsError(Exception):
    """The pages cannot be written; the message says what to do."""


PROJECT = Path(__file__).parent.parent
DOCS = PROJECT / "docs"
FIXES_PAGES = {fix.name: DOCS / "fixes" / f"{fix.name}.md" for fix in FIXES}
PAGES = (
    PROJECT / "README.md",
    *(
        DOCS / f"{name}.md"
        for name in (
            "fixes",
            "addresses",
            "configuration",
            "am-i-hit",
            "claims",
            "comparing",
            "detectors",
            "evidence",
            "fleet",
            "how-it-works",
            "hunt",
            "long-lived-caches",
            "looked-at",
            "metrics",
            "performance",
            "rollout",
            "testing",
            "verifying",
            "what-an-engine-imports",
        )
    ),
    *FIXES_PAGES.values(),
)
NEW_PAGE = """# {0}

<!-- generated: {0} -->
<!-- end -->

## Evidence

On [the CPU double](../evidence.md#on-the-cpu-double):

<!-- recorded: cpu double -->
<!-- end -->

<!-- generated: {0}/evidence -->
<!-- end -->

<!-- generated: {0}/cause -->
<!-- end -->
"""
"""The page of a fix, in the order of an operator's questions: am I hit, what do I do, how is that known, why."""
THREAD = re.compile(r"\b(PR|issue) (\d+)\b")
DEFAULT_RUNNERS = {"0.14.1": "V1", "0.22.0": "V1, V2 for some models", "0.29.0": "V2"}
"""The default model runner, by the first release that has it."""
GROUPS = {
    "Images and videos": r"images|cudagraph_mm_encoder",
    "LoRA": r"--enable-lora",
    "Several ranks, micro-batches": r"data parallelism|--decode-context-parallel-size|--enable-dbo",
    "Mamba, hybrids, short convolutions": r"Mamba|several groups of Mamba|recurrent layers",
    "Drafts (speculative decoding)": r"speculative decoding|eagle|DSpark|dflash|extract_hidden_states",
    "Latent attention (MLA): DeepSeek, Kimi": r"\w+ ?MLA|FlashMLA|sparse attention",
    "Any other model": "",
}
"""What somebody runs, and how a precondition begins by which a defect is listed there; the first that fits."""
Row = tuple[str, ...]
TABLES: dict[str, tuple[Row, Callable[[Fix, About], Row]]] = {
    "summary": (
        ("fix", "what you see without it", "who is affected", "with it"),
        lambda fix, record: (
            f"{_linked(fix)}{' ¹' if fix.default is Mode.OBSERVE else ''}",
            record.seen,
            briefly(fix.needs()),
            record.summary,
        ),
    ),
    "needs": (("fix", "you need all of this"), lambda fix, record: (_linked(fix), _needs(fix))),
    "engines": (
        ("fix", "model, engine", "where the defect shows"),
        lambda fix, record: (_code(fix), trial_of(fix.name).engine, trial_of(fix.name).shows_in),
    ),
    "already-right": (
        ("fix", "what it does where the value is right already"),
        lambda fix, record: (_linked(fix), record.already_right),
    ),
    "caches": (
        ("fix", "what the defect may have left in a store", "how sure"),
        lambda fix, record: (_code(fix), record.in_caches, record.how_sure),
    ),
}
"""Tables with a row for each fix: the heads of columns, and a function that makes the row."""


def _code(fix: Fix) -> str:
    return f"`{fix.name}`"


def _linked(fix: Fix) -> str:
    return f"[{_code(fix)}](fixes/{fix.name}.md)"


def _needs(fix: Fix) -> str:
    return described(fix.needs())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    try:
        # Make all pages before writing the first, so that an error writes none.
        pages = [(page, written, updated(written)) for page, written in _written()]
    except DocsError as error:
        print(f"update_docs: {error}", file=sys.stderr)
        return 2
    outdated = [(page, text) for page, written, text in pages if text != written]
    for page, text in outdated:
        print(f"{page.relative_to(PROJECT)}: {'out of date; run tools/update_docs.py' if check else 'updated'}")
        if not check:
            page.write_text(text)
    return int(check and bool(outdated))


def _written() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        try:
            yield page, page.read_text()
        except FileNotFoundError:
            if page not in FIXES_PAGES.values():
                raise DocsError(f"{page.relative_to(PROJECT)} is missing") from None
            yield page, NEW_PAGE.format(page.stem)


def updated(text: str) -> str:
    """Return *text* with its generated parts made again. Raises `DocsError`."""

    def generate(match: re.Match[str]) -> str:
        name = match[1]
        made: dict[str, Callable[[], Iterator[str]]] = {
            "defects": defects,
            "matrix": matrix,
            "symptoms": symptoms,
            "verdicts": verdict_table,
            "variables": variables,
            "watched": watched,
            "runners": runners,
            "status": status,
            "alerts": alerts,
            **{f"json/{output}": partial(json_keys, output) for output in make_schemas.OUTPUTS},
            "claims": measure_claims.table,
            "detectors": evidence_tables.detectors,
            "runtime-folders": runtime_modules.summary,
            "runtime-modules": runtime_modules.table,
            "test-modules": test_modules,
            "looked-at/sections": looked_at_tables.sections,
            **{f"looked-at/{name}": partial(looked_at_tables.table, name) for name in looked_at_tables.COLUMNS},
        }
        made |= {f"evidence/{each}": partial(evidence_tables.table, each) for each in evidence_tables.names()}
        if name in TABLES:
            made[name] = partial(a_row_for_each_fix, *TABLES[name])
        fix, _, part = name.partition("/")
        if fix in BY_NAME and part in {"", "cause"}:
            made[name] = partial(cause if part else facts, BY_NAME[fix])
        if fix in BY_NAME and part == "evidence":
            made[name] = lambda: map(with_threads, evidence_tables.tables_of_fix(fix))
        if name not in made:
            raise DocsError(
                f"`<!-- generated: {name} -->`: {name} is neither a fix nor a table; tables are "
                f"{', '.join([*made, *TABLES])}"
            )
        lines = made[name]()
        return "\n".join([f"<!-- generated: {name} -->", *lines, "<!-- end -->"])

    text = re.sub(
        r"(<!-- number of (\w+) -->)\d+", lambda match: f"{match[1]}{numbers().get(match[2], match[2])}", text
    )
    text = re.sub(r"(<!-- newest release -->)[\d.]*\d", rf"\g<1>{NEWEST}", text)
    return re.sub(r"<!-- generated: (\S+) -->\n.*?<!-- end -->", generate, text, flags=re.DOTALL)


@cache
def numbers() -> dict[str, int]:
    """Count all fixes, those observed by default, those that the newest release needs, and those of a choice there.

    The last are fixes of a model runner or a mode that is not the release's default.
    """
    entries = [(fix, entry) for fix in FIXES for entry in _entries(fix) if NEWEST in entry["releases"]]
    needed = [(fix, str(entry["shape"])) for fix, entry in entries if entry["verdict"] == Verdict.AFFECTED.value]
    return {
        "fixes": len(FIXES),
        "observed": sum(fix.default is Mode.OBSERVE for fix in FIXES),
        "needed": len(needed),
        "chosen": sum(by_choice(fix.needs(), default_runner_of(NEWEST), shape) for fix, shape in needed),
    }


def a_row_for_each_fix(columns: Row, row: Callable[[Fix, About], Row]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    yield from (f"| {' | '.join(row(fix, about(fix)))} |" for fix in FIXES)


def symptoms() -> Iterator[str]:
    """Yield a table for each group of `GROUPS`: what somebody sees who runs that, and where to look."""
    for title in GROUPS:
        fixes = [fix for fix in FIXES if _group(fix) == title]
        yield from ("", f"### {title}", "", "| what you see | only with | look at | first test |", "|---|---|---|---|")
        for fix in fixes:
            record = about(fix)
            yield f"| {record.seen} | {briefly(fix.needs())} | {_linked(fix)} | {record.first_test} |"
    yield ""


def _group(fix: Fix) -> str:
    texts = [need.text for need in fix.needs()]
    return next(title for title, begins in GROUPS.items() if any(re.match(begins, text) for text in texts))


def matrix() -> Iterator[str]:
    """Yield a row for each fix, a column for each release: ● affected, · not, ? not recognised."""
    signs = {Verdict.AFFECTED.value: "●", Verdict.UNRECOGNISED.value: "?"}
    yield f"| | {' | '.join(release.removeprefix('0.') for release in ALL_RELEASES)} |"
    yield "|---" * (len(ALL_RELEASES) + 1) + "|"
    for fix in FIXES:
        by_release = verdicts(fix)
        cells = (signs.get(by_release[release], "·") for release in ALL_RELEASES)
        yield f"| {_linked(fix)} | {' | '.join(cells)} |"


def defects() -> Iterator[str]:
    """Yield a row for consecutive releases with the same defects."""
    yield "| vLLM | has the defects |"
    yield "|---|---|"
    for span, row in _rows(lambda verdict: verdict == Verdict.AFFECTED.value):
        names = [f"`{fix.name}`" for fix, affected in zip(FIXES, row, strict=True) if affected]
        yield f"| {span} | {', '.join(names) or 'none'} |"


def verdict_table() -> Iterator[str]:
    """Yield a row for each fix: spans of consecutive releases by verdict."""
    occurring = {verdict for fix in FIXES for verdict in verdicts(fix).values()}
    columns = [verdict.value for verdict in Verdict if verdict.value in occurring]
    yield f"| fix | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for fix in FIXES:
        by_release = verdicts(fix)
        spans: dict[str, list[str]] = {column: [] for column in columns}
        for verdict, releases in groupby(ALL_RELEASES, key=by_release.__getitem__):
            spans[verdict].append(_span(list(releases)))
        yield f"| {_linked(fix)} | {' | '.join(', '.join(spans[column]) for column in columns)} |"


def watched() -> Iterator[str]:
    """Yield a row for each fix: the replays that its proof has checked, or why the shadow check cannot see it."""
    runners = {each.name: each for each in RUNNERS}
    yield "| fix | on the CPU double | on a GPU | not watched, because |"
    yield "|---|---|---|---|"
    for fix in FIXES:
        trial = trial_of(fix.name)
        graphs = [runners[each.graphs] for each in (trial.watched, *trial.watched_further) if each]
        double = ", ".join(
            f"drafter on {each.runner}" if each.name.endswith(DRAFTER) else each.runner for each in graphs
        )
        engine = any(case.watched for case in (trial.case, *trial.further) if case)
        yield f"| `{fix.name}` | {double} | {'watched' if engine else ''} | {trial.unwatched} |"


def runners() -> Iterator[str]:
    """Yield a row for each fix of one model runner, or of a mode that no release has by default."""
    yield "| fix | affected releases | concerned | the default there |"
    yield "|---|---|---|---|"
    for fix in FIXES:
        for need in (need for need in fix.needs() if need.runners is not None or not need.usual):
            affected = {
                release: str(entry["shape"])
                for entry in _entries(fix)
                if entry["verdict"] == Verdict.AFFECTED.value
                for release in entry["releases"]
            }
            of_release = {release: _concerned(need, release, shape) for release, shape in affected.items()}
            for (concerned, usual), same in groupby(of_release, key=of_release.__getitem__):
                yield f"| {_linked(fix)} | {_span(list(same))} | {concerned} | {usual} |"


def status() -> Iterator[str]:
    """Yield the first lines of `vllm-graphfix status` for a stock release."""
    arguments, lines = "status --vllm 0.21.0", 7
    result = CliRunner().invoke(cli.app, arguments.split())
    if result.exit_code:
        raise DocsError(f"`vllm-graphfix {arguments}` ends with {result.exit_code}")
    yield from ("```console", f"$ vllm-graphfix {arguments}")
    yield from (line.rstrip() for line in result.stdout.splitlines()[:lines])
    yield from ("…", "```")


def alerts() -> Iterator[str]:
    """Yield a row for each alert of deploy/prometheus: its summary, severity, and for how long its expression holds."""
    rules = yaml.safe_load((PROJECT / "deploy" / "prometheus" / "vllm-graphfix.rules.yml").read_text())
    yield "| alert | severity | for | fires when |"
    yield "|---|---|---|---|"
    for alert in (rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule):
        name, labels = alert["alert"], re.compile(r"{{ \$labels\.(\w+) }}")
        summary = re.sub(r"{{ \$value.*?}}", "N", labels.sub(r"*\1*", alert["annotations"]["summary"]))
        page = f"alerts.md#{name.lower()}"
        yield f"| [`{name}`]({page}) | {alert['labels']['severity']} | {alert.get('for', '')} | {summary} |"


def json_keys(output: str) -> Iterator[str]:
    """Yield a row for each key of the JSON *output* whose schema describes it."""
    yield "| key | |"
    yield "|---|---|"
    for path, text in _described(make_schemas.OUTPUTS[output][2]):
        yield f"| `{path}` | {text} |"


def _described(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and description of each key below *schema*; of a proof's further cases only that they are."""
    schema = schema.get("anyOf", [schema])[0]
    if items := schema.get("items"):
        yield from _described(items, f"{path}[]")
    for name, child in schema.get("properties", {}).items():
        inner = f"{path}.{name}".lstrip(".")
        if text := child.get("description"):
            yield inner, text
        if name != "further":
            yield from _described(child, inner)


def _concerned(need: Need, release: str, shape: str) -> tuple[str, str]:
    """Return the precondition *need* on *release*, and ``yes`` if it holds by default there."""
    if need.runners is None:
        return f"`{need.text}`", "no"
    possible, default = need.runners(shape), default_runner_of(release)
    if len(possible) > 1:
        return "model runners V1 and V2", "yes"
    usual = {True: "yes", False: "no"}[default == possible[0]] if default in ("V1", "V2") else "of some models"
    return f"model runner {possible[0]}", usual


def default_runner_of(release: str) -> str:
    """Return the default model runner of *release*; a test compares it with the releases' code."""
    since = max(first for first in DEFAULT_RUNNERS if _numbers(first) <= _numbers(release))
    return DEFAULT_RUNNERS[since]


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def test_modules() -> Iterator[str]:
    """Yield a row for each module of tests: the first paragraph of its docstring."""
    yield "| module | what it tests |"
    yield "|---|---|"
    for module in sorted((PROJECT / "tests").glob("test_*.py")):
        text = " ".join((ast.get_docstring(ast.parse(module.read_text())) or "").partition("\n\n")[0].split())
        text = with_threads(text.replace("``", "`").replace("|", "&#124;"))
        yield f"| `{module.name}` | {text} |"


def variables() -> Iterator[str]:
    yield "| variable | default | rests on |"
    yield "|---|---|---|"
    yield from (
        f"| `{fix.variable}` | `{fix.default.value}` | {fix.default_rationale or 'nothing yet'} |" for fix in FIXES
    )


def _rows(column: Callable[[str], T]) -> Iterator[tuple[str, tuple[T, ...]]]:
    """Yield spans of consecutive releases with the same *column* of every fix's verdict, and these values."""
    releases = sorted(verdicts(FIXES[0]), key=lambda release: tuple(map(int, release.split("."))))
    by_fix = {fix.name: verdicts(fix) for fix in FIXES}
    for row, group in groupby(releases, key=lambda release: tuple(column(by_fix[fix.name][release]) for fix in FIXES)):
        yield _span(list(group)), row


def verdicts(fix: Fix) -> dict[str, str]:
    """Return verdicts by release from the manifest. Raises `DocsError` if it lacks a release."""
    by_release = {release: entry["verdict"] for entry in _entries(fix) for release in entry["releases"]}
    if missing := [release for release in ALL_RELEASES if release not in by_release]:
        raise DocsError(f"the manifest lacks {fix.name} on vLLM {', '.join(missing)}; run `make manifest`")
    return by_release


def facts(fix: Fix) -> Iterator[str]:
    """Yield the beginning of the page of *fix*: who is affected, and what they can do."""
    record = about(fix)
    yield ""
    yield f"What the fix sees to: {with_threads(record.summary)}."
    yield ""
    yield "## Am I hit?"
    yield ""
    rows = {
        "Symptom": record.symptom,
        "Only with": _needs(fix),
        "Affected": record.releases,
        "First test": record.first_test,
        "How to tell": record.detect,
        "Ran on": record.ran_on or "no GPU",
    }
    yield from _two_columns(rows)
    yield ""
    yield "## Switch"
    yield ""
    yield "| variable | default | values |"
    yield "|---|---|---|"
    yield f"| `{fix.variable}` | `{fix.default.value}` | {', '.join(f'`{mode.value}`' for mode in Mode)} |"
    yield ""
    page = "[configuration](../configuration.md#variables-of-the-fixes)"
    yield f"Read when an engine starts; {page} says what each value does."
    text = re.sub(rf"{fix.variable}=auto|=on", r"`\g<0>`", by_default(fix))
    text = f"By default {text} ([the rule](../configuration.md#what-is-on-by-default))."
    yield from wrap(text, 120, break_long_words=False, break_on_hyphens=False)
    for other in fix.requires:
        yield f"It goes with [`{other.name}`]({other.name}.md): without that one, {other.because}."
    yield ""
    yield "## Without the plugin"
    yield ""
    yield from _two_columns(
        {"Workaround": record.workaround, "Not needed from": record.removable.removeprefix("with ")}
    )
    yield ""


def cause(fix: Fix) -> Iterator[str]:
    """Yield the end of the page of *fix*: cause, remedy, events, and the shapes of code that it corrects."""
    record = about(fix)
    yield ""
    yield "## Cause and remedy"
    yield ""
    yield from _two_columns({"Cause": record.cause, "Remedy": record.remedy, "Upstream": references(record)})
    yield ""
    yield "| event | one more of it says |"
    yield "|---|---|"
    yield from (f"| `{event.name}` | {event.meaning} |" for event in fix.events)
    yield ""
    yield "| shape | releases | what the verdict rests on |"
    yield "|---|---|---|"
    affected = [entry for entry in _entries(fix) if entry["verdict"] == Verdict.AFFECTED.value]
    above = ""
    for shape, same in groupby(affected, key=lambda entry: str(entry["shape"])):
        entries = list(same)
        names = (name.partition("::")[2] for name in entries[0]["slices"] if not name.endswith("()"))
        evidence = ", ".join(f"`{name}`" for name in dict.fromkeys(filter(None, names)))
        span = _span([release for entry in entries for release in entry["releases"]])
        yield f"| `{shape}` | {span} | {'the same' if evidence == above else evidence} |"
        above = evidence
    yield ""


def _two_columns(rows: dict[str, str]) -> Iterator[str]:
    yield "| | |"
    yield "|---|---|"
    yield from (f"| {name} | {with_threads(text)} |" for name, text in rows.items() if text)


def with_threads(text: str) -> str:
    """Return *text* with a link on each upstream thread that it names."""
    return THREAD.sub(lambda match: f"[{match[0]}]({thread(*match.groups())})", text)


def _entries(fix: Fix) -> list[dict[str, Any]]:
    try:
        fixes = manifest.load()["fixes"]
    except manifest.ManifestError as error:
        raise DocsError(f"{str(error).partition(';')[0]}; run `make manifest`") from None
    if fix.name not in fixes:
        raise DocsError(f"the manifest lacks {fix.name}; run `make manifest`")
    entries: list[dict[str, Any]] = fixes[fix.name]
    return entries


def _span(releases: list[str]) -> str:
    return releases[0] if len(releases) == 1 else f"{releases[0]} – {releases[-1]}"


if __name__ == "__main__":
    sys.exit(main())
