"""Python's audit hooks over the whole life of a process.

They see what is done there with a function of vllm_graphfix on the stack.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

_HARM = """subprocess. socket. ctypes. urllib. http. ftplib. smtplib. poplib. imaplib. webbrowser. pickle. marshal. shelve. dbm. sqlite3.
pty. code. function. os.system os.exec os.spawn os.posix_spawn os.fork os.killpg builtins.breakpoint"""  # noqa: E501
_WRITES = (
    "os.mkdir os.rename os.remove os.rmdir os.link os.symlink os.truncate os.chmod os.chown os.utime os.setxattr "
    "shutil. tempfile."
)

START = f"""
def _audit():
    import json, os, sys
    harm, wrote, evaluated, environment, signals = set(), set(), set(), set(), set()
    named = {{"os.mkdir": 2, "os.remove": 1, "os.rmdir": 1, "os.utime": 3, "os.chmod": 2, "os.rename": 2}}  # where the folder's descriptor is
    changes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def whole(path, folder):
        if isinstance(path, int):
            return os.readlink(f"/proc/self/fd/{{path}}")
        where = os.readlink(f"/proc/self/fd/{{folder}}") if isinstance(folder, int) and folder >= 0 else ""
        return os.path.join(where, os.fsdecode(path))

    def hook(event, values):
        evaluates = event in ("exec", "compile")
        writes = event.startswith({tuple(_WRITES.split())!r}) or (event == "open" and values[2] & changes)
        if not (evaluates or writes or event in ("os.putenv", "os.kill") or event.startswith({tuple(_HARM.split())!r})):
            return
        frame = sys._getframe(1)
        innermost = frame.f_globals.get("__name__", "")
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] != "vllm_graphfix":
            frame = frame.f_back
        if frame is None or innermost.startswith("importlib._bootstrap"):  # an import statement reads code, and keeps its bytecode
            return
        if evaluates and not innermost.startswith("vllm_graphfix"):
            evaluated.add(innermost)
        elif event == "os.putenv":
            environment.add(os.fsdecode(values[0]))
        elif event == "os.kill":
            signals.add(int(values[1]))
        elif event == "open":
            # The folder's descriptor is not told, but what is opened there has its folder's name in its own.
            wrote.add(whole(values[0], frame.f_locals.get("folder")))
        elif writes:
            wrote.add(whole(values[0], values[named[event]] if event in named else -1))
        else:
            harm.add(event)

    sys.addaudithook(hook)
    def told():
        seen = dict(harm=harm, wrote=wrote, evaluated=evaluated, environment=environment, signals=signals, modules=set(sys.modules))
        print("AUDITED", json.dumps({{name: sorted(found) for name, found in seen.items()}}), flush=True)
    return told
audited = _audit()
"""  # noqa: E501
"""Code to run before anything else; `audited()` then prints what `read` reads."""


class Audited(NamedTuple):
    """The events that functions of vllm_graphfix caused in a process, themselves or through others."""

    harm: list[str]
    """Events of what they must never do: start a process, open a connection, evaluate code of their own, unpickle, load
    a library."""
    wrote: list[str]
    """Paths that were made, opened for writing, renamed or removed."""
    evaluated: list[str]
    """Modules that evaluated code on their behalf, as `collections` does for a named tuple."""
    environment: list[str]
    """Names of variables that they set."""
    signals: list[int]
    modules: list[str]
    """All that the process has imported."""


def read(output: str) -> Audited:
    (line,) = [line for line in output.splitlines() if line.startswith("AUDITED ")]
    fields: dict[str, Any] = json.loads(line.removeprefix("AUDITED "))
    return Audited(**fields)
