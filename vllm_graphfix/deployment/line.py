"""Parses the command line of a `vllm serve`: variables, flags and model. vLLM is not needed."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from vllm_graphfix.deployment.secrets import quoted_value

_LONGEST_LINE = 16 * 1024
"""Characters. The parser takes more than linear time."""
_NAMES: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-n": "--nnodes",
    "-dcp": "--decode-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-sc": "--speculative-config",
    "-O": "--optimization-level",
}
"""Short names of vLLM's flags."""
_SWITCHES = frozenset(
    """--enforce-eager --enable-expert-parallel --trust-remote-code --data-parallel-hybrid-lb
    --data-parallel-external-lb --data-parallel-multi-port-external-lb --headless --enable-sleep-mode""".split()
)
_VALUES = frozenset(
    """--model --config --kv-cache-dtype --attention-backend --attention-config --speculative-config
    --spec-method --spec-model --spec-tokens --compilation-config --optimization-level --tensor-parallel-size
    --pipeline-parallel-size --data-parallel-size --data-parallel-rank --data-parallel-start-rank
    --data-parallel-size-local --data-parallel-backend --nnodes --distributed-executor-backend
    --decode-context-parallel-size --block-size --runner --convert --task --hf-overrides --hf-config-path
    --kv-transfer-config --revision --all2all-backend --max-cudagraph-capture-size --quantization
    --kv-offloading-size""".split()
)
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_CONTINUED = re.compile(r"\\[ \t]*\r?\n|(?:(?<=\s)|^)\\(?=\s|$)")
"""A backslash at the end of a line, also where the end of the line was lost on the way."""
# An escaped quotation mark begins nothing. Tried as a beginning, each of thousands would be followed to the line's end.
_QUOTED_OR_OBJECT = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|(?:(?<=[\s=])|^)\{""", re.DOTALL)
_QUOTED_OR_COMMENT = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|(?:(?<=\s)|^)#[^\n]*""", re.DOTALL)
_KEY_OF_LIST = re.compile(r"^[ \t]*(?:- )?(?:command|args):", re.MULTILINE)
_LIST = re.compile(r"""\s*\[((?:'[^']*'|"(?:\\.|[^"\\])*"|[^\[\]'"])*)\]""", re.DOTALL)
"""A list in brackets: `command` or `args` of a container, in JSON or YAML."""
_ITEM = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|[^,\s'"][^,\n'"]*""", re.DOTALL)
_ITEM_OF_LINE = re.compile(r"\s*-\s+(\S.*)")
_SCRIPT = re.compile(r"\bvllm\s+serve\s|\bvllm\.entrypoints\.")
_END = re.compile(r"\d?>{1,2}.*|2>&1|&>.*|\|\|?|&&?|;")
"""The end of a command in a shell."""
_IMAGE = re.compile(r"(?:[\w.:-]+/)*vllm[\w.-]*(?::[\w.-]+)?(?:@sha256:\w+)?")
"""A container's image, behind which `docker run` takes the flags of vLLM."""
_SETTING = re.compile(r"\+{0,2}[\w.]+=.*", re.DOTALL)
"""A setting of Hydra, which verl and NeMo-RL use."""
_LEAST_ALIKE = 0.92
"""The least ratio of two names of which one misspells the other; no flag of a release is as close to one that is
read."""
_LONGEST_SHORT = max(map(len, _NAMES))
"""Characters."""
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""Into these, word processors and chats turn the hyphens of a flag."""
_RAY = re.compile(r"^(?:\x1b\[[\d;]*m)*\(\S+ pid=\d[^)\n]*\)(?:\x1b\[[\d;]*m)* ?", re.MULTILINE)
"""What Ray puts before each line that an actor prints, coloured on a terminal."""
_TITLE = re.compile(r"\w+::(APIServer|EngineCore|Worker|DPCoordinator)")
_NO_VALUE = re.compile(
    r"--(no|enable|disable|allow|trust|use|skip|async|fully|calculate|ray|return|headless|enforce)\b.*"
)
"""Flags of vLLM that take no value, by their names: the word behind one of them may be the model."""


class FlagsError(Exception):
    """The text is no command line of a `vllm serve`; the message says what to do."""


class _FlagsRead(NamedTuple):
    """Long names of the flags that are read. All others are skipped with their values."""

    switches: frozenset[str]
    values: frozenset[str]
    negated: dict[str, str]

    @classmethod
    def of(cls, flags: Collection[str]) -> _FlagsRead:
        """Return the flags that facts need, and *flags*, which end with ``=`` if they have a value."""
        values = frozenset(flag.removesuffix("=") for flag in flags if flag.endswith("="))
        switches = _SWITCHES | {flag for flag in flags if not flag.endswith("=")}
        return cls(switches, _VALUES | values, {f"--no-{name[2:]}": name for name in switches})

    def meant_by(self, name: str) -> list[str]:
        """Return the flags that *name* may stand for: those that begin with it, or else the one that it misspells."""
        longs = [*self.switches, *self.values, *self.negated]
        # argparse takes any beginning that is one flag's alone.
        beginning = [long for long in longs if len(name) > 2 and long.startswith(name)]
        if beginning or f"--no-{name[2:]}" in longs:
            return beginning
        return get_close_matches(name, longs, n=1, cutoff=_LEAST_ALIKE)


class FlagValue(NamedTuple):
    """The value of one flag on the line."""

    value: str | None
    """None for a switch."""
    unsure: str | None = None
    """Information that is missing to be sure of the value; None if it is certain."""


class Line(NamedTuple):
    environment: dict[str, str]
    flags: dict[str, FlagValue]
    models: list[str]
    named: list[str]
    """The flags as they stand on the line, without values."""
    words: list[str]
    """All arguments of `vllm serve`."""


def parse(line: str, flags: Collection[str]) -> Line:
    """Parse *line* for the flags that facts need, and for *flags*, in the form of `Fix.flags`.

    Raises FlagsError if a shell could not split it into words.
    """
    if len(line) > _LONGEST_LINE:
        raise FlagsError(
            f"the flags of --for have more than {_LONGEST_LINE:,} characters; give only the arguments of `vllm serve`"
        )
    try:
        words = _printed_list(line) or shlex.split(
            _with_quoted_objects(_CONTINUED.sub(" ", _without_lists(_without_comments(line))))
        )
        if len(words) == 1 and len(words[0].split()) > 1:  # quoted once more
            words = shlex.split(_with_quoted_objects(words[0]))
        # What `bash -c` executes.
        words = [
            part
            for word in words
            for part in (shlex.split(_with_quoted_objects(word)) if _SCRIPT.search(word) else (word,))
        ]
    except ValueError as error:
        raise FlagsError(
            f"a shell could not parse the flags of --for ({error}); quote JSON within the quoted flags, "
            f"as in --for \"… -cc '{{…}}'\""
        ) from error
    if words and _TITLE.match(words[0]):
        raise FlagsError(
            f"{quoted_value(words[0])} is a title that vLLM gives its processes, in place of their flags; paste the "
            "line of the `vllm serve` that started them, or use status --running"
        )
    words = [each for word in words for each in ((word[:-1], ";") if word.endswith(";") else (word,)) if each]
    start = _start_of_flags(words)
    end = next((at for at in range(start, len(words)) if _END.fullmatch(words[at])), len(words))
    # Also those of `env` and `docker run -e`.
    assigned = [word.partition("=") for word in words[:start] if _ASSIGNMENT.fullmatch(word)]
    environment = {name: value for name, _, value in assigned}
    return Line(environment, *_flags(words[start:end], _FlagsRead.of(flags)), words[start:end])


def _without_comments(line: str) -> str:
    return _QUOTED_OR_COMMENT.sub(lambda match: "" if match[0].startswith("#") else match[0], line)


def _without_lists(text: str) -> str:
    """Return the items of the lists `command` and `args` of a container in one line; *text* if it is anything else."""
    bare = _KEY_OF_LIST.sub("", text)
    items, at = [], 0
    # By `match`: a search would begin anew at each bracket and blank of a long line.
    while match := _LIST.match(bare, at):
        items += _ITEM.findall(match[1])
        at = match.end()
    if bare[at:].strip():
        matches = [_ITEM_OF_LINE.fullmatch(each) for each in bare.splitlines() if each.strip()]
        items = [match[1].strip() for match in matches if match]
        if len(items) < len(matches):
            return text
    return " ".join(map(_as_word, items)) or text


def _as_word(item: str) -> str:
    """Return an item of a list in YAML as a word for a shell."""
    if item.startswith('"'):
        item = str(json_or(item, item))
    elif item.startswith("'"):
        item = item.strip("'")
    # One item that should be several is a common mistake.
    return item if item.startswith("-") and " " in item else shlex.quote(item)


def _printed_list(line: str) -> list[str]:
    """Return the words of a list that Python has printed, as verl does when it starts vLLM; empty if *line* is none."""
    text = _RAY.sub("", line.strip())
    if not text.startswith("["):
        return []
    try:
        words = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else []


def _with_quoted_objects(line: str) -> str:
    """Quote each JSON object in *line* that is not quoted, as in the output of `ps`."""
    parts, at = [], 0
    while match := _QUOTED_OR_OBJECT.search(line, at):
        end = match.end()
        text = match[0]
        if text == "{":
            try:
                _, end = json.JSONDecoder().raw_decode(line, match.start())
                text = shlex.quote(line[match.start() : end])
            except (ValueError, RecursionError):
                pass
        parts += [line[at : match.start()], text]
        at = end
    return "".join([*parts, line[at:]])


def _start_of_flags(words: Sequence[str]) -> int:
    """Return the index of the first argument of `vllm serve`, behind programs, variables and `docker run`."""
    names = [word.rpartition("/")[2] for word in words]
    for at, name in enumerate(names):
        following = words[at + 1] if at + 1 < len(words) else ""
        if name == "vllm" and following == "serve":
            return at + 2
        if name == "-m" and following.startswith("vllm.entrypoints."):
            return at + 2 + (words[at + 2 : at + 3] == ["serve"])
        if name == "api_server.py":
            return at + 1
    if {"docker", "podman", "nerdctl"} & {*names[: 1 + (names[:1] == ["sudo"])]}:
        images = [at for at, word in enumerate(words) if at > 1 and _IMAGE.fullmatch(word)]
        # --name vllm stands before the image.
        at = next((at for at in images if re.search("[/:]", words[at])), images[0] if images else 0)
        return at + 1 + (words[at + 1 : at + 2] == ["serve"])
    start = 0
    while start < len(words) and (_ASSIGNMENT.fullmatch(words[start]) or words[start] in ("env", "exec")):
        start += 1
    return start + (words[start : start + 1] == ["serve"])


def _flags(words: Sequence[str], known: _FlagsRead) -> tuple[dict[str, FlagValue], list[str], list[str]]:
    flags: dict[str, FlagValue] = {}
    nested: dict[str, dict[str, Any]] = {}
    models: list[str] = []
    named: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not is_flag(word):
            # A list that was cut off, or the dictionary of arguments that vLLM logs.
            if _SETTING.fullmatch(word) or word[0] == "[" or (models and word[0] == "{"):
                raise FlagsError(
                    f"{quoted_value(word)} is no argument of `vllm serve`; write a framework's settings as flags, the "
                    "model first: -tp 8 for tensor_model_parallel_size=8, --enforce-eager for enforce_eager=True"
                )
            models.append(word)
            continue
        name, equals, value = word.partition("=")
        named.append(name)
        text: str | None = value if equals else None
        if name.startswith("-O") and not name.startswith("-O."):
            # -O3, -O=3, -O 3
            text = name[2:] if len(name) > 2 else text
            name = "-O"
        name, dot, path = name.partition(".")
        name = long_name(name)
        # -kv-cache-dtype, or with a dash in place of hyphens: what vLLM refuses, and whoever types it means.
        meant = name if name.startswith("--") or len(name) <= _LONGEST_SHORT else _with_two_hyphens(name)
        follows = at < len(words) and not is_flag(words[at])
        if dot and meant == name:
            if text is None and at < len(words):
                text, at = words[at], at + 1
            _nest(nested.setdefault(name, {}), path, text or "")
        elif name in known.switches or name in known.negated:
            wrong = equals or (follows and words[at].lower() in ("true", "false", "0", "1"))
            at += not equals and bool(wrong)
            positive = known.negated.get(name, name)
            flags.pop(positive, None)
            if wrong:
                flags[positive] = FlagValue(None, f"{positive} without a value, as vLLM expects it")
            elif positive == name:
                flags[positive] = FlagValue(None)
        elif name in known.values:
            if text is None and follows:
                text, at = words[at], at + 1
            flags[name] = FlagValue(text or "", None if text else f"a value for {name}")
        elif meant.startswith("--"):
            for long in known.meant_by(meant) if named[-1] not in named[:-1] else ():
                flags[known.negated.get(long, long)] = FlagValue(
                    "", f"{long} written out in full, instead of {quoted_value(name)}"
                )
            while text is None and not _NO_VALUE.fullmatch(meant) and at < len(words) and not is_flag(words[at]):
                at += 1
        else:
            at += text is None and follows
    for name, inner in nested.items():
        # vLLM puts these behind all others, where they replace the JSON.
        unsure = f"{name} given in one form, either as JSON or with dots" if name in flags else None
        flags[name] = FlagValue(json.dumps(inner), unsure)
    return flags, models, named


def long_name(flag: str) -> str:
    """Return the long name of *flag*, without its value."""
    name = flag.partition("=")[0].partition(".")[0]
    name = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
    return _NAMES.get(name, name)


def is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] in "-" + _DASHES and not re.fullmatch(r"-\d+(\.\d+)?", word)


def _with_two_hyphens(name: str) -> str:
    return "--" + name.lstrip("-" + _DASHES).replace("_", "-")


def _nest(into: dict[str, Any], path: str, value: str) -> None:
    *outer, last = path.removesuffix("+").split(".")[:20]
    for key in outer:
        inner = into.setdefault(key, {})
        if not isinstance(inner, dict):
            inner = into[key] = {}
        into = inner
    into[last] = json_or(value, value)


def json_or(text: str, otherwise: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise
