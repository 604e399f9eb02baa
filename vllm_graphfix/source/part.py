"""The parts of vLLM's source that a verdict rests on, by name. Imported in every process of an engine."""

from typing import NamedTuple


class Slice(NamedTuple):
    """The part of a function that the defect's data pass through; `slices` takes its fingerprint."""

    path: str
    """The file, relative to the folder that holds ``vllm/``."""
    function: str
    """Function, ``Class.method`` or class; "" for the whole file."""
    names: str = ""
    """Variables, attributes, functions and keywords, separated by blanks: the statements that mention one of them are
    the slice. "" for all statements."""
    only_for: str | None = None
    """The `Verdict` that rests on it; None for each. Who reads a value does not matter where a remedy has it right."""

    @property
    def place(self) -> str:
        """Its key in the manifest, ``path::function``."""
        return f"{self.path}::{self.function}"
