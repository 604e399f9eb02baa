"""`python -m vllm_graphfix` is `vllm-graphfix`."""

from vllm_graphfix.cli import main

main()
