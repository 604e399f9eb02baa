"""prefill-dispatch: what must hold beyond the numbers, also beside mamba-padding."""

from __future__ import annotations

import json

import pytest

from behaviours import check_behaviours
from table import slow_but_for
from warm_release import run_in_fork


@pytest.mark.parametrize("release", slow_but_for(("0.27.1", "0.33.0"), ("0.14.1", "0.21.0", "0.27.1", "0.33.0")))
def test_without_a_known_builder_a_step_of_rows_past_prefill_has_a_decode_graph(release: str) -> None:
    check_behaviours(release, "prefill_dispatch", also=["prefill_dispatch_v2"], active=["prefill-dispatch"])


# Between these, the table of docs/fixes/prefill-dispatch.md does not change.
BUILDERS = "0.14.1 0.18.1 0.19.0 0.21.0 0.22.0 0.24.0 0.25.1 0.27.1 0.30.0 0.31.0 0.33.0".split()


@pytest.mark.parametrize("release", slow_but_for(("0.18.1", "0.21.0", "0.25.1", "0.33.0"), BUILDERS))
def test_a_step_loses_its_graph_just_where_the_builder_of_its_layers_sees_a_prefill(release: str) -> None:
    check_behaviours(release, "prefill_builders")


NAMES = ("mamba-padding", "prefill-dispatch")
SCENARIOS = """
import importlib, json
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm_graphfix.verify.double.worker import load_scenario
from vllm_graphfix.verify.proof import differing

right = {}
for name in ("mamba-padding", "prefill-dispatch"):
    measured = load_scenario(name)()
    right[name] = measured.error is None and not differing(measured.eager, measured.graphed)
print(json.dumps(right))
"""


@pytest.mark.xdist_group("0.20.0")
@pytest.mark.parametrize("active", [NAMES, NAMES[:1], NAMES[1:], ()], ids=["both", *NAMES, "neither"])
def test_it_and_mamba_padding_put_each_their_own_defect_right(active: tuple[str, ...]) -> None:
    """Both are about the phase of rows: one of rows that are none, one of steps."""
    modes = {f"VLLM_GRAPHFIX_{name.upper().replace('-', '_')}": "on" if name in active else "off" for name in NAMES}
    repaired = json.loads(run_in_fork("0.20.0", SCENARIOS, modes).stdout.splitlines()[-1])
    assert repaired == {name: name in active for name in NAMES}
