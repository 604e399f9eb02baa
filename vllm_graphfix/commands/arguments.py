"""Options and arguments that several commands share."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from vllm_graphfix import manifest
from vllm_graphfix._version import __version__
from vllm_graphfix.commands.output import stop
from vllm_graphfix.fix import Fix
from vllm_graphfix.fixes import BY_NAME, FIXES, about
from vllm_graphfix.source.files import Source, SourceError, open_source, stock_release


class DeviceName(str, Enum):
    """The device that `verify` runs on."""

    GPU = "gpu"
    CPU = "cpu"


VllmOption = Annotated[
    Path | None,
    typer.Option(
        "--vllm",
        metavar="PATH",
        help="A vLLM wheel file, source tree or site-packages folder; default: the installed vLLM. "
        "For `status` also a stock release, such as 0.18.1.",
    ),
]

FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        metavar="PATH",
        help="Folder of the status records; default: VLLM_GRAPHFIX_STATUS_DIR, or else /tmp.",
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-graphfix {__version__}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, a stable interface with a schema version.")]


def open_vllm(place: Path | None) -> Source:
    """Open the vLLM at *place*, which may also be the version of a recorded stock release. Raises SourceError."""
    if place is None or not re.fullmatch(r"v?\d+(\.\d+)+", str(place)) or place.exists():
        return open_source(place)
    version, recorded = str(place).removeprefix("v"), manifest.releases()
    if version not in recorded:
        raise SourceError(
            f"{version} is neither a folder nor a recorded stock release; recorded are {recorded[0]} to "
            f"{recorded[-1]}: give a vLLM wheel file, source tree or site-packages folder"
        )
    return stock_release(version)


def complete_fix(incomplete: str) -> list[tuple[str, str]]:
    """Complete the name of a fix in a shell, with its summary."""
    return [(fix.name, about(fix).summary) for fix in FIXES if fix.name.startswith(incomplete)]


def find_fix(name: str) -> Fix:
    """Return the fix of this name, in any case and with `_` for `-`; end the command if there is none."""
    wanted = name.lower().replace("_", "-")
    fix = BY_NAME.get(wanted)
    if fix is None:
        from difflib import get_close_matches

        # Parts of names come first: difflib does not think `mamba` close to `mamba-padding`.
        close = [each for each in BY_NAME if wanted and wanted in each] or get_close_matches(wanted, BY_NAME, n=1)
        stop(
            f"there is no fix named {name!r}"
            + (f"; did you mean {' or '.join(close)}?" if close else f"; there are: {', '.join(BY_NAME)}")
        )
    return fix
