"""Finished blocks that have changed, as the log, the records and a reason to end requests describe them."""

from __future__ import annotations

from typing import NamedTuple

from vllm_graphfix.marks.ledger import Block


class ForeignWrite(NamedTuple):
    """A finished block that has changed."""

    block: Block
    layers: tuple[str, ...]
    """The marked layers in whose caches it differs."""
    before: int
    """The last step before which it was as marked."""
    after: int
    """The first step before which it was not."""
    steps: int
    """Steps of requests in between."""
    idle: int
    """Steps without requests in between, in which a rank keeps the others company."""

    def sentence(self, *, named: bool = False) -> str:
        """Describe it; *named*: with the name of the request, which a client may have chosen."""
        of = f"request {ascii(self.block.request)[1:-1][:80]}" if named else "its request"
        more = f" and {len(self.layers) - 1} more layers" if len(self.layers) > 1 else ""
        return (
            f"block {self.block.number} of cache group {self.block.group} has changed although it was finished (block "
            f"{self.block.place} of {of}), in {self.layers[0]}{more}; "
            f"between steps {self.before} and {self.after} of this rank: {self.ran()}"
        )

    def ran(self) -> str:
        """Count the steps that could have written it, by kind."""
        return f"{self.steps} with requests, {self.idle} of a rank without work"
