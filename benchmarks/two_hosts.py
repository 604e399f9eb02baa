"""One engine on two hosts that are network namespaces of this machine: what becomes of it, and when. Needs root.

    python benchmarks/two_hosts.py [--only CASE …] [--release 0.27.0] [--out FILE] [--logs FOLDER]

vLLM on a CPU, a tiny model, a host name, an address, processes, shared memory and records of its own for each host, and
a switch between them, which can drop a host's packets without a sign to anybody. A CPU has no CUDA graphs: ranks state
that they capture some (`measuring/two_hosts_plugin.py`), so that the gate acts as it does on a GPU. FILE has of each
case when something was first seen, in seconds after the event, and what the records say. Exit code 1 if anything is not
as expected.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measuring import PROJECT, two_hosts_plugin
from measuring.two_hosts_plugin import BEFORE, CAPTURING, WHILE

SUPPORT = PROJECT / "tests" / "support"
sys.path.insert(0, str(SUPPORT))  # a folder of scripts, not an installed module

import fetch_cpu_engine  # noqa: E402
from engine import environment, write_llama  # noqa: E402
from fetch_vllm import cache_folder  # noqa: E402
from vllm_graphfix.verify.engine import models  # noqa: E402

A, B = "host-a", "host-b"
ADDRESSES = {A: "10.77.0.1", B: "10.77.0.2"}
TIMEOUT = 45
"""Seconds that ranks wait for each other's report (`VLLM_GRAPHFIX_AGREEMENT_TIMEOUT`)."""
SLACK = 30.0
"""Seconds after that within which the processes of the engine have to be gone; the machine may be busy."""
START = 1500.0
"""Seconds in which an engine has to start."""
STUCK = 200.0
"""Seconds in which a step that does not end has to be seen: 120, and what heartbeats and scrapes take."""
COMMON = "--enforce-eager --max-model-len=128 --max-num-seqs=2 --num-gpu-blocks-override=64 --port=8000".split()
NNODES = "--tensor-parallel-size=2 --nnodes=2 --master-addr=10.77.0.1 --master-port=29600".split()
DATA = "--data-parallel-address=10.77.0.1 --data-parallel-rpc-port=29700".split()
TOGETHER: Mapping[str, tuple[str, ...]] = {
    A: (*NNODES, "--node-rank=0"),
    B: (*NNODES, "--node-rank=1", "--headless"),
}
# A mixture of experts, whose ranks depend on each other; not by expert, in which vLLM's kernel for CPUs breaks down.
EXTERNAL = {
    host: (*DATA, "--data-parallel-size=2", f"--data-parallel-rank={rank}") for rank, host in enumerate(ADDRESSES)
}
HYBRID = {
    host: (
        *DATA,
        "--data-parallel-size=4",
        "--data-parallel-size-local=2",
        f"--data-parallel-start-rank={first}",
        "--data-parallel-hybrid-lb",
    )
    for first, host in ((0, A), (2, B))
}
RAY = {A: ("--tensor-parallel-size=2", "--distributed-executor-backend=ray")}


class Case(NamedTuple):
    """An engine, what happens to it, and what is expected of it."""

    stops: str | None = None
    """A part of the message with which both hosts stop; None if the engine serves."""
    stops_b: str | None = None
    """The same of the second host, if it is another one."""
    flags: Mapping[str, tuple[str, ...]] = TOGETHER
    model: str = "llama"
    env: Mapping[str, str] = {}
    env_b: Mapping[str, str] = {}
    cut_at: str | None = None
    """The stage at which the switch begins to drop the packets of the second host."""
    heals_after: float | None = None
    """Seconds after which it stops that."""
    ended_at: str | None = None
    """The stage at which the processes of the first host are killed, among them the one that holds the store."""
    cut_when_serving: bool = False
    shared: bool = False
    """The hosts share the folder of the records."""
    ahead: int = 0
    """Seconds by which the clock of the second host is ahead."""
    agreeing: int | None = 2
    """Ranks that agree, in each record; None: they are not compared, or nothing is recorded."""
    canary: bool = True


KEY = {"VLLM_GRAPHFIX_ROLLOUT": "50", "VLLM_GRAPHFIX_ROLLOUT_KEY": "vllm-1"}
"""Bucket 1181."""
OFF, ABSENT = {"VLLM_GRAPHFIX": "off"}, {"VLLM_PLUGINS": two_hosts_plugin.BACKEND}
FAILING = {"VLLM_GRAPHFIX": "strict", two_hosts_plugin.FAILING: B}
PLANTED = "MemoryError: planted"
CUT = f"No report within {TIMEOUT} s", f"has not answered for {TIMEOUT} s"
CASES = {
    "nnodes": Case(),
    "nnodes, clock 90 s ahead": Case(ahead=90),
    "nnodes, shared folder, clock 90 s ahead": Case(shared=True, ahead=90),
    "nnodes, one key": Case(env=KEY),
    "nnodes, a percentage without a key": Case(env={"VLLM_GRAPHFIX_ROLLOUT": "50"}, canary=False),
    "nnodes, settings differ": Case("do not agree", env_b={"VLLM_GRAPHFIX_MAMBA_PADDING": "off"}, agreeing=1),
    "nnodes, off on one host": Case("do not agree", env_b=OFF, agreeing=1),
    "nnodes, strict, a fix fails on one host": Case(PLANTED, env=FAILING),
    "nnodes, off, one host without the plugin": Case(env=OFF, env_b=ABSENT, agreeing=1),
    "hybrid load balancing": Case(flags=HYBRID, model="mixtral", agreeing=4),
    "hybrid load balancing, strict, a fix fails on one host": Case(
        PLANTED, flags=HYBRID, model="mixtral", env=FAILING, agreeing=4
    ),
    "hybrid load balancing, off, one host without the plugin": Case(
        flags=HYBRID, model="mixtral", env=OFF, env_b=ABSENT, agreeing=2
    ),
    "external load balancing": Case(flags=EXTERNAL, model="mixtral"),
    "external load balancing, strict, a fix fails on one host": Case(
        PLANTED, flags=EXTERNAL, model="mixtral", env=FAILING
    ),
    "external load balancing, off, one host without the plugin": Case(
        flags=EXTERNAL, model="mixtral", env=OFF, env_b=ABSENT, agreeing=1
    ),
    "external load balancing, cut off before the comparison": Case(
        *CUT, flags=EXTERNAL, model="mixtral", cut_at=BEFORE, agreeing=1
    ),
    "Ray": Case(flags=RAY),
    "Ray, strict, a fix fails on one host": Case(PLANTED, flags=RAY, env=FAILING),
    "Ray, off, one host without the plugin": Case(flags=RAY, env=OFF, env_b=ABSENT, agreeing=1),
    "cut off before the comparison": Case(*CUT, cut_at=BEFORE, agreeing=1),
    "cut off while ranks compare": Case(*CUT, cut_at=WHILE, agreeing=None),
    "cut off in the capture": Case(*CUT, cut_at=CAPTURING, agreeing=None),
    "cut off while it serves": Case(cut_when_serving=True, shared=True),
    "cut off for 20 s before the comparison": Case(cut_at=BEFORE, heals_after=20.0),
    "cut off for 20 s before the comparison, off": Case(env=OFF, cut_at=BEFORE, heals_after=20.0, agreeing=None),
    "cut off for 20 s in the capture": Case(cut_at=CAPTURING, heals_after=20.0),
    "the processes of one host end before the comparison": Case(
        "has closed its connection", ended_at=BEFORE, agreeing=None
    ),
}


METRIC = re.compile(r"^(graphfix_(?:ranks_(?!\w*seconds)|steps_)\w+) (\S+)$", re.MULTILINE)


class Host:
    """A host: namespaces with one process that forks the others, and ends them with itself."""

    def __init__(self, name: str, folder: Path, engine: Path, switch: int, ahead: int) -> None:
        self._socket, self._log = folder / f"{name}.socket", folder / f"{name}.log"
        script = 'mount -t tmpfs none /dev/shm && hostname "$0" && ip link set lo up && exec "$@"'
        alone = "unshare --net --uts --ipc --mount --mount-proc --pid --fork --kill-child sh -c".split()
        self._env = environment(folder, two_hosts_plugin.install(folder / "plugin"), engine, PROJECT)
        del self._env["VLLM_ENABLE_V1_MULTIPROCESSING"]
        self._env |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_HOST_IP": ADDRESSES[name], "GLOO_SOCKET_IFNAME": "eth0"}
        self._env |= {"RAY_AUTH_MODE": "disabled"}  # only the hosts reach each other
        self._env |= {"WARM_RELEASES": str(cache_folder()), "WARM_PYTHON": str(folder / f"{name}.sh")}
        if ahead:
            # Files are dated by the kernel, which is the clock of the file server here.
            library = folder / "clock_ahead.so"
            call("cc -shared -fPIC -o", library, PROJECT / "benchmarks" / "measuring" / "clock_ahead.c")
            self._env |= {"LD_PRELOAD": str(library), "CLOCK_AHEAD": str(ahead)}
        self._command = [sys.executable, "-S", str(SUPPORT / "warm_python.py"), str(self._socket)]
        program = Path(self._env["WARM_PYTHON"])
        program.write_text(f'#!/bin/sh\nexec {" ".join(self._command)} "$@"\n')
        program.chmod(0o755)
        self.process = subprocess.Popen(
            [*alone, script, name, sys.executable, *self._command[2:]],
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # the kernel shares processors among sessions
        )
        pid, port = self.process.pid, f"port-{name}"
        wait_for(lambda: _namespace(pid, "net") != _namespace(os.getpid(), "net"), 60)
        call("ip link add", port, "netns", switch, "type veth peer name eth0 netns", pid)
        call("nsenter -n -t", switch, "ip link set", port, "master bridge up")
        call("nsenter -n -t", pid, "ip addr add", f"{ADDRESSES[name]}/24", "dev eth0")
        call("nsenter -n -t", pid, "ip link set eth0 up")
        call("nsenter -n -t", pid, "ip route add default dev eth0")  # by which Ray gets to know its address

    def start(self, arguments: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a Python with *arguments* there."""
        wait_for(self._socket.exists, START)
        with log.open("ab") as file:
            return subprocess.Popen(
                [*self._command, *arguments],
                env=self._env | dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def output(self, *arguments: str, env: Mapping[str, str]) -> str:
        """Return what a Python with *arguments* writes there."""
        with tempfile.NamedTemporaryFile() as file:
            self.start(arguments, Path(file.name), env).wait(300)
            return Path(file.name).read_text()

    def end_processes(self) -> None:
        """Kill all processes there but the first."""
        (first,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        inside = _namespace(int(first), "pid")
        while others := [pid for pid in _living() if pid != int(first) and _namespace(pid, "pid") == inside]:
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)


class Network:
    """Both hosts, and the switch between them."""

    def __init__(self, folder: Path, engine: Path, ahead: int) -> None:
        sleep = "unshare --net --fork --kill-child sleep infinity".split()
        self._switch = subprocess.Popen(sleep, stdin=subprocess.DEVNULL)
        wait_for(lambda: _namespace(self._switch.pid, "net") != _namespace(os.getpid(), "net"), 60)
        call("nsenter -n -t", self._switch.pid, "ip link add bridge type bridge")
        call("nsenter -n -t", self._switch.pid, "ip link set bridge up")
        self.hosts = {
            name: Host(name, folder, engine, self._switch.pid, ahead if name == B else 0) for name in ADDRESSES
        }
        self.models = {"llama": write_llama(folder), "mixtral": models.write("mixtral", folder)}
        for file in self.models["llama"].glob("tokenizer*"):
            shutil.copy(file, self.models["mixtral"])

    def end(self) -> None:
        for process in (*(host.process for host in self.hosts.values()), self._switch):
            process.kill()
            process.wait()

    def cut(self) -> None:
        """Drop all packets of the second host; neither host's interface shows it."""
        call("nsenter -n -t", self._switch.pid, "ip link set", f"port-{B}", "nomaster")

    def heal(self) -> None:
        """Forward them again."""
        call("nsenter -n -t", self._switch.pid, "ip link set", f"port-{B}", "master bridge")


class Engine:
    """One engine on both hosts."""

    def __init__(self, case: Case, folder: Path, network: Network) -> None:
        self._case, self._folder, self.hosts = case, folder, network.hosts
        self.servers: dict[str, subprocess.Popen[bytes]] = {}
        command = ["-m", "vllm.entrypoints.cli.main", "serve", str(network.models[case.model])]
        command += ["--served-model-name=tiny", *COMMON]
        if stage := case.cut_at or case.ended_at:
            for host in self.hosts:
                (folder / f"{host} held {stage}").touch()
        if case.flags is RAY:
            self._start_ray()
        for name, flags in case.flags.items():
            self.servers[name] = self.hosts[name].start([*command, *flags], self._log(name), self._env(name))

    def _start_ray(self) -> None:
        # Short, as the names of its sockets have to be.
        self._ray = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        for name, host in self.hosts.items():
            where = ["--head", "--port=6379"] if name == A else [f"--address={ADDRESSES[A]}:6379"]
            arguments = ["-m", "ray.scripts.scripts", "start", *where, f"--node-ip-address={ADDRESSES[name]}"]
            arguments += ["--num-cpus=1", "--num-gpus=1", "--object-store-memory=80000000"]
            arguments += [f"--temp-dir={self._ray.name}/{name}", "--disable-usage-stats"]
            output = host.output(*arguments, env=self._env(name) | {"CUDA_VISIBLE_DEVICES": "0"})
            if "Ray runtime started" not in output:
                raise RuntimeError(output)

    def _env(self, name: str) -> dict[str, str]:
        status = self._folder / ("status" if self._case.shared else f"status-{name}")
        status.mkdir(exist_ok=True)
        own = {"VLLM_GRAPHFIX_STATUS_DIR": str(status), "VLLM_GRAPHFIX_AGREEMENT_TIMEOUT": str(TIMEOUT)}
        own |= {two_hosts_plugin.FOLDER: str(self._folder), "RAY_ADDRESS": f"{ADDRESSES[A]}:6379"}
        return {**own, **self._case.env, **(self._case.env_b if name == B else {})}

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def has_reached(self, stage: str) -> bool:
        return all((self._folder / f"{host} reached {stage}").exists() for host in self.hosts)

    def release(self, stage: str) -> None:
        """Let the ranks that are held at *stage* go on."""
        for host in self.hosts:
            (self._folder / f"{host} held {stage}").unlink()

    def text(self, name: str) -> str:
        return self._log(name).read_text(errors="replace") if self._log(name).exists() else ""

    def serves(self) -> bool:
        up = {name: "Application startup complete" in self.text(name) for name in self.servers}
        if any(server.poll() is not None for server in self.servers.values()):
            raise RuntimeError("".join(self.text(name)[-3000:] for name in self.servers))
        return all(up[name] or "--headless" in self._case.flags[name] for name in self.servers)

    def ask(self, path: str, body: Mapping[str, Any] | None = None, host: str = A) -> str:
        return self.hosts[host].output("-c", _request(path, body), env={})

    def fleet(self, host: str) -> dict[str, Any]:
        output = self.hosts[host].output("-m", "vllm_graphfix", "fleet", "--json", env=self._env(host))
        answer = json.loads(output.replace(f"{self._folder}/", ""))
        engines = [{key: each[key] for key in ("status", "wrong", "notes", "hosts")} for each in answer["engines"]]
        return {"exit code": answer["exit_code"], "engines": engines, "notes": answer["notes"]}

    def metrics(self, host: str) -> dict[str, float]:
        """Return the numbers of the engine on /metrics that have no labels."""
        return {name: float(value) for name, value in re.findall(METRIC, self.ask("/metrics", host=host))}

    def send(self, body: Mapping[str, Any]) -> None:
        """Send a request whose answer nobody waits for."""
        self.hosts[A].start(["-c", _request("/v1/completions", body)], self._folder / "request.log", {})

    def records(self) -> list[dict[str, Any]]:
        files = sorted(self._folder.glob("status*/*/*.json"))
        keys = ("host", "role", "rank", "decision", "agreement", "problem", "followers")
        return [{key: json.loads(file.read_text()).get(key) for key in keys} for file in files]


def run(case: Case, folder: Path, network: Network) -> dict[str, Any]:
    """Run one engine; return what was seen."""
    started = time.monotonic()
    seen: dict[str, Any] = {}
    running = Engine(case, folder, network)
    if stage := case.cut_at or case.ended_at:
        wait_for(lambda: running.has_reached(stage), START)
        network.cut() if case.cut_at else running.hosts[A].end_processes()
        running.release(stage)
        started = time.monotonic()
        if case.heals_after:
            time.sleep(case.heals_after)
            network.heal()
    if case.stops is None:
        wait_for(running.serves, START)
        seen["serves after"] = round(time.monotonic() - started)
        fronts = [host for host in running.servers if "--headless" not in case.flags[host]]
        seen["answers"] = {host: "finish_reason" in running.ask("/v1/completions", REQUEST, host) for host in fronts}
        time.sleep(12)  # a heartbeat, and a reading of the records
        if case.cut_when_serving:
            network.cut()
            started = time.monotonic()
            running.send(REQUEST)
            with contextlib.suppress(TimeoutError):
                wait_for(lambda: note_alerts(running, seen, started), STUCK)
        seen["metrics"] = {host: running.metrics(host) for host in fronts}
        seen["fleet"] = {host: running.fleet(host) for host in running.hosts}
    else:
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: note_ends(running, seen, started), TIMEOUT + SLACK if stage else START)
    seen["records"] = running.records()
    seen["log"] = {host: lines(running.text(host)) for host in running.servers}
    return seen


def note_ends(running: Engine, seen: dict[str, Any], started: float) -> bool:
    """Note when each host has written why it stops, and when its processes have ended; return if all have."""
    for host, server in running.servers.items():
        marks = {"stops after": STOPS in running.text(host), "ends after": server.poll() is not None}
        for mark in [name for name, is_there in marks.items() if is_there]:
            seen.setdefault(mark, {}).setdefault(host, round(time.monotonic() - started))
    return len(seen.get("ends after", ())) == len(running.servers)


def note_alerts(running: Engine, seen: dict[str, Any], started: float) -> bool:
    """Note when /metrics shows that a step does not end; return if it does. Records are not cut off: none is silent."""
    if running.metrics(A).get("graphfix_steps_stuck", 0) > 0:
        seen["shown after"] = {"graphfix_steps_stuck": round(time.monotonic() - started)}
    time.sleep(1)
    return "shown after" in seen


def as_expected(case: Case, seen: Mapping[str, Any]) -> list[str]:
    """Return what is not as expected."""
    ranks = [record for record in seen["records"] if record["rank"]]
    # Without a key each host has its own bucket, and neither is in.
    has_key = "VLLM_GRAPHFIX_ROLLOUT_KEY" in case.env
    decisions = {(each["decision"]["canary"], has_key and each["decision"]["bucket"]) for each in seen["records"]}
    faults = [] if len(decisions) == 1 else [f"decisions {decisions}"]
    if {canary for canary, _ in decisions} != {case.canary}:
        faults.append(f"canary is not {case.canary}")
    agreed = [each["agreement"] and each["agreement"]["agreeing"] for each in ranks]
    if case.agreeing is not None and set(agreed) != {case.agreeing}:
        faults.append(f"ranks that agree, by record: {agreed}")
    if case.stops is not None:
        for host, messages in seen["log"].items():
            cause = (case.stops_b if host == B else None) or case.stops
            is_killed = case.ended_at is not None and host == A
            if not is_killed and not any(cause in line for line in messages):
                faults.append(f"{host} does not name the cause")
            if host not in seen.get("ends after", ()):
                faults.append(f"{host} has not ended")
        return faults
    if not all(seen["answers"].values()):
        faults.append("a host does not answer")
    if case.cut_when_serving and "graphfix_steps_stuck" not in seen.get("shown after", ()):
        faults.append("the loss of a host is not on /metrics")
    return faults


PRINTED = ("not as expected", "serves after", "stops after", "ends after", "shown after")
STOPS = "vllm-graphfix stops this engine"
REQUEST = {"model": "tiny", "prompt": [3, 4, 5], "max_tokens": 8, "ignore_eos": True}


def lines(log: str) -> list[str]:
    """Return the plugin's warnings in *log*, and the errors by which it stops, each once."""
    messages = re.findall(r"(?:WARNING|ERROR).*?(graphfix: .*)|(GraphfixError: .*)", log)
    return list(dict.fromkeys("".join(each)[:600] for each in messages))


def wait_for(is_so: Callable[[], object], seconds: float) -> None:
    """Raises TimeoutError."""
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > until:
            raise TimeoutError(f"not after {seconds:.0f} s")
        time.sleep(0.1)


def call(*words: object) -> str:
    """Run a command; return its output."""
    command = " ".join(map(str, words)).split()
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _request(path: str, body: Mapping[str, Any] | None) -> str:
    data = json.dumps(body).encode() if body else None
    return (
        f"from urllib.request import *; r = Request('http://127.0.0.1:8000{path}', {data!r}, "
        "{'Content-Type': 'application/json'}); print(urlopen(r, timeout=250).read().decode())"
    )


def _namespace(pid: int, kind: str) -> str | None:
    with contextlib.suppress(OSError):  # it has ended
        return str(Path(f"/proc/{pid}/ns/{kind}").readlink())
    return None


def _living() -> list[int]:
    """Return the processes of this machine that have not ended."""
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    processes.append(int(entry.name))
    return processes


def _judged(case: Case, folder: Path, network: Network) -> dict[str, Any]:
    """Run one engine; return what was seen, and what of it is not as expected."""
    try:
        seen = run(case, folder, network)
        return {"not as expected": as_expected(case, seen), **seen}
    except (TimeoutError, RuntimeError, subprocess.SubprocessError) as error:
        return {"not as expected": [f"{type(error).__name__}: {error}"]}
    finally:
        network.heal()
        for host in network.hosts.values():
            host.end_processes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=CASES, metavar="CASE")
    parser.add_argument("--release", default=fetch_cpu_engine.VERSION, help=f"default: {fetch_cpu_engine.VERSION}")
    parser.add_argument("--out", type=Path, default=PROJECT / "benchmarks" / "results" / "two_hosts.json")
    parser.add_argument("--logs", type=Path, help="a folder that keeps the logs")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the hosts would stay
    engine = fetch_cpu_engine.engine(version=options.release)
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    names = options.only or list(CASES)
    for ahead in sorted({CASES[name].ahead for name in names}):
        with tempfile.TemporaryDirectory(prefix="two-hosts-") as folder:
            network = Network(Path(folder), engine, ahead)
            try:
                for name in (name for name in names if CASES[name].ahead == ahead):
                    logs = (options.logs or Path(folder)) / name.replace(" ", "-")
                    logs.mkdir(parents=True)
                    results[name] = {"release": options.release} | _judged(CASES[name], logs, network)
                    options.out.write_text(json.dumps(results, indent=1) + "\n")
                    print(name, {key: value for key, value in results[name].items() if key in PRINTED}, flush=True)
            finally:
                network.end()
    return int(any(results[name]["not as expected"] for name in names))


if __name__ == "__main__":
    sys.exit(main())
