"""`doctor`: the report, whatever is missing, hanging or hostile."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from doctored import PARTS, examined, nothing_of_this_machine, pasted, whole
from hostile import plant
from json_outputs import check_output
from records import leave, record
from stock import ALL_RELEASES, release_root
from table import affected_by
from test_security import run_command
from vllm_graphfix._version import __version__
from vllm_graphfix.commands import doctor
from vllm_graphfix.commands.cli import app
from vllm_graphfix.commands.doctor import collect
from vllm_graphfix.deployment import hardware
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.records import Decided, FixReport

pytestmark = pytest.mark.usefixtures(nothing_of_this_machine.__name__)

# -- what is reported ---------------------------------------------------------------------------------------------


def test_json_is_an_interface_with_a_schema() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json", "--vllm", str(release_root("0.18.1"))])
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    check_output("doctor", report)
    assert list(report) == ["schema", "graphfix", "verdict", *PARTS]
    assert report["versions"]["vllm"].startswith("0.18.1 in ")
    assert [row["name"] for row in report["status"]["fixes"]] == list(BY_NAME)
    assert report["plugin"] | {"others": []} == {
        "entry_point": "vllm_graphfix:register",
        "times_found": 1,
        "others": [],
        "VLLM_PLUGINS": None,
        "loaded": "yes",
    }


def test_the_paste_is_a_line_of_verdict_and_the_rest_folded_as_in_vllms_template() -> None:
    done = CliRunner().invoke(app, ["doctor", "--vllm", str(release_root("0.18.1"))])
    assert done.exit_code == 0
    assert "\x1b" not in done.stdout
    assert whole(done.stdout)
    first = done.stdout.splitlines()[0]
    known, has = len(BY_NAME), len(affected_by("0.18.1"))
    assert first.startswith(
        f"**vllm-graphfix {__version__}**: vLLM 0.18.1: {has} of {known} known defects are in it, "
        f"{known - has} not. At "
    )
    assert first.endswith(" No engine running here.")
    assert "  flashmla-fp8: affected; mode auto, would be active: every batch" in done.stdout
    assert "  not in this vLLM             : " in done.stdout


def test_nothing_is_imported_or_started_and_nothing_written(tmp_path: Path) -> None:
    seen, printed = run_command(["doctor", "--vllm", str(release_root("0.18.1"))], tmp_path, {"PATH": str(tmp_path)})
    assert (seen.harm, seen.wrote) == ([], [])
    assert set(seen.signals) <= {0}
    assert not {"vllm", "torch"} & set(seen.modules)
    assert "vllm-graphfix doctor" in printed


def test_a_plugin_that_is_filtered_out_is_reported() -> None:
    assert "does not name it" in examined(VLLM_PLUGINS="another")["plugin"]["loaded"]
    assert examined(VLLM_PLUGINS="graphfix,another")["plugin"] | {"others": []} == {
        "entry_point": "vllm_graphfix:register",
        "times_found": 1,
        "others": [],
        "VLLM_PLUGINS": ["graphfix", "(set, not shown)"],
        "loaded": "yes",
    }


@pytest.mark.parametrize(
    ("several", "printed"),
    [
        ("Mamba_Padding = OFF, flashmla-fp8=on", "mamba_padding=off,flashmla-fp8=on"),
        ("mamba-padding=hunter2", "mamba-padding=(hidden)"),
        ("hunter2=off", "(set, not shown)"),
    ],
)
def test_modes_of_several_fixes_are_printed_without_what_is_none(several: str, printed: str) -> None:
    variables = collect._variables({"VLLM_GRAPHFIX_FIXES": several, "VLLM_GRAPHFIX_SHADOW": "0.1%,abort"})
    assert {each["name"]: each["value"] for each in variables} == {
        "VLLM_GRAPHFIX_FIXES": printed,
        "VLLM_GRAPHFIX_SHADOW": "0.1%",
        "VLLM_GRAPHFIX_SHADOW_ACTION": "abort",
    }


def test_variables_are_printed_if_their_values_have_the_expected_form() -> None:
    report = examined(
        VLLM_GRAPHFIX="strict",
        VLLM_GRAPHFIX_MAMBA_PADDING="sometimes",
        VLLM_GRAPHFIX_ROLLOUT="5",
        VLLM_GRAPHFIX_ROLLOUT_KEY="tenant-of-ours",
        VLLM_GRAPHFIX_TENANT="tenant-of-ours",
        VLLM_USE_V2_MODEL_RUNNER="1",
        VLLM_LOGGING_LEVEL="of-somebody",
        VLLM_API_KEY="of-somebody",
        SOME_SETTING="of-somebody",
    )
    listed = {each["name"]: each["value"] for each in report["environment"]["variables"]}
    listed.pop("VLLM_GRAPHFIX_STATUS_DIR")
    assert listed == {
        "VLLM_GRAPHFIX": "strict",
        "VLLM_GRAPHFIX_MAMBA_PADDING": "(set, not shown)",
        "VLLM_GRAPHFIX_ROLLOUT": "5 %",
        "VLLM_GRAPHFIX_ROLLOUT_KEY": f"(set, not shown), bucket {listed['VLLM_GRAPHFIX_ROLLOUT_KEY'].split()[-1]}",
        "VLLM_GRAPHFIX…": "1 unknown names (not shown)",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_LOGGING_LEVEL": "(set, not shown)",
    }
    assert "tenant-of-ours" not in json.dumps(report)
    assert "of-somebody" not in json.dumps(report)


def test_what_this_environment_does_to_the_fixes_is_what_status_says() -> None:
    states = {row["name"]: row["would_be"] for row in examined(VLLM_GRAPHFIX="off")["status"]["fixes"]}
    assert set(states.values()) == {"off"}
    states = {row["name"]: row["would_be"] for row in examined(VLLM_GRAPHFIX_ROLLOUT="many")["status"]["fixes"]}
    assert set(states.values()) == {"not-in-canary"}
    assert "no engine gets the fixes" in str(examined(VLLM_GRAPHFIX_ROLLOUT="many")["status"]["notes"])
    assert examined(VLLM_GRAPHFIX_ROLLOUT=" ")["status"]["misconfigured"] == {"VLLM_GRAPHFIX_ROLLOUT": ""}
    assert {row["would_be"] for row in examined(VLLM_PLUGINS="other")["status"]["fixes"]} == {"off"}


def test_an_invalid_value_counts_and_is_withheld(tmp_path: Path) -> None:
    wrong = {"VLLM_GRAPHFIX": "hunter-22", "VLLM_GRAPHFIX_SHADOW_ACTION": "hunter-23"}
    leave(tmp_path / "records", record(misconfigured=wrong), record(rank=0, misconfigured=wrong))
    report = examined(**wrong)
    assert {row["would_be"] for row in report["status"]["fixes"]} == {"off"}
    assert report["status"]["misconfigured"] == dict.fromkeys(wrong, "(set, not shown)")
    assert "misconfigured: VLLM_GRAPHFIX=(set, not shown) means nothing" in str(report["fleet"]["engines"][0]["wrong"])
    assert "hunter" not in json.dumps(report)
    assert "misconfigured                : VLLM_GRAPHFIX (set, not shown)" in pasted(**wrong)


def test_an_unknown_name_counts_and_is_withheld(tmp_path: Path) -> None:
    wrong = {"VLLM_GRAPFIX": "hunter 22", "VLLM_GRAPHFIX_TENANT": "hunter-23"}
    leave(tmp_path / "records", record(misconfigured=wrong), record(rank=0, misconfigured=wrong))
    report = examined(**wrong)
    assert {row["would_be"] for row in report["status"]["fixes"]} == {"off"}
    assert report["status"]["misconfigured"].keys() == {"VLLM_GRAPHFIX_ROLLOUT_OR_OFF", "VLLM_GRAPHFIX_UNKNOWN"}
    assert "misconfigured: VLLM_GRAPFIX=(set, not shown) means nothing" in str(report["fleet"]["engines"][0]["wrong"])
    assert "hunter" not in json.dumps(report)
    assert "TENANT" not in json.dumps(report["status"])


def test_every_variable_of_vllm_that_is_looked_at_is_one_of_some_release() -> None:
    known = "".join(
        (release_root(release) / "vllm/envs.py").read_text() for release in ALL_RELEASES[:: len(ALL_RELEASES) - 1]
    )
    known += (release_root("0.18.1") / "vllm/envs.py").read_text() + (
        release_root("0.22.1") / "vllm/envs.py"
    ).read_text()
    ours = [each.name for each in doctor.VARIABLES if each.name.startswith("VLLM_")]
    assert [name for name in ours if f'"{name}"' not in known] == []


def test_engines_and_the_reasons_of_their_errors_are_reported(tmp_path: Path) -> None:
    failed = {"capture-state": FixReport("auto", "failed", "ValueError: it has another shape")}
    leave(tmp_path / "records", record(), record(rank=0, fixes=failed))
    report = examined()
    (engine,) = report["fleet"]["engines"]
    assert engine["states"] == {"capture-state": {"failed": 1}}
    assert report["errors"]["last"] == [
        {"of": "capture-state", "state": "failed", "reason": "ValueError: it has another shape"}
    ]
    assert "  capture-state failed: ValueError: it has another shape" in pasted()


def test_a_running_engine_is_reported_with_its_own_settings_and_counters(tmp_path: Path) -> None:
    """Beside an engine that only observes, `would be active` alone reads as if it were."""
    decided = Decided(canary=True, bucket=7, percentage=25.0, master="observe", inherited=False)
    observing = {
        "capture-state": FixReport("observe", "observing", "counts"),
        "mamba-padding": FixReport("observe", "observing", "counts"),
        "flashmla-fp8": FixReport("off", "off", "by its variable"),
    }
    events = {
        "capture-state": {"state-consumed": 3},
        "mamba-padding": {"padded-row-prefilling": 0},
        "flashmla-fp8": {"x": 0},
    }
    engine = record(rank=0, decision=decided, fixes=observing, events=events, graphs=True)
    leave(tmp_path / "records", engine)
    (listed,) = examined()["fleet"]["engines"]
    assert listed["settings"] == {
        "VLLM_GRAPHFIX": "observe",
        "rollout": "in, of 25 %",
        "observe": "capture-state, mamba-padding",
        "off": "flashmla-fp8",
    }
    assert listed["graphs"] is True
    assert listed["events"] == {"capture-state": {"state-consumed": 3}, "mamba-padding": {"padded-row-prefilling": 0}}
    text = pasted()
    assert text.splitlines()[0].endswith(" 1 engine running here: 1 counting.")
    assert "capture-state: affected; mode auto, would be active" in text
    assert (
        "    settings                     : VLLM_GRAPHFIX observe; rollout in, of 25 %; observe capture-state" in text
    )
    assert "    states: observing 1: capture-state, mamba-padding" in text
    assert "    events: padded-row-prefilling 0: mamba-padding" in text


def test_an_engine_outside_the_rollout_or_without_graphs_is_reported_as_such(tmp_path: Path) -> None:
    decided = Decided(canary=False, bucket=9000, percentage=5.0, master="on", inherited=False)
    fixes = {"capture-state": FixReport("auto", "not-in-canary", "bucket 9000")}
    leave(tmp_path / "records", record(rank=0, decision=decided, fixes=fixes, graphs=False))
    text = pasted()
    assert "VLLM_GRAPHFIX on; rollout not in, of 5 %" in text
    assert "CUDA graphs                  : no" in text
    assert "1 engine running here: 1 without graphs." in text.splitlines()[0]


def test_parts_to_omit_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise AssertionError

    monkeypatch.setattr(collect, "_gpu", fails)
    report = doctor.examine(release_root("0.18.1"), dict(os.environ), without=("gpu", "versions"))
    assert list(report.parts) == [part for part in PARTS if part not in ("gpu", "versions")]


def test_the_last_ended_engines_are_listed_and_the_others_counted(tmp_path: Path) -> None:
    gone = [record(engine=f"{number:016x}", pid=2**22 + number) for number in range(12)]
    leave(tmp_path / "records", *gone, record(engine="f" * 16))
    listed = examined()["fleet"]
    assert len(listed["engines"]) == 6
    assert listed["engines"][0]["engine"] == "f" * 16
    assert listed["more_engines"] == 7


# -- what is missing ----------------------------------------------------------------------------------------------


def test_without_vllm_and_records_the_other_parts_are_there(tmp_path: Path) -> None:
    report = doctor.examine(tmp_path, {"VLLM_GRAPHFIX_STATUS_DIR": str(tmp_path / "nowhere")}).as_json()
    assert "holds no vllm/__init__.py" in report["versions"]["vllm"]
    assert "holds no vllm/__init__.py" in report["status"]["error"]
    assert "is not a folder" in report["fleet"]["error"]
    assert report["platform"]["system"].startswith("Linux")
    assert CliRunner().invoke(app, ["doctor", "--vllm", str(tmp_path)]).exit_code == 0


@pytest.mark.parametrize("part", ["_versions", "_gpu", "_platform", "_plugin", "_variables", "_status", "_fleet"])
def test_a_part_that_fails_says_so_and_the_others_are_there(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("this part is broken")

    monkeypatch.setattr(collect, part, fails)
    text = pasted()
    assert "not known: RuntimeError: this part is broken" in text
    assert whole(text)


def test_unreadable_metadata_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch-2.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "torch" in examined()["versions"]


@pytest.mark.parametrize("kind", ["fifo", "loop", "zero", "unreadable", "folder"])
def test_what_stands_in_the_place_of_a_file_about_the_driver_is_not_waited_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path / "proc" / "version", kind, b"", tmp_path)
    monkeypatch.setattr(hardware, "PROC", tmp_path / "proc")
    assert examined()["gpu"]["driver"] is None


# -- nvidia-smi ---------------------------------------------------------------------------------------------------


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a stand-in for nvidia-smi, with a time limit of a second."""
    monkeypatch.setattr("vllm_graphfix.commands.doctor.nvidia_smi._PATIENCE", 1.0)
    return tmp_path / "bin" / "nvidia-smi"


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{text}\n")
    path.chmod(0o755)


def test_gpus_are_those_that_nvidia_smi_names(smi: Path) -> None:
    script(smi, "echo 'NVIDIA H100 80GB HBM3, 550.54.15, 81559 MiB, 9.0'; echo something else")
    report = examined()["gpu"]
    assert report["nvidia-smi"] == "answered"
    assert report["seen"] == [
        {"name": "NVIDIA H100 80GB HBM3", "driver": "550.54.15", "memory": "81559 MiB", "compute_capability": "9.0"}
    ]


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("sleep 60", "did not answer within 1 s"),
        ("trap '' TERM INT; sleep 60 & sleep 60", "did not answer within 1 s"),
        ("exec 1>&-; sleep 60", "did not answer within 1 s"),
        ("while :; do echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa; done", "printed without end"),
        ("echo 'a, b, c, d'; exit 9", "ended with 9"),
        ("sleep 60 & echo 'a, b, c, d'", "answered"),
    ],
    ids=[
        "hangs",
        "hangs and does not want to end",
        "closes its output and hangs",
        "talks on",
        "fails",
        "leaves a child",
    ],
)
def test_a_broken_nvidia_smi_is_reported_within_its_time_limit(text: str, listed: str, smi: Path) -> None:
    script(smi, f"{text}\n")
    started = time.monotonic()
    assert examined()["gpu"]["nvidia-smi"] == listed
    assert time.monotonic() - started < 30, "sixty is how long it would take"


def test_children_of_nvidia_smi_are_killed(smi: Path, tmp_path: Path) -> None:
    script(smi, f"sleep 60 & echo $! > {tmp_path / 'pid'}; wait")
    examined()
    pid = int((tmp_path / "pid").read_text())
    for _ in range(200):
        state = hardware.small_text(Path(f"/proc/{pid}/stat"))
        if state is None or state.rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("it still runs")


@pytest.mark.parametrize("reaped", [False, True], ids=["by us", "by the kernel"])
def test_no_process_group_is_killed_after_its_leader_was_reaped(
    reaped: bool, smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(smi, "sleep 5 & echo 'a, b, c, d'")
    killed = []

    def kill(group: int, _: int) -> None:
        os.waitid(os.P_PID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises if it is no child of this process
        killed.append(group)

    monkeypatch.setattr(os, "killpg", kill)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN if reaped else signal.SIG_DFL)
    try:
        assert examined()["gpu"]["nvidia-smi"] == "answered"
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert len(killed) == (0 if reaped else 1)


def test_an_nvidia_smi_that_cannot_be_started_is_reported(smi: Path) -> None:
    smi.write_bytes(b"\x7fELF broken")
    smi.chmod(0o755)
    assert examined()["gpu"]["nvidia-smi"].startswith("cannot be started: ")
