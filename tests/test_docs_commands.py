"""Each command that a page shows is run as it stands there, or listed below with the reason why not."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from stock import release_environment, release_root
from test_readme import PAGES

BLOCK = re.compile(r"(<!-- walked: [^\n]+ -->\n)?^```(?:bash|console|sh|shell)\n(.*?)^```", re.DOTALL | re.MULTILINE)

TOOLS = Path(__file__).parent.parent / "tools"
CHEAP = ("status", "explain", "fleet", "report", "doctor")
"""Commands of vllm-graphfix that take well below a second, and need neither a GPU nor an engine."""

GPU = "needs a GPU, and a model that is there"
CLUSTER = "needs a cluster, or a Prometheus"
INDEX = "asks a package index, and changes what is installed"
MINUTES = "takes minutes; that the target exists is tested in test_readme.py"
PUBLISHED = "needs a release and its repository; that a build can be repeated is tested in test_security.py"
ENDLESS = "runs until Ctrl-C; test_fleet_command.py has it"

NOT_RUN = {
    "python benchmarks/shadow_check.py --out FOLDER [--only CASE] [--part PART]": "needs a GPU",
    "pip install vllm-graphfix": INDEX,
    "pip uninstall vllm-graphfix": INDEX,
    "vllm-graphfix fleet --watch 5": ENDLESS,
    "vllm-graphfix compare MODEL -tp 2": GPU,
    "vllm-graphfix compare MODEL -tp 2 --kv-cache-dtype fp8": GPU,
    "vllm-graphfix compare MODEL --prompts prompts.txt --max-tokens 256": GPU,
    "vllm-graphfix compare MODEL --json > compared.json": GPU,
    "vllm-graphfix verify --device gpu": GPU,
    "vllm-graphfix compare mla $FLASHMLA": GPU,
    """vllm-graphfix compare mla-mtp $FLASHMLA --speculative-config '{"method": "mtp", "num_speculative_tokens": 2}'""": GPU,
    "VLLM_USE_V2_MODEL_RUNNER=0 vllm-graphfix compare mamba2 --skip-tokenizer-init --max-model-len 2048 --max-num-batched-tokens 64 "
    "--max-num-seqs 4 -tp 2 -cc.mode=0 -cc.cudagraph_mode=FULL_DECODE_ONLY": GPU,
    'export VLLM_USE_V2_MODEL_RUNNER=1 FLASHMLA="--skip-tokenizer-init --max-model-len 2048 --block-size 64 --attention-backend FLASHMLA"': "the flags of the next line",
    "python tools/make_manifest.py 0.34.0": "fetches a release, and writes the manifest",
    "python tools/record_dashboard.py --seconds 120 http://127.0.0.1:8000/metrics": "needs a server",
    "python tools/walk_rollout.py canary --record 90 --photograph": "minutes, and a browser",
    """kubectl patch deployment vllm --patch '{"spec": {"template": {"metadata": {"labels": {"vllm-graphfix/rollout": "25"}}}}}'""": CLUSTER,
    """kubectl patch configmap vllm-graphfix --patch '{"data": {"VLLM_GRAPHFIX": "off"}}'""": CLUSTER,
    "kubectl rollout restart deployment/vllm": CLUSTER,
    "kubectl delete pod POD...": CLUSTER,
    """promtool query instant http://prometheus:9090 'graphfix_canary{namespace="llm"} == 1'""": CLUSTER,
    "make demo": MINUTES,
    "make test": MINUTES,
    "make manifest": MINUTES,
    "python tools/update_docs.py": "writes the pages; test_readme.py compares them with what it would write",
    "make bench": MINUTES,
    "make bench-engine PYTHON=python3": GPU,
    "make venv": INDEX,
    "make lint": "runs beside the tests, in .ci/run",
    "make docs": "test_site.py builds the same",
    ".ci/run": "runs these tests",
    "pip download --no-deps --only-binary :all: vllm-graphfix==VERSION && sha256sum vllm_graphfix-*.whl": PUBLISHED,
    "unzip -p vllm_graphfix-*.whl '*/WHEEL'": PUBLISHED,
    "git clone --branch vVERSION REPOSITORY vllm-graphfix && cd vllm-graphfix": PUBLISHED,
    "python3 -m venv /tmp/build && /tmp/build/bin/pip install build": PUBLISHED,
    "echo 'setuptools==84.2.1' > /tmp/build/constraint": PUBLISHED,
    "PIP_CONSTRAINT=/tmp/build/constraint make --old-file .venv/installed packages BIN=/tmp/build/bin": PUBLISHED,
}
"""By command: why it is not run here. Of a block that tools/walk_rollout.py has written, none is: it ran them on real servers."""

SLOW = {
    "vllm-graphfix verify",
    "vllm-graphfix verify --vllm PATH",
    "vllm-graphfix verify --json > verified.json",
    """PYTHONPATH=$(python tools/fetch_vllm.py 0.16.0) VLLM_GRAPHFIX=off python -c "from vllm_graphfix.verify.double.scenarios.mamba_all_mode import run; print(run())\"""",
    """python -c "from pathlib import Path; from vllm_graphfix.verify.engine.models import write; [write(name, Path()) for name in ('mla', 'mla-mtp', 'mamba2')]\"""",
}
"""Run with the slow tests."""


def commands(page: str) -> list[str]:
    """The commands of *page*, without their comments: the lines behind a prompt, or all lines of a block that has no prompt."""
    found = []
    for walked, block in BLOCK.findall(page):
        lines = block.replace("\\\n", "").splitlines()
        prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        found += [] if walked else [re.sub(r"\s+# .*|^# .*", "", line).strip() for line in prompted or lines]
    return [command for command in found if command]


SHOWN = sorted({command for page in PAGES for command in commands(page.read_text())})
LEFT = [command for command in SHOWN if command not in NOT_RUN and command not in SLOW]
RUN = [command for command in LEFT if re.match(rf"vllm-graphfix ({'|'.join(CHEAP)})\b", command)]
"""Never what nobody has looked at: a page may show how to delete something."""


def run(command: str, folder: Path) -> None:
    """In *folder*, with stock 0.18.1 installed; PATH in a command is its folder, and shared storage is below *folder*."""
    release = release_root("0.18.1")
    as_shown = re.sub(r"\bPATH\b", shlex.quote(str(release)), command).replace("/mnt/shared/graphfix", "records")
    (folder / "records").mkdir()
    (folder / "tools").symlink_to(TOOLS)
    bin_of_python = str(Path(sys.executable).parent)
    environment = release_environment(release, str(folder))
    environment |= {
        "PATH": f"{bin_of_python}:{environment['PATH']}",
        "VLLM_GRAPHFIX_STATUS_DIR": str(folder / "records"),
    }
    done = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", as_shown], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode in expected(command), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if "--json" in command:
        written = re.search(r"> (\S+)$", command)
        assert json.loads((folder / written[1]).read_text() if written else done.stdout)["schema"] == 1


def expected(command: str) -> set[int]:
    words = command.split()
    if words[:2] == ["vllm-graphfix", "fleet"]:
        return {1, 3}  # no engine runs, or one of somebody else on this machine, which has no record here
    if words[:2] == ["vllm-graphfix", "report"]:
        return {3}  # no shadow check has run, so that there is nothing to report
    return {0, 3} if "--check" in words else {0}  # 3: a fix is needed, and would not be applied


def test_a_command_that_is_new_is_run_or_listed_with_a_reason() -> None:
    unlisted = [command for command in LEFT if command not in RUN]
    assert unlisted == [], "say in NOT_RUN why it cannot be run here, or let it be run: SLOW, CHEAP"


def test_the_table_lists_only_what_a_page_shows() -> None:
    assert (NOT_RUN.keys() | SLOW) - set(SHOWN) == set()


def test_prompts_comments_and_continued_lines_are_understood() -> None:
    page = "```console\n$ one  # first\nits output\n$ two \\\n  --more\n```\n```bash\n# nothing\nthree '#4'\n```\n```text\nno command\n```\n"
    assert commands(page) == ["one", "two   --more", "three '#4'"]


@pytest.mark.parametrize("command", RUN)
def test_what_a_page_shows_can_be_run(command: str, tmp_path: Path) -> None:
    run(command, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(SLOW))
def test_what_a_page_shows_and_takes_longer_can_be_run(command: str, tmp_path: Path) -> None:
    run(command, tmp_path)
