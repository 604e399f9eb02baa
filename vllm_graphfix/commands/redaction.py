"""Redaction of reports: an allow list of variables and the forms of their values, and a mask for texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from vllm_graphfix.deployment.secrets import HIDDEN, without_secrets
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.text import printable

_LONGEST = 300
"""Characters of a text."""
_LONGEST_MASKED = 64 * 1024
"""Characters of a text that are masked before it is cut: the part of a secret at their end is cut off, too."""
_LONGEST_COMMAND = 64 * 1024
"""Characters of a command that are read for secrets before it is cut."""


class _Variable(NamedTuple):
    name: str
    why: str
    """Relation to defects of CUDA graphs."""
    form: str
    """Pattern of values that are printed; of another value the report says only that it is set."""


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
    _Variable("CUDA_VISIBLE_DEVICES", "which GPUs", r"([0-9]{1,3}(,[0-9]{1,3}){0,15})?"),
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
"""Variables of vLLM, torch and CUDA that are printed; no other name is read."""

_OF_RECORDS = ("states", "events")
"""Parts whose keys come from records of engines."""
WITHHELD = "(set, not shown)"
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|PWD|CRED|AUTH|COOKIE|SESSION|PRIVATE|DSN|WEBHOOK", re.IGNORECASE)
_SECRET_FLAG = re.compile(r"--?[\w-]*(?:key|token|secret|password)|--api[-_]ke?|--hf[-_]t(?:o|oke?)?", re.IGNORECASE)
"""Flags that take secrets. Also --api-key and --hf-token cut short, which argparse takes for them."""
_PLACED = (
    re.compile(
        r"\b(?:ranks? [0-9][0-9, -]{0,200}(?: of DP [0-9]{1,6})? ?"
        r"|(?:front-end|api-server|engine-core|worker|process) [0-9]+ )"
        r"(?P<before>\(|on )(?!(?:an?|the|its|their|this|that|all|other|each) )"
        r"(?P<host>[^\s()'\";,:]{0,254}[^\s()'\";,:.])"
    ),
    re.compile(r"(?P<before>\b[0-9a-f]{16}-)(?P<host>[A-Za-z0-9._-]{1,64})(?=-[0-9]{1,10}\.json\b)"),
    re.compile(r"(?P<before>\[)(?P<host>[\w.:-]{1,255})(?=\]:[0-9]{2,5}\b)"),
    re.compile(r"(?P<before>(?<![\w.]))(?P<host>[0-9]{1,3}(?:\.[0-9]{1,3}){3})(?=(?:, |:)[0-9]{2,5}\b)"),
)
"""Hosts as they are named by ranks that disagree, also by ranks without a record here, in names of records, and in
connection errors of a store or a collective."""
_WORDS = r"on(?::[0-9a-f]{16})?|off|auto|observe|strict|report|repair|quarantine|abort|[0-9]+(?:[./][0-9]+)?(?:\ ?%)?"
_VALUE_ENDS = rf"(?:,\ {settings.PREFIX}|\ means\ nothing|\ is\ not\ a\ variable|['\"]\ on\ ranks?\ [0-9]|…$)"
_MISTYPED = rf"""\b(?P<name>(?!{settings.STATUS_DIR}=)(?:NAMES))=(?:
      '(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"
      |(?!(?:{_WORDS}){_VALUE_ENDS}).{{0,200}}?(?={_VALUE_ENDS})
      |(?!(?:{_WORDS})(?![\w/:=+-]))[^\s,;]+)"""
"""Invalid value of one of our variables (by a pattern of names): where it is quoted or reported, and any other one that
is no word of ours."""
_KEY = re.compile(r"""(?<=\bkey )(?:'(?:[^'\\]|\\.)*(?:'|$)|"(?:[^"\\]|\\.)*(?:"|$))""")
"""The rollout key in a reason."""
_NAMED = re.compile(r"\b\w+(?==)")
_HOMES = re.compile(r"(?<![\w.])/(?:home|Users|export/home|var/home)/[^/\s'\"`]+")


class Mask:
    """Replaces secrets, model names, hosts and home folders in texts."""

    def __init__(self, environment: Mapping[str, str], hosts: Iterable[str], models: Iterable[str] = ()) -> None:
        known = {*settings.names(fix.name for fix in FIXES), "PWD", "OLDPWD", *(each.name for each in VARIABLES)}
        ours = settings.ROLLOUT_KEY
        named = (
            value
            for name, value in environment.items()
            if name == ours or (name not in known and _is_secret_name(name))
        )
        # A short value would match in any text, and a longer one in none, since records cut their texts.
        values = {value for value in (*named, *models) if 6 <= len(value) <= 4 * _LONGEST}
        self._values = sorted(values, key=lambda value: (-len(value), value))
        self._home = (environment.get("HOME") or "").rstrip("/")
        by_length = sorted(
            {host for host in hosts if len(host) > 3 and host != "localhost"}, key=lambda host: (-len(host), host)
        )
        self._names = {host: f"host-{number}" for number, host in enumerate(by_length, 1)}
        self._hosts = [
            (re.compile(rf"(?<![\w.-]){re.escape(host)}(?:\.\w[\w-]*)*(?![\w-])"), name)
            for host, name in self._names.items()
        ]

    def text(self, text: str) -> str:
        text = self.whole_text(text[:_LONGEST_MASKED])
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"

    def whole_text(self, text: str) -> str:
        """Mask *text* without cutting it; the result is one line."""
        for value in self._values:
            text = text.replace(value, HIDDEN)
        text = without_secrets(_KEY.sub(HIDDEN, text))
        if len(self._home) > 1:
            text = re.sub(rf"{re.escape(self._home)}(?![\w.-])", "~", text)
        text = _HOMES.sub("~", text)
        odd = {name for name in _NAMED.findall(text) if settings.is_ours(name) and not name.startswith(settings.PREFIX)}
        ours = "|".join((rf"{settings.PREFIX}\w*", *sorted(odd)))
        text = re.sub(_MISTYPED.replace("NAMES", ours), rf"\g<name>={WITHHELD}", text, flags=re.VERBOSE)
        for placed in _PLACED:
            text = placed.sub(self._without_host, text)
        for host, name in self._hosts:
            text = host.sub(name, text)
        return printable(text)

    def code(self, text: str) -> str:
        """Mask *text* and return it as code of Markdown, in which nothing is markup, a mention or a link."""
        return "`{}`".format(self.whole_text(text).replace("`", "'") or " ")

    def _without_host(self, match: re.Match[str]) -> str:
        name = self._names.setdefault(match["host"], f"host-{len(self._names) + 1}")
        return f"{match[0][: match.start('host') - match.start()]}{name}"

    def everywhere(self, value: Any, *, of_records: bool = False) -> Any:
        """Mask all texts in *value*, and the keys that come from records.

        The report's own keys stay, even if one of them is also somebody's rollout key: JSON readers rely on them.
        """
        if isinstance(value, Mapping):
            return {
                self.text(str(key)) if of_records else key: self.everywhere(
                    inner, of_records=of_records or key in _OF_RECORDS
                )
                for key, inner in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.everywhere(inner, of_records=of_records) for inner in value]
        return self.text(value) if isinstance(value, str) else value


def hosts_in(text: str) -> set[str]:
    """Return the hosts of processes that *text* names."""
    return {match["host"] for placed in _PLACED for match in placed.finditer(text)}


def command_line(words: Iterable[str]) -> str:
    """Join the *words* of a command, without all values of flags that take secrets, and without other secrets."""
    visible: list[str] = []
    secret = False
    for word in words:
        if word.startswith("-"):
            flag, equals, _ = word.partition("=")
            secret = _SECRET_FLAG.fullmatch(flag) is not None
            visible.append(f"{flag}={HIDDEN}" if secret and equals else word)
        else:
            visible.append(HIDDEN if secret else word)
    return without_secrets(" ".join(visible)[:_LONGEST_COMMAND])[: 4 * _LONGEST]


def _is_secret_name(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) or settings.is_ours(name)
