"""Writes deploy/prometheus/prometheus-rule.yaml, the rules as an object of the Prometheus Operator.

The rules stay what they are, with their comments: they stand under `spec`.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "deploy" / "prometheus"
RULES = FOLDER / "vllm-graphfix.rules.yml"
TARGET = FOLDER / "prometheus-rule.yaml"

HEAD = f"""\
# Made from {RULES.name} by tools/{Path(__file__).name}.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: vllm-graphfix
spec:
"""


def text() -> str:
    """Return the text of the file."""
    return HEAD + textwrap.indent(RULES.read_text(), "  ")


if __name__ == "__main__":
    TARGET.write_text(text())
