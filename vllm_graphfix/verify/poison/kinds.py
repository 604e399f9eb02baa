"""Kinds of poison and a note on them, for modules that must not import torch."""

ROWS, NULL, BLOCKS, MEMORY = KINDS = ("padded rows", "null block", "unused blocks", "freed memory")
NAN_IN_NULL_BLOCK = "the engine itself has left NaN in the null block"
"""The beginning of a rank's note; NaN that a kernel multiplies by 0 is then harmful."""
