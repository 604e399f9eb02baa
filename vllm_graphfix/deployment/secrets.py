"""What has the form of a secret in a command line is hidden before it is cut: the rest of one would match no more."""

from __future__ import annotations

import re

from vllm_graphfix.text import brief_repr, printable

HIDDEN = "(hidden)"
_SECRETS = re.compile(
    r"""(?P<url>[a-z][a-z0-9+.-]{1,20}://)[^/\s'"]{1,500}@  # user and password, which may hold an @
    |(?P<named>(?:api[_-]?key|token|secret|passw(?:or)?d|authorization)s?["']?\s{0,3}[=:]\s{0,3}
      ["']?(?:bearer\s|basic\s)?
      |--[\w-]{0,40}(?:key|token|secret|password)\s{1,3}|\b(?:bearer|basic)\s{1,3})[^\s"'&,;]{4,500}
    |\b(?:hf_|sk[-_]|pk_|rk_|gh[pousr]_|glpat-|github_pat_|xox[a-z]-|nvapi-|gsk_)[A-Za-z0-9_-]{8,500}
    |\b(?:AKIA|ASIA|AIza)[A-Za-z0-9_-]{12,60}
    |\beyJ[A-Za-z0-9_-]{8,800}(?:\.[A-Za-z0-9_-]{1,800}){0,2}
    |(?<![A-Za-z0-9+=])(?=(?:[A-Za-z+=]{0,60}[0-9]){3})[A-Za-z0-9+=]{28,800}""",
    re.IGNORECASE | re.VERBOSE,
)
"""Secrets by their form. A long word with three digits is more often a key than something that a report needs."""


def without_secrets(text: str) -> str:
    """Hide what has the form of a secret in *text*."""
    return _SECRETS.sub(_without_secret, text)


def brief_value(value: str, most: int) -> str:
    """Return the first *most* characters of *value* for a line of a terminal, without secrets."""
    return printable(without_secrets(value)[:most])


def quoted_value(value: str) -> str:
    """Quote *value* as `brief_repr` does, without secrets."""
    return brief_repr(without_secrets(value))


def _without_secret(match: re.Match[str]) -> str:
    return f"{match['url']}{HIDDEN}@" if match["url"] else f"{match['named'] or ''}{HIDDEN}"
