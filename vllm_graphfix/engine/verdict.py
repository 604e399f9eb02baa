"""Verdicts of detectors on requests and cache blocks, as they are sent to the scheduler."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import NamedTuple

from vllm_graphfix.engine.abort_channel import MOST_BYTES
from vllm_graphfix.marks import process as marks
from vllm_graphfix.settings.json_object import JsonError, JsonObject
from vllm_graphfix.shadow import process as shadow

DETECTORS = (shadow.NAME, marks.NAME)
"""Detectors whose verdicts end requests; these are counted as their events."""
_KINDS = ("=", "#")
LONGEST_NAME = 256
"""Characters of a request's name that is not sent as a digest. At twelve bytes each in JSON, a name and a reason fit
one message."""


class Verdict(NamedTuple):
    """Requests that must end, and blocks that no request may read any more."""

    detector: str
    requests: tuple[str, ...]
    """``=`` and the name, or ``#`` and the digest of a long name: a client may have chosen it."""
    blocks: tuple[int, ...]
    why: str

    def encode(self) -> bytes:
        return json.dumps(self._asdict(), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, message: bytes) -> Verdict:
        """Return the verdict in *message*. Raises JsonError."""
        try:
            fields = JsonObject(json.loads(message), "a verdict")
        except (ValueError, RecursionError) as error:
            raise JsonError(str(error)) from None
        requests, blocks = fields.get("requests"), fields.get("blocks")
        if not isinstance(requests, list) or not all(isinstance(each, str) and each[:1] in _KINDS for each in requests):
            fields.refuse("requests")
        if not isinstance(blocks, list) or not all(type(each) is int and each > 0 for each in blocks):
            fields.refuse("blocks")
        return cls(fields.one_of("detector", DETECTORS), tuple(requests), tuple(blocks), fields.text("why"))

    def parts(self) -> Iterator[Verdict]:
        """Yield this verdict in parts that fit one message each."""
        size = len(self.requests) + len(self.blocks)
        if size <= 1 or len(self.encode()) <= MOST_BYTES:
            yield self
            return
        requests, blocks = len(self.requests) // 2, -(-len(self.blocks) // 2)
        yield from self._replace(requests=self.requests[:requests], blocks=self.blocks[:blocks]).parts()
        yield from self._replace(requests=self.requests[requests:], blocks=self.blocks[blocks:]).parts()


def reference(name: str) -> str:
    """Return the form in which a verdict refers to the request *name*."""
    return f"={name}" if len(name) <= LONGEST_NAME else f"#{digest(name)}"


def digest(name: str) -> str:
    """Return the digest by which a verdict refers to a request with a long name."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


class CannotDeliverError(OSError):
    """The scheduler cannot be told of a verdict, for the reason in the text."""


def failure_text(error: OSError) -> str:
    """Return the reason for which a verdict was not delivered, from the *error* of its delivery."""
    why = str(error) if isinstance(error, CannotDeliverError) else error.strerror or type(error).__name__
    return f"the scheduler of this rank cannot be told: {why}"
