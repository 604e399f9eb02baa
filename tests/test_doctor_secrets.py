"""`doctor`: no secret, host, model or markup of others is in its report."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doctored import examined, nothing_of_this_machine, pasted, whole
from hostile import TEXT, share
from ranks import report
from records import leave, record
from stock import release_root
from vllm_graphfix._version import __version__
from vllm_graphfix.commands import doctor
from vllm_graphfix.commands.redaction import Mask, hosts_in
from vllm_graphfix.engine import rank_agreement
from vllm_graphfix.fixes import BY_NAME, FIXES, about
from vllm_graphfix.records import AgreementReport, FixReport, own_folder
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.settings.decision import decide
from vllm_graphfix.settings.environment import read

pytestmark = pytest.mark.usefixtures(nothing_of_this_machine.__name__)

MASKED = [
    ("https://alice:pa55word@host.example/v1", "https://(hidden)@host.example/v1"),
    ("redis://:pa55word@cache:6379", "redis://(hidden)@cache:6379"),
    ("hf_AbCdEfGhIjKlMnOp", "(hidden)"),
    ("Authorization: Bearer abcdef.ghij", "Authorization: Bearer (hidden)"),
    ('{"api_key": "abcdefgh"}', '{"api_key": "(hidden)"}'),
    ("vllm serve m --api-key abcdefgh --port 1", "vllm serve m --api-key (hidden) --port 1"),
    ("token=abcdefgh&x=1", "token=(hidden)&x=1"),
    ("/home/alice/models/x in /Users/bob/y", "~/models/x in ~/y"),
    ("4f9a8b7c6d5e4f3a2b1c0d9e8f7a6b5c", "(hidden)"),
    ("AKIAIOSFODNN7EXAMPLE", "(hidden)"),
    ("a\x1b[2J\nb", "a\ufffd[2J b"),
]


@pytest.mark.parametrize(("text", "masked"), MASKED)
def test_what_is_nobodys_business_is_masked_in_every_text(text: str, masked: str) -> None:
    assert Mask({}, ()).text(text) == masked


def test_the_rollout_key_of_another_engine_is_masked_whatever_its_length() -> None:
    for key in ("acme", "a'c", "x" * 200, "a\"'"):
        reason = decide(read({"VLLM_GRAPHFIX_ROLLOUT": "0", "VLLM_GRAPHFIX_ROLLOUT_KEY": key}, ["a"]), "").withheld
        assert reason is not None
        assert repr(key) in reason
        assert Mask({}, ()).text(reason) == reason.replace(repr(key), "(hidden)")


def test_a_secret_that_a_text_repeats_is_masked_to_its_end() -> None:
    password = "never tell this to anybody; " * 4
    text = Mask({"DB_PASSWORD": password}, ()).text(f"x{password * 80}")
    assert text == f"x{'(hidden)' * 80}"[:299] + "…"


PLAIN = [
    "DeepSeek-R1-Distill-Qwen-32B-abliterated",
    "FlashMLAMetadataBuilder._build_decode has no parameter seq_lens_device",
    "DeepseekV32IndexerMetadataBuilder",
    "rows that schedule no token are never prefilling",
    "vllm/v1/attention/backends/mla/flashmla.py:172",
    "set VLLM_GRAPHFIX=off, VLLM_GRAPHFIX_MAMBA_PADDING=on:0123456789abcdef; VLLM_GRAPHFIX_SHADOW=1/2000.",
    "VLLM_GRAPHFIX_ROLLOUT=25 % without VLLM_GRAPHFIX_ROLLOUT_KEY; VLLM_GRAPHFIX_STATUS_DIR=/shared/records",
    "mamba-padding is failed on rank 1: [4, 16] is not (3, 12); no report of ranks 0-3 on an unknown host",
    *(
        text
        for fix in FIXES
        for text in (about(fix).symptom, about(fix).cause, about(fix).remedy, about(fix).workaround)
    ),
]


@pytest.mark.parametrize("text", PLAIN)
def test_what_a_report_is_for_is_not_masked(text: str) -> None:
    printed = Mask({}, ()).text(text)
    assert printed == text or printed == text[:299] + "…"


def test_hosts_and_the_home_folder_have_no_names(tmp_path: Path) -> None:
    problem = "rank 1 on gpu-17.corp.example has another version"
    leave(tmp_path / "records", record(host="gpu-17.corp.example", pid=77, problem=problem))
    text = pasted(HOME="/srv/people/alice", VLLM_GRAPHFIX_STATUS_DIR=str(tmp_path / "records"))
    assert "gpu-17" not in text
    assert re.search(r"rank 1 on host-\d has another version", text)
    assert "~/x" in Mask({"HOME": "/srv/people/alice"}, ()).text("/srv/people/alice/x")


def test_hosts_and_values_of_ranks_without_a_record_are_withheld(tmp_path: Path) -> None:
    mistyped = {"VLLM_GRAPHFIX_SHADOW": "hunter 'a' 22", "VLLM_GRAPHFIX_MAMBA_PADDING": "of; hunter, on x"}
    reports = {
        0: report("n0"),
        1: report("n1", misconfigured=mistyped, states={"mamba-padding": "failed", "capture-state": "active"}),
        2: report(
            "gpu-17.corp.example", reasons={"mamba-padding": "lost by gpu-18"}, fault="no reply of [gpu-18]:29500"
        ),
    }
    difference = rank_agreement._difference(reports, [3, 4], [], 600, lambda rank: ("gpu-18", "n2")[rank - 3])
    assert difference is not None
    where = "worker 7 on n5 is gone; ranks 0-3 on an unknown host"
    text = f"{difference} {where}. It is gpu-18, (10.1.2.3, 29500): VLLM_GRAPHFIX_SHADOW=hunter, VLLM_GRAPHFIX_X='of x'"
    masked = Mask({}, hosts_in(text)).whole_text(text)
    assert "VLLM_GRAPHFIX_MAMBA_PADDING=(set, not shown), VLLM_GRAPHFIX_SHADOW=(set, not shown)" in masked
    assert "ranks 0-3 on an unknown host" in masked
    compared = AgreementReport("a-token", 5, 2, difference)
    of_rank = record(rank=0, world_size=5, agreement=compared, unchecked=where)
    leave(tmp_path / "records", of_rank, record(host="n0", pid=78, problem=text))
    (engine,) = examined()["fleet"]["engines"]
    assert [line for line in engine["wrong"] if "VLLM_GRAPHFIX_SHADOW=(set, not shown)" in line]
    assert [line for line in engine["wrong"] if re.search(r"worker 7 on host-\d is gone", line)]
    output = masked + json.dumps(examined()) + pasted()
    assert not re.findall(r"hunter|gpu-1\d|corp|10\.1\.2\.3|\bn[0-5]\b|of; |of x", output)


def test_the_host_of_an_unreadable_record_is_withheld(tmp_path: Path) -> None:
    broken = [record(host="gpu-17", pid=78, rank=1, world_size=2), record(host="n7", engine="f" * 16, pid=79)]
    leave(tmp_path / "records", record(rank=0, world_size=2), *broken)
    for one in broken:
        (own_folder(tmp_path / "records") / one.file_name).write_text("{")
    fleet = examined()["fleet"]
    assert re.search(r"process 78 on host-\d is not known: its record \S+-host-\d-78.json ", str(fleet))
    assert f"engine {'f' * 16}: 1 process may run, whose records cannot be read" in fleet["notes"]
    assert "2 files are not records or cannot be read" in str(fleet["notes"])
    assert not re.findall(r"gpu-17|\bn7\b", str(fleet) + pasted())


def test_no_served_model_is_named(tmp_path: Path) -> None:
    reason = "OSError: /models/secret-project/v7 is not a folder"
    failed = {"capture-state": FixReport("auto", "failed", reason)}
    leave(tmp_path / "records", record(rank=0, model="/models/secret-project/v7", fixes=failed))
    assert "OSError: (hidden) is not a folder" in pasted()
    assert "secret" not in json.dumps(examined())


def test_what_somebody_else_wrote_is_no_markup(tmp_path: Path) -> None:
    reason = "```\n```text `@everyone` <img src=x> [a](http://b) | \n# heading </details>"
    leave(tmp_path / "records", record(fixes={"capture-state": FixReport("auto", "conflict", reason)}))
    text = pasted()
    (line,) = [line for line in text.splitlines() if line.startswith("  capture-state conflict")]
    assert line == (
        "  capture-state conflict: ''' '''text '@everyone' <img src=x> [a](http://b) |  # heading </details>"
    )
    assert whole(text)


def test_what_the_verdict_names_is_no_markup_outside_the_fence() -> None:
    """A vLLM calls its version what it likes."""
    first = doctor.markdown(doctor.Doctor("vLLM 1.0**[x](http://y)<b>@z`|_\n# a", {})).split("\n\n")[0]
    assert first == f"**vllm-graphfix {__version__}**: vLLM 1.0???x?(http:??y)?b??z????? a"


SECRET = "q9Zsecret7Xsecret"  # noqa: S105 - it is one, and must not be shown
NAMES = st.sampled_from(
    [
        *settings.names(BY_NAME),
        "VLLM_GRAPHFIX_TOKEN",
        "vllm_graphfix_x",
        "VLLM_PLUGINS",
        "VLLM_API_KEY",
        "HF_TOKEN",
        "SOMETHING",
        "HOME",
        "KUBERNETES_SERVICE_HOST",
        *(each.name for each in doctor.VARIABLES),
    ]
)
VALUES = st.builds("{}{}{}".format, TEXT, st.just(SECRET), TEXT) | st.sampled_from(
    ["on", "1", "", "5%", "graphfix", "settings", "variables", "diagnosis", "known_release"]  # also keys of the report
)


@share(50)
@given(environment=st.dictionaries(NAMES, VALUES, max_size=8))
def test_unknown_values_of_an_environment_are_withheld(environment: Mapping[str, str]) -> None:
    """But the folder of the records and the home, which are no secrets: left out."""
    environment = {name: value for name, value in environment.items() if name not in (settings.STATUS_DIR, "HOME")}
    report = doctor.examine(release_root("0.18.1"), environment)
    assert SECRET not in json.dumps(report.as_json())
    text = doctor.markdown(report)
    assert SECRET not in text
    assert all(line.isprintable() for line in text.split("\n"))


@share(50)
@given(texts=st.lists(TEXT, min_size=4, max_size=4))
def test_no_text_of_a_record_breaks_the_paste(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.mktemp("records")
    clean = [text.encode("utf-8", "replace").decode() for text in texts]
    fixes = {"capture-state": FixReport("auto", "failed", clean[0])}
    leave(base, record(fixes=fixes, model=clean[1], vllm=clean[2], problem=clean[3]))
    text = doctor.markdown(doctor.examine(release_root("0.18.1"), {settings.STATUS_DIR: str(base)}))
    assert all(line.isprintable() for line in text.split("\n"))
    assert whole(text)


@pytest.mark.parametrize("key", ["vllm-graphfix", "settings", "processes", "states"])
def test_a_rollout_key_may_be_a_key_of_the_report(key: str, tmp_path: Path) -> None:
    leave(tmp_path, record(fixes={f"{key}-of-a-newer-one": FixReport("auto", "active", "")}))
    report = doctor.examine(release_root("0.18.1"), {settings.STATUS_DIR: str(tmp_path), settings.ROLLOUT_KEY: key})
    (engine,) = report.parts["fleet"]["engines"]
    assert "settings" in engine
    assert [*engine["states"]] == ["(hidden)-of-a-newer-one"]
    assert doctor.markdown(report).count("running here") > 0
