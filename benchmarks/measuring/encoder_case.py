"""What the cases of `image_encoder.py` are made of: images, graphs of an encoder, engines and their answers."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_graphfix.verify.engine import adapters
from vllm_graphfix.verify.engine.cases import full_decodes

EAGER = "eager"
"""The form of an engine whose encoder has no graphs."""
SIDE = 28
"""Pixels that one token of an image is wide and high."""
DECODES: Mapping[str, Any] = MappingProxyType(full_decodes([1, 2, 4, 8]))
"""The graphs of the language model, in all engines that have any."""

NORMALISED_BY_THE_HOST: Mapping[str, Any] = MappingProxyType({"mm_device_do_normalize": False})
"""What keeps `encoder-input-norm` out of another case."""

Embeddings = Sequence[float]
"""All numbers of one image's, token by token."""


@dataclass(frozen=True)
class Form:
    """The graphs that an encoder has, and what memory held before: see `image_encoder_engine.py`."""

    name: str
    memory: str
    budgets: tuple[int, ...]
    """Tokens of each graph."""
    items: int
    """Images that one graph takes at most."""

    def request(self) -> dict[str, Any]:
        """Has an engine capture these graphs."""
        return {"memory": self.memory, "budgets": self.budgets, "items": self.items}

    def config(self) -> dict[str, Any]:
        """vLLM's compilation configuration, for an engine that starts with these graphs."""
        return {
            **DECODES,
            "cudagraph_mm_encoder": True,
            "encoder_cudagraph_token_budgets": list(self.budgets),
            "encoder_cudagraph_max_vision_items_per_batch": self.items,
        }


@dataclass(frozen=True)
class Image:
    """One image, in pixels, and the name of its adapter; None: it has none."""

    width: int
    height: int
    seed: int
    adapter: str | None = None

    @property
    def tokens(self) -> int:
        return (self.width // SIDE) * (self.height // SIDE)

    @property
    def name(self) -> str:
        """No other image, nor the same with another adapter, has it."""
        return f"image {self.seed}, {self.width}x{self.height}" + (f", {self.adapter}" if self.adapter else "")

    def request(self, folder: Path) -> dict[str, Any]:
        """The image as an engine is asked for it; *folder* holds the adapters."""
        number = self.adapter and (adapters.NAMES.index(self.adapter) + 1, str(folder / self.adapter))
        return {"width": self.width, "height": self.height, "seed": self.seed, "adapter": number}


Steps = Mapping[str, tuple[Image, ...]]
"""The images that come at once, by the name of the step."""


@dataclass(frozen=True)
class Answer:
    """What an engine made of the images of one step."""

    embeddings: tuple[array[float], ...]
    answers: tuple[tuple[int, ...], ...]
    counted: dict[str, int]
    """How often the encoder was called, and how many images were encoded in a graph."""

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> Answer:
        embeddings = []
        for each in reply["embeddings"]:
            numbers = array("f")
            numbers.frombytes(each)
            embeddings.append(numbers)
        counted = {name: reply[name] for name in ("calls", "in graphs", "in none") if name in reply}
        return cls(tuple(embeddings), tuple(map(tuple, reply["answers"])), counted)


@dataclass
class Engine:
    """One engine: what it is started with, what it is asked, and what came of it."""

    name: str
    steps: Steps
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's, beside those of every engine."""
    forms: tuple[Form, ...] = ()
    """The graphs of its encoder, one form after the other; none: it has no graphs of the encoder."""
    plugin: bool = False
    before_captures: tuple[Image, ...] = ()
    """What is encoded before it captures another form of graphs."""
    answers: dict[str, dict[str, Answer]] = field(default_factory=dict)
    """By form and step."""
    found: dict[str, Any] = field(default_factory=dict)
    """What it says of itself; ``state`` by form, and ``error`` where it died."""

    @property
    def died(self) -> bool:
        return "error" in self.found


@dataclass(frozen=True)
class Case:
    """One subject: its engines, and what their answers come to."""

    fix: str
    engines: Callable[[Sequence[str]], Iterable[Engine]]
    """Made anew for each vLLM and model runner; given --memories."""
    judge: Callable[[Mapping[str, Engine]], dict[str, Any]]
    """The findings, of all engines by name."""
    is_wrong: Callable[[Mapping[str, Any]], bool]
    """Whether findings, with ``expected`` among them, make the exit code 1."""
    shows_on_stock: Callable[[Sequence[str]], bool] = lambda _: False
    """Whether stock has to be wrong on an affected release, and right on others; given --memories.

    Where it has not, ``expected`` is None."""
    where_known: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of every engine, where vLLM has them."""
    write: Callable[[Path], None] | None = None
    """Writes what its engines need into a folder that holds the model; called where torch is."""


def distance(found: Embeddings, other: Embeddings) -> float:
    """How far two images' embeddings are from each other, by the length of the second; infinite with NaN."""
    if len(found) != len(other) or any(map(math.isnan, found)):
        return math.inf
    squares = sum((one - another) ** 2 for one, another in zip(found, other, strict=True))
    return math.sqrt(squares / (sum(each * each for each in other) or 1.0))
