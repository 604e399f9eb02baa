"""Walks through docs/rollout.md on real servers, vLLM 0.21.0 on a CPU, and writes what was printed into the page.

    python tools/walk_rollout.py [STAGE]... [--record SECONDS]

What was printed stands between `<!-- walked: NAME -->` and `<!-- end -->`; everything else is left alone. At most two
servers run at a time, with 2 GB each, and take up to a minute to start. Processes of other vLLMs of this machine would
be on the page too: end them first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))  # a folder of scripts, not an installed module

import record_dashboard  # noqa: E402
from engine import environment  # noqa: E402
from server import MODEL, Server, cpu_release, install, serve  # noqa: E402
from vllm_graphfix.settings.decision import BUCKETS, bucket  # noqa: E402

PAGE = ROOT / "docs" / "rollout.md"
COLUMNS = 110
PERCENTAGE = 5
SHADOW = "1/2000"
"""Switched on, though nothing is checked: a CPU has no graphs."""
SERVE = f"vllm serve /models/{MODEL}"


class Walk:
    """Servers that share a status folder, and commands that read it."""

    def __init__(self, folder: Path, record: float) -> None:
        self.record = record
        self._folder = folder
        self._status = folder / "status"
        self._installed = install(folder / "installed")
        self._status.mkdir()
        self._environment = environment(self._installed.scratch, self._installed.plugin, cpu_release()) | {
            "VLLM_GRAPHFIX_STATUS_DIR": str(self._status)
        }

    @contextlib.contextmanager
    def serve(self, **variables: str) -> Iterator[Server]:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        with serve(self._installed, folder, env={"VLLM_GRAPHFIX_STATUS_DIR": str(self._status), **variables}) as server:
            for number in range(8):
                server.completions([3, 4, number + 5], tokens=32)
            yield server
            if server.pids():
                server.stop()  # so that it takes its records away

    def forget(self) -> None:
        """Empty the status folder, so that a stage does not see records of a server killed in another."""
        shutil.rmtree(self._status)
        self._status.mkdir()

    def command(self, *arguments: str, filtered_by: str = "") -> str:
        """Run `vllm-graphfix` with *arguments*; return its output, and its exit code unless that is 0.

        *filtered_by* is a command of the shell that reads the output; then there is no exit code.
        """
        done = subprocess.run(
            # As wide as the page, which a pipe is not.
            [
                sys.executable,
                "-c",
                f"from vllm_graphfix.commands import cli, output; output.PIPE_WIDTH = {COLUMNS}; cli.main()",
                *arguments,
            ],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        call, printed = f"$ vllm-graphfix {' '.join(arguments)}", self.readable(done.stdout)
        if filtered_by:
            run = subprocess.run(shlex.split(filtered_by), input=printed, capture_output=True, text=True, check=True)
            return f"{call} | {filtered_by}\n{run.stdout.rstrip()}"
        code = f"\n$ echo $?\n{done.returncode}" if done.returncode else ""
        return f"{call}\n{printed}{code}"

    def readable(self, printed: str) -> str:
        """Return *printed* without the names of this machine, its user and its folders."""
        names = {
            str(self._installed.model): f"/models/{MODEL}",
            str(cpu_release()): "/venv/lib/python3/site-packages",
            sys.executable: "/venv/bin/python",
            str(self._status): "/tmp",  # noqa: S108 # the default, which the page is about
            socket.gethostname(): "node-a",
        }
        for name, instead in names.items():
            # What stands in a column of a table keeps its width.
            printed = re.sub(rf"{re.escape(name)}(?=  )", instead.ljust(len(name)), printed)
            printed = printed.replace(name, instead)
        lines = [line.rstrip() for line in printed.splitlines()]
        return "\n".join(lines).strip("\n")


def observe(walk: Walk) -> dict[str, str]:
    with walk.serve(VLLM_GRAPHFIX="observe") as server:
        _wait_for_metrics(server)
        seen = walk.command("fleet", filtered_by="head -11")
    return {"observe": f"$ VLLM_GRAPHFIX=observe {SERVE} &\n{seen}"}


def canary(walk: Walk) -> dict[str, str]:
    names = [f"eu-{number}" for number in range(1, 1000)]
    chosen = {
        inside: next(name for name in names if (bucket(name) < PERCENTAGE * BUCKETS // 100) is inside)
        for inside in (True, False)
    }
    rollout = {"VLLM_GRAPHFIX": "on", "VLLM_GRAPHFIX_ROLLOUT": f"{PERCENTAGE}", "VLLM_GRAPHFIX_SHADOW": SHADOW}
    with (
        walk.serve(**rollout, VLLM_GRAPHFIX_ROLLOUT_KEY=chosen[True]) as patched,
        walk.serve(**rollout, VLLM_GRAPHFIX_ROLLOUT_KEY=chosen[False]) as stock,
    ):
        for server in (patched, stock):
            _wait_for_metrics(server)
        seen = walk.command("fleet", filtered_by="grep rollout")
        metrics = "\n".join(
            _metrics(server, "^graphfix_canary", port) for port, server in ((8000, patched), (8001, stock))
        )
        if walk.record:
            with _load(patched), _load(stock):
                _dashboard(walk, [patched, stock])
    started = "\n".join(
        [
            f"$ export VLLM_GRAPHFIX_ROLLOUT={PERCENTAGE} VLLM_GRAPHFIX_SHADOW={SHADOW}",
            *(
                f"$ VLLM_GRAPHFIX_ROLLOUT_KEY={name} {SERVE} --port {port} &"
                for name, port in ((chosen[True], 8000), (chosen[False], 8001))
            ),
        ]
    )
    return {"canary": f"{started}\n{seen}\n{metrics}"}


def off(walk: Walk) -> dict[str, str]:
    with walk.serve(VLLM_GRAPHFIX="on") as server:
        start = time.monotonic()
        server.stop()
        ended = time.monotonic() - start
    with walk.serve(VLLM_GRAPHFIX="off") as server:
        server.completions([3, 4, 5])
        answered = time.monotonic() - start
        _wait_for_metrics(server)
        seen = walk.command("fleet", filtered_by="head -3")
    timing = (
        f"# {answered:.0f} s from the signal to the first answer, {ended:.0f} of them until the old server had ended"
    )
    return {"off": f"$ kill -TERM %1; wait %1; VLLM_GRAPHFIX=off {SERVE} &\n{timing}\n{seen}"}


def killed(walk: Walk) -> dict[str, str]:
    with walk.serve() as server:
        _wait_for_metrics(server)
        core = server.kill_engine()
        seen = walk.command("fleet", filtered_by="grep dead:")
    return {"killed": f"$ kill -KILL {core}\n{seen}"}


def filtered(walk: Walk) -> dict[str, str]:
    with walk.serve(VLLM_PLUGINS=""):
        seen = walk.command("fleet")
    return {"filtered": f"$ VLLM_PLUGINS= {SERVE} &\n{seen}"}


STAGES: dict[str, Callable[[Walk], dict[str, str]]] = {
    "observe": observe,
    "canary": canary,
    "off": off,
    "killed": killed,
    "filtered": filtered,
}


def _metrics(server: Server, pattern: str, port: int = 8000) -> str:
    """Return the lines of /metrics that match *pattern*, as of a server on *port*."""
    lines = [line for line in server.metrics().splitlines() if re.search(pattern, line)]
    return "\n".join([f"$ curl -s localhost:{port}/metrics | grep -E '{pattern}'", *lines])


def _wait_for_metrics(server: Server) -> None:
    """Wait until the server has read its ranks' records, which it does every few seconds."""
    until = time.monotonic() + 60
    while "graphfix_ranks_agreeing " not in server.metrics() and time.monotonic() < until:
        time.sleep(1)


@contextlib.contextmanager
def _load(server: Server) -> Iterator[None]:
    """Run two clients that ask for completions, some of which end before their limit."""
    done = threading.Event()

    def ask(client: int) -> None:
        number = client
        while not done.wait(0.3):
            number += 2
            body = {"model": MODEL, "prompt": [3 + number % 90, 4, 5], "max_tokens": 24 + number % 40}
            body |= {"temperature": 1, "seed": number, "stop": [" w77"] if number % 3 else []}
            request = urllib.request.Request(
                f"http://127.0.0.1:{server.port}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310 # our own, on this machine
                answer.read()

    clients = [threading.Thread(target=ask, args=(client,)) for client in range(2)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        done.set()
        for client in clients:
            client.join()


def _dashboard(walk: Walk, servers: Sequence[Server]) -> None:
    """Write docs/dashboard.svg."""
    urls = [f"http://127.0.0.1:{server.port}/metrics" for server in servers]
    with record_dashboard.prometheus(urls) as running:
        start = time.time()
        time.sleep(walk.record)
        running.scraped()
        end = time.time()
        answers = [record_dashboard.ask(running, panel, start, end) for panel in record_dashboard.panels()]
        print(*(running.firing() or ["no alert"]), sep="\n")
    about = f"two servers of vLLM 0.21.0 on a CPU, one in a rollout of {PERCENTAGE} %"
    (ROOT / "docs" / "dashboard.svg").write_text(record_dashboard.picture(answers, start, end, about))


def written(page: str, parts: dict[str, str]) -> str:
    """Return *page* with *parts* in their places. Raises KeyError for a part without one."""
    for name, text in parts.items():
        before, start, rest = page.partition(f"<!-- walked: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not end:
            raise KeyError(name)
        page = f"{before}{start}```console\n{text}\n```\n{end}{after}"
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"default: all of {', '.join(STAGES)}")
    parser.add_argument("--record", type=float, default=0.0, metavar="SECONDS", help="docs/dashboard.svg, in `canary`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="walk-") as folder:
        walk = Walk(Path(folder), options.record)
        for name in options.stages or STAGES:
            walk.forget()
            parts = STAGES[name](walk)
            PAGE.write_text(written(PAGE.read_text(), parts))
            print(*parts.values(), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
