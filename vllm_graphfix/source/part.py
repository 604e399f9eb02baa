"""Names of the parts of vLLM's source that a verdict rests on. Imported in every process of an engine."""

from typing import NamedTuple


def module_name(path: str) -> str:
    """Return the dotted name of the module in the file *path*, which is relative to the folder that holds ``vllm/``."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Slice(NamedTuple):
    """The statements of a function that the defect's data pass through; `slices` takes their fingerprint."""

    path: str
    """The file, relative to the folder that holds ``vllm/``."""
    function: str
    """Function, ``Class.method`` or class; "" for the whole file."""
    names: str = ""
    """Variables, attributes, functions and keywords, separated by blanks: the slice is the statements that mention one
    of them. "" for all statements. ``return`` adds the exits before the first of them, for a step of a remedy."""
    only_for: str | None = None
    """The `Verdict` that rests on it; None for each. Readers of a value do not matter where a remedy corrects it."""

    @property
    def place(self) -> str:
        """Its key in the manifest, ``path::function``."""
        return f"{self.path}::{self.function}"
