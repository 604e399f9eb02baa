"""The shadow check: now and then, run a step that a full CUDA graph replayed once more without the graph, and compare.

Both runs have the same inputs. The check knows no defect; it compares graphs with eager execution. `runner_v1`,
`runner_v2` and `drafter_v2` diagnose the releases that it supports, wrap vLLM, and describe a step to `check`. `runs`
runs the step and restores everything; `judge` decides whether the replay was wrong.
"""
