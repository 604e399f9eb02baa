"""Proof on this machine: each fix's defect on vLLM's own classes, stock and patched, against the same without CUDA graphs."""


class VerifyError(Exception):
    """The proof could not be carried out; the message says what to do."""
