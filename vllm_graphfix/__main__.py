"""`python -m vllm_graphfix` is `vllm-graphfix`."""

from vllm_graphfix.commands.cli import main

main()
