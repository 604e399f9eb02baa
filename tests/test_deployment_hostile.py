"""Hostile lines and models: `status --for` answers, or says what it cannot read."""

from __future__ import annotations

import shlex
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostile import ARGUMENTS, JSON, KINDS, TEXT, dumped, plant, share
from served_models import HOPPER
from stock import release_root
from vllm_graphfix.deployment import FlagsError, read_deployment
from vllm_graphfix.deployment.known_flags import wrong_value
from vllm_graphfix.deployment.line import parse
from vllm_graphfix.deployment.needs import judge
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.source.files import open_source

pytestmark = pytest.mark.usefixtures("among_models")


FLAGS = st.sampled_from(
    """--kv-cache-dtype --kv-cache-dtype=fp8 --attention-backend -ac -cc -cc. -cc.cudagraph_mode=FULL -cc.a.b.c= -cc.+ -O -O3 -O= -O.
    --speculative-config --speculative-config.method=mtp -sc --model --config -- - --= --no-enforce-eager --enforce-eager= --m -dp -tp
    --hf-overrides A=1 =1 env vllm serve ./v3 ./mamba2 --compilation-config={} -q --runner""".split()  # noqa: E501
)
LINES = st.lists(FLAGS | ARGUMENTS.map(shlex.quote) | JSON.map(dumped).map(shlex.quote) | TEXT, max_size=12).map(
    " ".join
)
SOURCE = open_source(release_root("0.18.1"))


@given(LINES, st.none() | TEXT)
def test_no_line_raises_anything_else_or_takes_long(line: str, gpu: str | None) -> None:
    started = time.process_time()
    try:
        deployment = read_deployment(line, SOURCE, gpu, {})
    except FlagsError:
        return
    for fix in FIXES:
        judgement = judge(fix.needs(), deployment, "")
        assert judgement.reason
        assert judgement.reason.isprintable()
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "repeated", ['\\"', " ", "\n", '\\"[', "\\\"'a',", "[", '["', "(a pid=1", "1", "a={", "\\", "- ", "--a "]
)
@pytest.mark.parametrize("first", ["", '"', "'", "(a pid=", "["])
def test_a_long_line_of_one_repeated_piece_is_read_at_once(first: str, repeated: str) -> None:
    line = (first + repeated * 16_000)[:16_000]
    started = time.process_time()
    with suppress(FlagsError):
        parse(line, ())
    assert time.process_time() - started < 1


@share(50)
@given(
    config=st.dictionaries(TEXT | st.sampled_from(["architectures", "model_type", "kv_lora_rank"]), JSON, max_size=6)
)
def test_no_model_raises(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(dumped(config), encoding="utf-8", errors="surrogatepass")
    deployment = read_deployment(str(folder), SOURCE, HOPPER, {})
    for fix in FIXES:
        assert judge(fix.needs(), deployment, "").reason.isprintable()


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_in_the_place_of_a_models_config_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("{}")
    plant(tmp_path / "model" / "config.json", kind, b"{}", outside)
    deployment = read_deployment(str(tmp_path / "model"), SOURCE, HOPPER, {})
    assert deployment.mla().holds is None


def test_a_config_that_is_too_large_or_too_deep_is_not_known(tmp_path: Path) -> None:
    for text in ('{"architectures": ["' + "a" * 2_000_000 + '"]}', "[" * 100_000, '{"a": ' * 50_000):
        (tmp_path / "config.json").write_text(text)
        assert read_deployment(str(tmp_path), SOURCE, HOPPER, {}).mla().holds is None


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ('{"architectures": ["LlamaForCausalLM"], "a": "' + "é" * 600_000 + '"}', "1 MiB"),
        ('{"architectures": ["LlamaForCausalLM"], "a": "' + "a" * 1_100_000 + '"}', "1 MiB"),
        ('{"architectures": ["LlamaForCausalLM"], "a": [' + "[0]," * 60_000 + "0]}", "100,000 values"),
    ],
    ids=["bytes", "letters", "values"],
)
def test_a_config_that_is_too_large_is_called_so(text: str, limit: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    fact = read_deployment(str(tmp_path), SOURCE, HOPPER, {}).mla()
    assert fact.holds is None
    assert fact.source.startswith(f"a config.json of at most {limit} in {tmp_path}")
    assert "too large" in fact.source


def test_the_largest_config_that_is_read(tmp_path: Path) -> None:
    text = '{"architectures": ["LlamaForCausalLM"], "a": "'
    (tmp_path / "config.json").write_text(text + "a" * (1024 * 1024 - len(text) - 2) + '"}')
    assert (tmp_path / "config.json").stat().st_size == 1024 * 1024
    assert read_deployment(str(tmp_path), SOURCE, HOPPER, {}).mla().holds is False


@pytest.mark.parametrize(
    ("members", "advice"),
    [
        ('"auto", *OTHERS', None),
        ('"auto", ["x"]', "it takes auto"),
        ('"auto", 3, None, {"x": []}', "it takes auto"),
        ('"auto", {[]: 1}', None),
        ('"auto", ' + "-" * 3000 + "1", None),
        ('"auto", ' + "(" * 150 + ")" * 150, "it takes auto"),
    ],
    ids=["starred", "unhashable", "no strings", "a key that is unhashable", "deep", "nested"],
)
def test_choices_in_a_form_that_is_not_expected_raise_nothing(members: str, advice: str | None, tmp_path: Path) -> None:
    (tmp_path / "vllm" / "config").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "config" / "cache.py").write_text(f"a[0].b = 1\nCacheDType = Literal[{members}]\n")
    assert wrong_value("--kv-cache-dtype", "fp8", open_source(tmp_path)) == advice
