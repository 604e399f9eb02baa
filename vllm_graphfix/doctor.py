"""What a bug report has to say, gathered in one go: versions, GPU, platform, how the plugin is loaded, settings, status, fleet, errors.

Half of it may be missing, hostile or hanging: each part is gathered on its own, and what goes wrong in one is what that part says. What ends
up in public is shown by allow lists: a value is printed only if it has the form that its name is known for, and every text is masked.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from vllm_graphfix import __version__, hardware, rollout, settings
from vllm_graphfix.fix import Mode, State, variable
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.settings import printable
from vllm_graphfix.source import SourceError, open_source

SCHEMA = 1
GROUP = "vllm.general_plugins"
ENTRY_POINT = "graphfix"
_PEERS = (
    "torch",
    "triton",
    "flashinfer-python",
    "flash-attn",
    "transformers",
    "ray",
    "wrapt",
    "psutil",
)
_LONGEST = 300
"""Characters of a text."""
_MOST = 40
"""Engines, plugins, errors that are told one by one."""
_PATIENCE = 10.0
"""Seconds for nvidia-smi, which hangs where a GPU or its driver does."""
_ANSWER = 64 * 1024
_QUERY = ("--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader")


class Doctor(NamedTuple):
    """What was found: parts by name, each a JSON object, `error` in it where the part could not be gathered."""

    parts: Mapping[str, Mapping[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """The stable interface; `SCHEMA` changes with it."""
        return {"schema": SCHEMA, "graphfix": __version__, **self.parts}


def examine(vllm: Path | None = None, environment: Mapping[str, str] = os.environ) -> Doctor:
    """Gathers all there is about this machine and the vLLM at *vllm*, or the installed one. Never raises."""
    wanted: dict[str, Callable[[], dict[str, Any]]] = {
        "versions": lambda: _versions(vllm),
        "gpu": lambda: _gpu(environment),
        "platform": lambda: _platform(environment),
        "plugin": lambda: _plugin(environment),
        "environment": lambda: {"variables": _variables(environment)},
        "status": lambda: _status(vllm, environment),
        "fleet": lambda: _fleet(environment),
    }
    found: dict[str, Any] = {name: _part(gather) for name, gather in wanted.items()}
    found["errors"] = {"last": found["fleet"].pop("errors", [])}
    mask = _Mask(environment, found["fleet"].pop("hosts", ()))
    return Doctor({name: mask.everywhere(part) for name, part in found.items()})


def _part(gather: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return gather()
    except Exception as error:
        with suppress(Exception):
            return {"error": f"{type(error).__name__}: {error}"}
        return {"error": type(error).__name__}


# -- what may be shown -------------------------------------------------------------------------------------------


class _Variable(NamedTuple):
    name: str
    why: str
    """What it has to do with a defect of CUDA graphs."""
    form: str
    """Of a value that can be shown; anything else is `set` and no more."""


_FLAG = r"0|1|true|false|True|False"
_NUMBER = r"[0-9]{1,6}"
_WORD = "|".join
VARIABLES = (
    _Variable("VLLM_USE_V2_MODEL_RUNNER", "which model runner captures and replays", _FLAG),
    _Variable("VLLM_ATTENTION_BACKEND", "the attention backend, in older releases", r"[A-Z][A-Z_0-9]{2,24}"),
    _Variable("VLLM_MLA_DISABLE", "latent attention, and FlashMLA with it", _FLAG),
    _Variable("VLLM_FLASH_ATTN_VERSION", "which FlashAttention plans for graphs", _NUMBER),
    _Variable("VLLM_USE_BREAKABLE_CUDAGRAPH", "how graphs are captured", _FLAG),
    _Variable("VLLM_USE_AOT_COMPILE", "what is compiled before graphs are captured", _FLAG),
    _Variable("VLLM_DISABLE_COMPILE_CACHE", "whether compiled code comes from an earlier start", _FLAG),
    _Variable("TORCH_COMPILE_DISABLE", "piecewise graphs need torch.compile", _FLAG),
    _Variable("VLLM_ALL2ALL_BACKEND", "experts, and whether graphs are possible with them", r"[a-z][a-z_0-9]{2,30}"),
    _Variable("VLLM_WORKER_MULTIPROC_METHOD", "whether workers load plugins anew", _WORD(("fork", "spawn"))),
    _Variable("VLLM_ENABLE_V1_MULTIPROCESSING", "whether the engine has a process of its own", _FLAG),
    _Variable("VLLM_DP_SIZE", "data-parallel ranks", _NUMBER),
    _Variable("VLLM_DP_RANK", "data-parallel ranks", _NUMBER),
    _Variable("VLLM_LOGGING_LEVEL", "whether the plugin's lines are in the log", r"DEBUG|INFO|WARNING|ERROR|CRITICAL"),
    _Variable("VLLM_CONFIGURE_LOGGING", "whether the plugin's lines are in the log", _FLAG),
    _Variable("CUDA_VISIBLE_DEVICES", "which GPUs", r"[0-9]{1,3}(,[0-9]{1,3}){0,15}"),
    _Variable("CUDA_LAUNCH_BLOCKING", "no capture works with it", _FLAG),
    _Variable("CUDA_MODULE_LOADING", "kernels that load while capturing", "LAZY|EAGER"),
    _Variable(
        "PYTORCH_CUDA_ALLOC_CONF",
        "the memory that graphs are in",
        r"(expandable_segments:(True|False)|max_split_size_mb:[0-9]{1,6})",
    ),
    _Variable("NCCL_CUMEM_ENABLE", "collectives in graphs", _FLAG),
    _Variable("NCCL_GRAPH_MIXING_SUPPORT", "collectives in graphs", _FLAG),
)
"""Of vLLM, torch and CUDA. No other name is looked at, and no value that has another form is shown."""

_HIDDEN = "(hidden)"
_NOT_SHOWN = "(set, not shown)"
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|PWD|CRED|AUTH|COOKIE|SESSION|PRIVATE|DSN|WEBHOOK", re.IGNORECASE)
_SECRETS = re.compile(
    r"""(?P<url>[a-z][a-z0-9+.-]{1,20}://)[^/\s@'"]{1,500}@  # user and password
    |(?P<named>(?:api[_-]?key|token|secret|passw(?:or)?d|authorization)s?["']?\s{0,3}[=:]\s{0,3}["']?(?:bearer\s|basic\s)?
      |--[\w-]{0,40}(?:key|token|secret|password)\s{1,3}|\b(?:bearer|basic)\s{1,3})[^\s"'&,;]{4,500}
    |\b(?:hf_|sk[-_]|pk_|rk_|gh[pousr]_|glpat-|github_pat_|xox[a-z]-|nvapi-|gsk_)[A-Za-z0-9_-]{8,500}
    |\b(?:AKIA|ASIA|AIza)[A-Za-z0-9_-]{12,60}
    |\beyJ[A-Za-z0-9_-]{8,800}(?:\.[A-Za-z0-9_-]{1,800}){0,2}
    |(?<![A-Za-z0-9+=])(?=(?:[A-Za-z+=]{0,60}[0-9]){3})[A-Za-z0-9+=]{28,800}""",
    re.IGNORECASE | re.VERBOSE,
)
"""By their form. Long words with three digits are keys more often than anything that is missed in a report."""
_HOMES = re.compile(r"(?<![\w.])/(?:home|Users|export/home|var/home)/[^/\s'\"`]+")


class _Mask:
    """Takes what is nobody's business out of texts."""

    def __init__(self, environment: Mapping[str, str], hosts: Iterable[str]) -> None:
        known = {*settings.names(fix.name for fix in FIXES), "PWD", "OLDPWD", *(each.name for each in VARIABLES)}
        ours = settings.ROLLOUT_KEY
        named = (
            value for name, value in environment.items() if name == ours or (name not in known and _secretive(name))
        )
        # Short ones are numbers and words that are in every text, and long ones in none: texts are cut.
        values = {value for value in named if 6 <= len(value) <= 4 * _LONGEST}
        self._values = sorted(values, key=lambda value: (-len(value), value))
        self._home = (environment.get("HOME") or "").rstrip("/")
        told = sorted(
            {host for host in hosts if len(host) > 3 and host != "localhost"}, key=lambda host: (-len(host), host)
        )
        self._hosts = [
            (re.compile(rf"(?<![\w.-]){re.escape(host)}(?![\w-])"), f"host-{number}")
            for number, host in enumerate(told, 1)
        ]

    def text(self, text: str) -> str:
        text = text[: 4 * _LONGEST]
        for value in self._values:
            text = text.replace(value, _HIDDEN)
        text = _SECRETS.sub(_without_secret, text)
        if len(self._home) > 1:
            text = re.sub(rf"{re.escape(self._home)}(?![\w.-])", "~", text)
        text = _HOMES.sub("~", text)
        for host, name in self._hosts:
            text = host.sub(name, text)
        text = printable(text)
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"

    def everywhere(self, value: Any) -> Any:
        """*value* with all texts in it masked, keys too."""
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.everywhere(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.everywhere(inner) for inner in value]
        return self.text(value) if isinstance(value, str) else value


def _without_secret(found: re.Match[str]) -> str:
    return f"{found['url']}{_HIDDEN}@" if found["url"] else f"{found['named'] or ''}{_HIDDEN}"


def _secretive(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) or name.upper().startswith(settings.PREFIX)


# -- the parts ---------------------------------------------------------------------------------------------------


def _versions(vllm: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "vllm-graphfix": __version__,
        "python": f"{sys.version.split()[0]} ({sys.implementation.name})",
        "vllm": _vllm(vllm),
    }
    return found | {name: _version(name) for name in _PEERS}


def _vllm(vllm: Path | None) -> str:
    try:
        source = open_source(vllm)
    except SourceError as error:
        return f"not found: {error}"
    return f"{source.version or 'version unknown'} in {source.label}"


def _version(distribution: str) -> str | None:
    """As the metadata say; None where it is not installed."""
    from importlib import metadata

    try:
        return str(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None
    except Exception as error:  # metadata that are damaged
        return f"unreadable ({type(error).__name__})"


def _gpu(environment: Mapping[str, str]) -> dict[str, Any]:
    driver = re.search(r"^NVRM version:\s*(.+)$", hardware.small_text(hardware.PROC / "version") or "", re.MULTILINE)
    found: dict[str, Any] = {"driver": driver[1] if driver else None, "gpus": list(hardware.gpus())}
    program = shutil.which("nvidia-smi", path=environment.get("PATH", os.defpath))
    if program is None or not os.path.isabs(program):  # noqa: PTH117 - a word, not a file yet
        return found | {"nvidia-smi": "not found"}
    answered, said = _ask(program)
    rows = [line.split(",") for line in said.splitlines()]
    seen = [
        dict(zip(("name", "driver", "memory", "compute_capability"), (cell.strip() for cell in row), strict=True))
        for row in rows
        if len(row) == 4
    ]
    return found | {"nvidia-smi": answered, "seen": seen[:_MOST]}


def _ask(program: str) -> tuple[str, str]:
    """How nvidia-smi ended, and what it said. It may hang in a way in which it cannot be ended: nobody waits for it longer than `_PATIENCE`."""
    try:
        process = subprocess.Popen(
            [program, *_QUERY],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # what it starts is ended with it
        )
    except (OSError, ValueError) as error:
        return f"cannot be started: {error}", ""
    said = bytearray()
    try:
        pipe = process.stdout.fileno() if process.stdout else -1
        os.set_blocking(pipe, False)
        end = time.monotonic() + _PATIENCE
        open_ = True
        while time.monotonic() < end and len(said) <= _ANSWER:
            if open_:
                with suppress(BlockingIOError):
                    more = os.read(pipe, 4096)
                    said += more
                    open_ = bool(more)
                    if more:
                        continue
            if process.poll() is not None and (not open_ or not _more(pipe, said)):
                break
            time.sleep(0.02)
        code = process.poll()
    finally:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        if process.stdout:
            process.stdout.close()
    text = bytes(said[:_ANSWER]).decode("utf-8", "replace")
    if code is None:
        return f"did not answer within {_PATIENCE:g} s" if len(said) <= _ANSWER else "does not stop talking", text
    return ("answered" if code == 0 else f"ended with {code}"), text


def _more(pipe: int, said: bytearray) -> bool:
    """Whether something is left in the pipe of a process that has ended."""
    with suppress(OSError):
        more = os.read(pipe, 4096)
        said += more
        return bool(more)
    return False


_CONTAINERS = (("/.dockerenv", "Docker"), ("/run/.containerenv", "Podman"))


def _platform(environment: Mapping[str, str]) -> dict[str, Any]:
    system = os.uname()
    named = re.search(r"^PRETTY_NAME=\"?([^\"\n]*)", hardware.small_text(Path("/etc/os-release")) or "", re.MULTILINE)
    libc = None
    with suppress(ValueError, OSError):
        libc = os.confstr("CS_GNU_LIBC_VERSION")
    return {
        "system": f"{system.sysname} {system.release} {system.machine}",
        "distribution": named[1] if named else None,
        "libc": libc or "not glibc",
        "container": _container(environment),
        "processors": os.cpu_count(),
    }


def _container(environment: Mapping[str, str]) -> str:
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "yes (Kubernetes)"
    for place, what in _CONTAINERS:
        with suppress(OSError):
            if os.access(place, os.F_OK):
                return f"yes ({what})"
    groups = hardware.small_text(Path("/proc/1/cgroup")) or ""
    return "yes" if re.search(r"docker|kubepods|containerd|lxc|libpod", groups) else "not that one could see"


def _plugin(environment: Mapping[str, str]) -> dict[str, Any]:
    """Whether vLLM loads us: it takes the entry points of its group, and of those the ones that VLLM_PLUGINS names."""
    from importlib import metadata

    points = list(metadata.entry_points(group=GROUP))
    ours = [point.value for point in points if point.name == ENTRY_POINT]
    names = {point.name for point in points}
    given = environment.get("VLLM_PLUGINS")
    named = None if given is None else [name.strip() for name in given.split(",")][:_MOST]
    found = {
        "entry_point": ours[0] if ours else "not found: this Python has no installed vllm-graphfix, reinstall it",
        "times_found": len(ours),
        "others": sorted(names - {ENTRY_POINT})[:_MOST],
        "VLLM_PLUGINS": None if named is None else [name if name in names else _NOT_SHOWN for name in named if name],
        "loaded": "yes",
    }
    if not ours:
        found["loaded"] = "no: the entry point is not found"
    elif named is not None and ENTRY_POINT not in named:
        found["loaded"] = f"no: VLLM_PLUGINS does not name it; add {ENTRY_POINT} to it"
    return found


def _variables(environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Those that are set, by name: ours, and `VARIABLES`. Of a name of ours that is not known not even the name is sure to be harmless."""
    found: list[dict[str, Any]] = []
    modes = {variable(fix.name): [mode.value for mode in Mode] for fix in FIXES}
    choices = {settings.PREFIX: [master.value for master in settings.Master], **modes}
    switches = ("1", "0", "true", "false", "yes", "no")
    for name, values in choices.items():
        if name in environment:
            word = environment[name].strip().lower()
            found.append(_told(name, word if word in (*values, *switches, "") else None))
    if settings.ROLLOUT in environment:
        percentage = environment[settings.ROLLOUT].strip()
        try:
            found.append(_told(settings.ROLLOUT, rollout.shown(rollout.buckets_of(percentage))))
        except ValueError:
            found.append(_told(settings.ROLLOUT, None))
    if settings.ROLLOUT_KEY in environment:
        key = environment[settings.ROLLOUT_KEY].strip()
        found.append(_told(settings.ROLLOUT_KEY, f"{_NOT_SHOWN}, bucket {rollout.bucket(key)}" if key else ""))
    if settings.STATUS_DIR in environment:
        folder = environment[settings.STATUS_DIR]
        found.append(_told(settings.STATUS_DIR, folder if re.fullmatch(r"/[\w./-]{0,120}", folder) else None))
    if settings.DECISION in environment:
        decision = rollout.decode(environment[settings.DECISION])
        found.append(_told(settings.DECISION, "of an engine" if decision else None))
    known = settings.names(fix.name for fix in FIXES)
    strangers = sum(name.upper().startswith(settings.PREFIX) and name not in known for name in environment)
    if strangers:
        found.append(_told(f"{settings.PREFIX}…", f"{strangers} names that mean nothing (not shown)"))
    for each in VARIABLES:
        if each.name in environment:
            value = environment[each.name]
            found.append(_told(each.name, value if re.fullmatch(each.form, value) else None))
    return found


def _told(name: str, value: str | None) -> dict[str, Any]:
    return {"name": name, "value": _NOT_SHOWN if value is None else value}


def _status(vllm: Path | None, environment: Mapping[str, str]) -> dict[str, Any]:
    from vllm_graphfix.status import status

    # What is wrong with a value is told with the value, and who is outside a rollout with the key: neither is asked for.
    shown = {each["name"]: each["value"] for each in _variables(environment)}
    clean = {name: value for name, value in environment.items() if shown.get(name, _NOT_SHOWN) != _NOT_SHOWN}
    if settings.ROLLOUT_KEY in environment:
        clean[settings.ROLLOUT_KEY] = environment[settings.ROLLOUT_KEY]
    if "VLLM_PLUGINS" in environment:
        clean["VLLM_PLUGINS"] = ",".join(_plugin(environment)["VLLM_PLUGINS"])
    source = open_source(vllm)
    found = status(source, clean)
    withheld = rollout.decide(settings.read(environment, [fix.name for fix in FIXES]), source.version or "").key
    told = found.as_json()
    told["notes"] = [note.replace(repr(withheld), _HIDDEN) if withheld else note for note in told["notes"]]
    if settings.ROLLOUT in environment and settings.ROLLOUT not in clean:
        told["notes"].append(f"{settings.ROLLOUT} is no percentage: no engine gets the fixes")
    return {key: told[key] for key in ("vllm", "source", "notes", "fixes")}


def _fleet(environment: Mapping[str, str]) -> dict[str, Any]:
    from vllm_graphfix import fleet, records

    try:
        found = fleet.look(records.base_folder(environment))
    except fleet.FleetError as error:
        return {"error": str(error)}
    bad = (State.FAILED.value, State.CONFLICT.value, State.INCOMPATIBLE.value)
    engines = [
        {
            "engine": engine.name,
            "status": engine.status,
            "vllm": list(engine.told("vllm")),
            "vllm-graphfix": list(engine.told("graphfix")),
            "processes": len(engine.members),
            "ranks": f"{engine.agreeing if engine.agreeing is not None else 'none'} of {engine.expected} compared and agreeing",
            "states": {
                fix: {state: len(members) for state, members in engine.states(fix).items()}
                for fix in engine.fixes[:_MOST]
            },
            "events": {fix: engine.counts(fix) for fix in engine.fixes[:_MOST] if any(engine.counts(fix).values())},
            "wrong": list(engine.wrong[:_MOST]),
            "notes": list(engine.notes[:_MOST]),
        }
        for engine in found.engines[:_MOST]
    ]
    errors: dict[tuple[str, str, str], None] = {}
    for engine in found.engines:
        for member in engine.members:
            record = member.record
            for name, fix in record.fixes.items():
                if fix.state in bad:
                    errors[name, fix.state, fix.reason] = None
            if record.problem is not None:
                errors["engine", "stopped", record.problem] = None
    return {
        "engines": engines,
        "more_engines": max(len(found.engines) - _MOST, 0),
        "without_a_record": len(found.unrecorded),
        "because": sorted({each.reason for each in found.unrecorded})[:_MOST],
        "notes": [*found.notes, *found.problems][:_MOST],
        "errors": [dict(zip(("of", "state", "reason"), each, strict=True)) for each in list(errors)[-_MOST:]],
        "hosts": sorted(
            {
                found.here.host,
                os.uname().nodename,
                *(member.record.host for engine in found.engines for member in engine.members),
            }
        ),
    }


# -- for an issue ------------------------------------------------------------------------------------------------


def markdown(doctor: Doctor) -> str:
    """To be pasted: plain, and nothing in it is a link, a mention or markup of somebody else's."""
    return "\n".join(_lines(doctor.parts)) + "\n"


def _lines(parts: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield "### vllm-graphfix doctor"
    yield ""
    yield "Secrets, names of hosts and home folders are masked; read it once more before you paste it."
    for name, part in parts.items():
        yield ""
        yield f"#### {name.capitalize() if name != 'gpu' else 'GPU'}"
        yield ""
        told = _TELLERS.get(name, _any)(part) if "error" not in part else [f"- cannot be told: {_code(part['error'])}"]
        yield from list(told) or ["- nothing"]


def _any(part: Mapping[str, Any]) -> Iterator[str]:
    for key, value in part.items():
        if value not in (None, [], {}, ""):
            yield f"- {key}: {_code(value)}"


def _variables_told(part: Mapping[str, Any]) -> Iterator[str]:
    for each in part["variables"]:
        yield f"- {_code(each['name'])} = {_code(each['value'])}"


def _status_told(part: Mapping[str, Any]) -> Iterator[str]:
    for fix in part["fixes"]:
        known = "" if fix["known_release"] else ", a shape of code that is no stock release's"
        yield f"- {fix['name']}: {fix['diagnosis']}{known}; mode {fix['mode']}, would be {fix['would_be']}: {_code(fix['reason'])}"
        yield from (f"  - {_code(note)}" for note in fix["notes"])
    yield from (f"- note: {_code(note)}" for note in part["notes"])


def _fleet_told(part: Mapping[str, Any]) -> Iterator[str]:
    for engine in part["engines"]:
        yield f"- engine {_code(engine['engine'])}: {engine['status']}, {engine['processes']} processes, {engine['ranks']}"
        for key in ("vllm", "vllm-graphfix", "states", "events", "wrong", "notes"):
            if engine[key]:
                yield f"  - {key}: {_code(engine[key])}"
    yield from _any({key: part[key] for key in ("more_engines", "without_a_record", "because", "notes") if part[key]})


def _errors_told(part: Mapping[str, Any]) -> Iterator[str]:
    for each in part["last"]:
        yield f"- {_code(each['of'])} {each['state']}: {_code(each['reason'])}"


_TELLERS: Mapping[str, Callable[[Mapping[str, Any]], Iterable[str]]] = {
    "environment": _variables_told,
    "status": _status_told,
    "fleet": _fleet_told,
    "errors": _errors_told,
}


def _code(value: object) -> str:
    """As code: what is in it is not read as markup."""
    if isinstance(value, Mapping):
        return "; ".join(f"{_code(key)} {_code(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return "; ".join(_code(each) for each in value)
    return f"`{str(value).replace('`', chr(39)) or ' '}`"
