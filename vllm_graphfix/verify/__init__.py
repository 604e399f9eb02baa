"""Proof on this machine that each fix removes its defect from vLLM's own classes.

Stock and patched runs are compared with the same run without CUDA graphs.
"""


class VerifyError(Exception):
    """The proof could not be carried out; the message says what to do."""
