"""Runs a step that was replayed from a full CUDA graph once more without it, now and then, and compares the two.

Both runs have the same inputs.

It knows no defect; it knows what right is. Which release it can watch, and where it wraps vLLM, say `runner_v1`,
`runner_v2` and `drafter_v2`; they describe a step to `check`, which decides; `runs` runs it and puts everything back.
"""
