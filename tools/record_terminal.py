"""Records `vllm-graphfix status` and `verify` as pictures of a terminal: docs/status.svg and docs/verify.svg.

    python tools/record_terminal.py [VERSION]

The commands run as a user runs them, in a terminal of their own; what they print is drawn, colours and all.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fetch_vllm import release

DOCS = Path(__file__).parent.parent / "docs"
COLUMNS = 122


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?", default="0.18.1", help="a stock release (default: 0.18.1)")
    version = parser.parse_args().version
    failed = 0
    for command in ("status", "verify"):
        code = record(command, version, DOCS / f"{command}.svg")
        print(f"docs/{command}.svg: exit code {code}")
        failed |= code
    return failed


def record(command: str, version: str, into: Path) -> int:
    """Run *command* on the stock release *version*, draw what it prints *into* a file, and return its exit code.

    The file stays as it is if the command fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        name, stock = f"vllm-{version}", release(version)
        (Path(folder) / name).symlink_to(stock)
        arguments = [command, "--vllm", name]
        code, printed = _in_a_terminal([sys.executable, "-m", "vllm_graphfix", *arguments], Path(folder))
        if not code:
            # The picture shows no folder of this machine.
            without_folder = printed.replace(str(stock.resolve()), name)
            _draw(f"vllm-graphfix {' '.join(arguments)}", without_folder, into)
        return code


def _in_a_terminal(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """Return exit code and output; progress goes to standard error, which is not recorded."""
    unwanted = ("VLLM_", "NO_COLOR", "COLUMNS")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    environment = inherited | {"TERM": "xterm-256color", "PYTHONPATH": str(DOCS.parent)}
    printed = bytearray()
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.DEVNULL
    ) as process:
        os.close(writer)
        try:
            while chunk := os.read(reader, 4096):
                printed += chunk
        except OSError:  # how a terminal tells that nobody writes to it any more
            pass
        os.close(reader)
    return process.returncode, printed.decode().replace("\r\n", "\n")


def _draw(command: str, printed: str, into: Path) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "bold green"), command))
    for line in printed.splitlines():
        console.print(Text.from_ansi(line.rstrip()), no_wrap=True, crop=True)
    # The same id every time: a picture changes only if what it shows does.
    picture = console.export_svg(title="vllm-graphfix", unique_id=f"graphfix-{into.stem}")
    # A picture in a README fetches no font.
    into.write_text(re.sub(r"@font-face\s*{.*?}", "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    sys.exit(main())
