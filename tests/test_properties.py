"""Whatever the environment holds: the settings, the decision that is handed on, and all of `register`."""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import vllm_graphfix
from hostile import JSON, LONG_TEXT, changed, dumped, plant, share
from stock import release_root, run_in_release
from vllm_graphfix.commands.status import status
from vllm_graphfix.fix import Mode, State
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.patching.applied_fix import AppliedFix, Policy
from vllm_graphfix.records import folder as status_folder
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.settings.decision import BUCKETS, Decision, decide, decode
from vllm_graphfix.settings.environment import DECISION, PREFIX, STATUS_DIR
from vllm_graphfix.source.files import open_source
from watched import watched

NAMES = tuple(fix.name for fix in FIXES)
KNOWN = settings.names(NAMES)
MEANINGFUL = ("on", "OFF", "auto", "observe", "strict", " 1 ", "25%", "0.5", "100.01", "٣", "1e1")


@st.composite
def _mistyped(draw: st.DrawFn) -> str:
    """A name of ours with one or two letters missing, or one too many."""
    name = draw(st.sampled_from(KNOWN))
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.integers(0, len(name) - 1))
        name = name[:place] + draw(st.sampled_from(("", "X", name[place] * 2))) + name[place + 1 :]
    return name


names = (
    st.sampled_from(KNOWN) | st.builds(str.lower, st.sampled_from(KNOWN)) | LONG_TEXT.map(PREFIX.__add__) | _mistyped()
)
values = st.sampled_from(MEANINGFUL) | LONG_TEXT
environments = st.dictionaries(names, values, max_size=30)


@given(environments)
def test_any_environment_is_settings_and_a_few_short_lines(environment: dict[str, str]) -> None:
    parsed = settings.read(environment, NAMES)
    assert parsed.modes.keys() == set(NAMES)
    assert parsed.explicit <= set(NAMES)
    assert all(problem.isprintable() and len(problem) < 1000 for problem in parsed.problems), parsed.problems
    assert len(parsed.problems) <= len(KNOWN) + 21


def test_a_hundred_thousand_unknown_names_are_reported_at_once_in_a_few_lines() -> None:
    environment = {f"{PREFIX}_{number}": "on" for number in range(100_000)}
    parsed = watched(lambda: settings.read(environment, NAMES), seconds=10).value
    assert len(parsed.problems) == 21
    assert parsed.problems[-1].startswith(
        "99980 more variables that begin with VLLM_GRAPHFIX are unknown and have no effect"
    )


@given(environments)
@example({"VLLM_GRAPHFIX_ROLLOUT": "5", "VLLM_GRAPHFIX_ROLLOUT_KEY": "\N{PILE OF POO}" * 30_000})
@example(
    dict.fromkeys((*KNOWN, *(f"{PREFIX}_{'X' * 70}{number}" for number in range(9))), "\\" * 60)
    | {"VLLM_GRAPHFIX_ROLLOUT_KEY": "\N{PILE OF POO}" * 300}
)
def test_every_environment_makes_a_decision_that_other_processes_can_be_started_with(
    environment: dict[str, str],
) -> None:
    made = decide(settings.read(environment, NAMES), "0.18.1")
    encoded = made.encode()
    assert decode(encoded) == made
    assert encoded.isascii()
    assert encoded.isprintable()
    assert len(encoded) <= 9_300  # the limit of a decision that is read is a third more


SAME = {"1", "true", "yes", "0", "false", "no"}
MASTERS = {"", *(master.value for master in settings.Master), *SAME}
MODES = {"", *(mode.value for mode in Mode), *SAME}
SOURCE = open_source(release_root("0.18.1"))


def mistyped(environment: Mapping[str, str], name: str, meaningful: set[str]) -> bool:
    return environment.get(name, "").strip().lower() not in meaningful


@given(environments)
@example({"VLLM_GRAPHFIX": "observ"})
@example({"VLLM_GRAPHFIX": "strct", "VLLM_GRAPHFIX_MAMBA_PADDING": "on"})
@example({"VLLM_GRAPHFIX_FLASHMLA_FP8": "onn"})
@example({"VLLM_GRAPHFIX_ROLLOUT": "half"})
@example({"VLLM_GRAPHFIX_ROLLOUT": "", "VLLM_GRAPHFIX_MAMBA_PADDING": "on"})
def test_a_value_that_means_nothing_never_applies_a_fix(environment: dict[str, str]) -> None:
    """No fix is applied, neither as processes of an engine read the value nor as `status` does.

    It is told wherever there is a place for it.
    """
    made = decide(settings.read(environment, NAMES), "0.18.1")
    wanted = Policy(made.master, made.modes, made.withheld, made.misconfigured)
    judged = status(SOURCE, environment)
    would_be = {row.fix.name: row.would_be for row in judged.rows}
    master = mistyped(environment, PREFIX, MASTERS)
    rollout = settings.ROLLOUT in environment and made.rollout is None
    for fix in FIXES:
        alone = mistyped(environment, fix.variable, MODES)
        assert (fix.variable in made.misconfigured) == alone
        if master or rollout or alone:
            assert not AppliedFix(fix, wanted).engaged
            assert not wanted.required(fix.name)
            assert would_be[fix.name] not in (State.ACTIVE, State.OBSERVING)
    assert (PREFIX in made.misconfigured) == master
    assert (settings.ROLLOUT in made.misconfigured) == rollout
    assert not (made.applies and (master or rollout))
    mistyped_names = [name for name in environment if name not in KNOWN and environment[name].strip()]
    less = any(settings.asks_for_less(name, environment[name]) for name in environment)
    assert not (less and made.applies)
    assert not less or made.is_off
    assert bool(made.misconfigured.keys() - set(KNOWN)) == bool(mistyped_names or less)
    assert (judged.misconfigured, judged.is_incomplete or not made.misconfigured) == (made.misconfigured, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", environment)
        assert not (vllm_graphfix._requires_a_fix() and (master or rollout or less))


@given(_mistyped() | LONG_TEXT, st.sampled_from(sorted(MASTERS | {"5", "100", " "})))
def test_every_mistyped_name_of_the_switch_or_the_percentage_fails_closed(name: str, value: str) -> None:
    """So far as `register` goes by it, where no module can be imported, too; two words are told apart by hand here."""
    close = any(_distance(name.upper(), word) <= 2 for word in (PREFIX, settings.ROLLOUT))
    if name in KNOWN or not close or not value.strip():
        return
    made = decide(settings.read({name: value, PREFIX: "strict"}, NAMES), "0.18.1")
    assert (made.is_off, made.applies, len(made.misconfigured)) == (True, False, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", {name: value, PREFIX: "strict"})
        assert not vllm_graphfix._requires_a_fix()


def _distance(word: str, other: str) -> int:
    """Levenshtein's, row by row; of words of other lengths no more than that it is large."""
    if abs(len(word) - len(other)) > 2:
        return 3
    row = list(range(len(other) + 1))
    for number, letter in enumerate(word, 1):
        before, row = row, [number]
        for place, each in enumerate(other):
            row.append(min(before[place + 1] + 1, row[place] + 1, before[place] + (letter != each)))
    return row[-1]


def test_a_decision_has_room_for_everything_that_can_mean_nothing() -> None:
    environment = dict.fromkeys(KNOWN, "\\" * 50) | {settings.ROLLOUT_KEY: "\N{PILE OF POO}" * 300}
    environment |= {f"{PREFIX}_{number}{'X' * 100}": "\\" * 50 for number in range(100)}
    made = decide(settings.read(environment, NAMES), "0.18.1")
    assert decode(made.encode()) == made


VALID: dict[str, Any] = json.loads(
    decide(settings.read({"VLLM_GRAPHFIX_ROLLOUT": "5", "VLLM_GRAPHFIX_ROLLOUT_KEY": "a"}, NAMES), "0.18.1").encode()
)
hand_overs = LONG_TEXT | JSON.map(dumped) | changed(VALID).map(dumped)


def assert_sound(decision: Decision) -> None:
    """Assert that *decision* can be used: printed, put in a record, handed on again."""
    assert re.fullmatch("[0-9a-f]{16}", decision.engine)  # the name of a file begins with it
    assert decision.bucket is None or 0 <= decision.bucket < BUCKETS
    assert decision.rollout is None or 0 <= decision.rollout <= BUCKETS
    assert decision.withheld is None or decision.withheld.isprintable()
    assert decode(decision.encode()) == decision


@given(hand_overs)
@example(dumped(VALID))
@example(dumped(VALID | {"engine": "/../../../x"}))
@example(dumped(VALID | {"rollout": 10**4000, "canary": False}))
@example(dumped(VALID | {"bucket": -(10**4000)}))
@example(dumped(VALID | {"modes": {"capture-state": "@deep"}}))
@example(dumped(VALID | {"pid": "@huge"}))
@example("[" * 8000)
def test_any_text_in_place_of_a_decision_decodes_to_one_or_to_none(text: str) -> None:
    decision = decode(text)
    if decision is not None:
        assert_sound(decision)


# -- register ----------------------------------------------------------------------------------------------------

raw = st.binary(max_size=40).map(lambda data: data.replace(b"\0", b"")) | st.sampled_from(
    [b"\xff\xfe", b"\x1b[2J", b"@long", *(value.encode() for value in MEANINGFUL)]
)
decisions = changed(VALID | {"graphfix": vllm_graphfix.__version__, "vllm": ""}).map(
    lambda value: dumped(value).encode()
)
variables = st.dictionaries(
    st.sampled_from([name.encode() for name in (*KNOWN, "VLLM_PLUGINS") if name not in (DECISION, STATUS_DIR)])
    | raw.map(lambda data: b"VLLM_GRAPHFIX" + data.replace(b"=", b"")),
    raw,
    max_size=8,
)
FOLDERS = ("", "here", "nowhere", "loop", "file", "fifo", "locked", "@long", "\udcff", "a\nb", "here/./")
"""The status folder, below one of the test's own; the empty name is the default."""
MODULES = ("vllm.v1.engine.core", "vllm.v1.worker.worker_base", "vllm.model_executor.models.registry", "somebody")


def registered(scratch: Path, environment: dict[bytes, bytes], folder: str, module: str) -> tuple[list[str], str]:
    """Calls `register` as *module* of vLLM does, whose place is taken by a stand-in.

    Returns what was logged, and the decision that is handed on.
    """
    status_folder.DEFAULT_FOLDER = str(scratch / "default")
    os.chdir(scratch)
    os.environb.update({name: b"a" * 100_000 if value == b"@long" else value for name, value in environment.items()})
    if folder:
        base = str(scratch / folder.replace("@long", "n/" * 3000))
        os.environ[STATUS_DIR] = folder if folder == "here/./" else base  # a relative one, too
    logged: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(self.format(record))

    logger = logging.getLogger("vllm.graphfix")
    logger.addHandler(Collector())
    logger.setLevel(logging.DEBUG)
    vllm_graphfix._engine_process.cache_clear()
    exec("register()", {"__name__": module, "register": vllm_graphfix.register, "vllm_config": None})  # noqa: S102
    vllm_graphfix._this_process().status_record.flush()
    return logged, os.environ[DECISION]


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@given(variables, st.none() | decisions | raw, st.sampled_from(FOLDERS), st.sampled_from(MODULES))
@example({}, dumped(VALID | {"engine": "/../../../x", "vllm": ""}).encode(), "here", MODULES[0])
@example({b"VLLM_GRAPHFIX_ROLLOUT": b"5", b"VLLM_GRAPHFIX_ROLLOUT_KEY": b"@long"}, None, "here", MODULES[1])
@example({b"VLLM_GRAPHFIX": b"observ"}, None, "here", MODULES[1])
@example({b"VLLM_GRAPHFIX": b"strict"}, b"[" * 5000, "@long", MODULES[0])
@share(40)
def test_register_never_raises_and_writes_nothing_but_its_record(
    environment: dict[bytes, bytes], decision: bytes | None, folder: str, module: str
) -> None:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for kind in ("loop", "file", "fifo"):
            plant(scratch / kind, kind, b"", scratch)
        for made in ("here", "default", "locked"):
            (scratch / made).mkdir()
        (scratch / "locked" / f"vllm-graphfix-{os.geteuid()}").mkdir(0o777)
        (scratch / "locked" / f"vllm-graphfix-{os.geteuid()}").chmod(0o777)
        before = tree(scratch)
        full_environment = environment if decision is None else environment | {DECISION.encode(): decision}
        done = watched(lambda: registered(scratch, full_environment, folder, module), seconds=10, memory=64 << 20)
        logged, handed_on = done.value
        mine = f"{folder.rstrip('/.') or 'default'}/vllm-graphfix-{os.geteuid()}"
        made_now = tree(scratch) - before
        assert all(path == mine or path.startswith(f"{mine}/") for path in made_now), made_now
        for change in done.changes:
            event, _, path = change.partition(" ")
            assert event in ("open", "os.mkdir", "os.rename", "os.chmod", "os.utime", "os.remove"), change
            assert not path.startswith("/") or path.startswith(str(scratch)), change
        assert not [run for run in done.runs if not run.startswith(("import", "marshal", "exec"))]
        assert all(line.isprintable() and len(line) < 3000 for line in logged), [ascii(line) for line in logged]
        assert len(logged) < 60
        if module != MODULES[-1] and folder in ("", "here", "here/./") and "registry" not in module:
            assert any(path.endswith(".json") for path in made_now)
        followed = decode(handed_on)
        assert followed is not None
        assert_sound(followed)
        records = [json.loads((scratch / path).read_text()) for path in made_now if path.endswith(".json")]
        assert all(record["misconfigured"] | record.get("mistyped", {}) == followed.misconfigured for record in records)


WORST = {
    "VLLM_GRAPHFIX": "\udcff\x1b[2J",
    "VLLM_GRAPHFIX_MAMBA_PADDING": "x" * 100_000,
    "VLLM_GRAPHFIX_ROLLOUT": "5",
    "VLLM_GRAPHFIX_ROLLOUT_KEY": "é" * 60_000,
    "VLLM_GRAPHFIX_\udcff\n": "on",
    DECISION: "[" * 100_000,
}


@pytest.mark.parametrize("folder", ["here", pytest.param("n" * 300, marks=pytest.mark.slow, id="too long")])
def test_a_real_vllm_loads_the_plugin_and_starts_processes_in_the_worst_environment(
    tmp_path: Path, folder: str
) -> None:
    (tmp_path / "here").mkdir()
    done = run_in_release(
        "0.18.1",
        """
        import os, subprocess, sys
        from vllm.plugins import load_general_plugins
        load_general_plugins()
        import vllm_graphfix
        subprocess.run([sys.executable, "-c", ""], check=True)
        print({state.state.value for state in vllm_graphfix.states().values()})
        """,
        WORST | {STATUS_DIR: str(tmp_path / folder), "VLLM_LOGGING_LEVEL": "INFO"},
        libraries_loaded=True,
    )
    assert "{'off'}" in done.stdout, "the switch means nothing"
    assert "Traceback" not in done.stdout + done.stderr
    assert list(tmp_path.rglob("*")) == [tmp_path / "here"]
