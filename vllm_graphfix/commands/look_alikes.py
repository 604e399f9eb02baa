"""Defects of stock vLLM that look like those of CUDA graphs and that no fix corrects, where flags decide on them.

Each is a row of docs/looked-at.md that is established and gives wrong answers, or is reported with a run. The others
there depend on timing, on requests or on what was not decided.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from vllm_graphfix import manifest
from vllm_graphfix.deployment import Answer, Concern, Deployment, Fact
from vllm_graphfix.deployment.line import json_or
from vllm_graphfix.deployment.model import GATED_DELTA_NETS, MAMBA, OTHER_RECURRENT
from vllm_graphfix.deployment.needs import DRAFTS, FP8_CACHE, RUNNER_V1, Need, judge
from vllm_graphfix.source.files import Source
from vllm_graphfix.text import PAGES


class LookAlike(NamedTuple):
    """One defect that this plugin does not correct."""

    title: str
    """The heading in docs/looked-at.md."""
    seen: str
    releases: tuple[tuple[str, str], ...]
    """The first and last stock release of each range that has it."""
    needs: tuple[Need, ...]
    remedy: str

    @property
    def page(self) -> str:
        """The address of its section."""
        return f"{PAGES}/looked-at.md#{re.sub(r'[^a-z0-9-]', '', self.title.lower().replace(' ', '-'))}"

    def as_json(self, answer: Answer) -> dict[str, str]:
        """Return it as an entry of `not_corrected` in the JSON of `status`."""
        concern = {"answer": answer.concern.value, "reason": answer.reason}
        return {"name": self.title, "seen": self.seen, **concern, "remedy": self.remedy, "page": self.page}

    def sentence(self, answer: Answer) -> str:
        """Name it to the user of a deployment for which *answer* was given."""
        condition = f" if {' and '.join(answer.undecided)}" if answer.concern is Concern.UNKNOWN else ""
        return f"Not corrected by this plugin{condition}: {self.seen}. Instead: {self.remedy} ({self.page})"


def _gated_delta_nets(deployment: Deployment, _: str) -> Fact:
    return deployment.with_layers(GATED_DELTA_NETS, (MAMBA | OTHER_RECURRENT) - GATED_DELTA_NETS, "gated delta nets")


_GATED_DELTA_NETS = Need("gated delta nets", _gated_delta_nets, clause="the model has gated delta nets")


def _simple_connector(deployment: Deployment, _: str) -> Fact:
    value, missing = deployment.value("--kv-transfer-config")
    config = json_or(value or "", None)
    holds = isinstance(config, dict) and config.get("kv_connector") == "SimpleCPUOffloadConnector"
    return Fact(holds if missing is None else None, missing or "--kv-transfer-config")


LOOK_ALIKES = (
    LookAlike(
        "N-gram drafts on gated delta nets",
        "answers corrupted by n-gram drafts, with --enforce-eager, too",
        (("0.14.1", "0.16.0"), ("0.18.0", "0.31.0")),
        (
            Need(
                "n-grams", lambda deployment, _: deployment.speculator("ngram", "[ngram]"), clause="drafts are n-grams"
            ),
            _GATED_DELTA_NETS,
        ),
        "0.32.0, or drafts of another kind",
    ),
    LookAlike(
        "Copies that nobody waits for",
        "answers garbled under load by SimpleCPUOffloadConnector, with --enforce-eager, too",
        (("0.19.0", "0.33.0"),),
        (Need("SimpleCPUOffloadConnector", _simple_connector),),
        "OffloadingConnector, or none",
    ),
    LookAlike(
        "Scales of an fp8 cache after sleep",
        "answers less accurate after wake_up if the checkpoint has scales of the KV cache, with --enforce-eager, too",
        (("0.14.1", "0.28.0"),),
        (
            Need("sleep mode", lambda deployment, _: deployment.switched_on("--enable-sleep-mode"), clause="it sleeps"),
            FP8_CACHE,
            RUNNER_V1,
        ),
        "0.29.0, model runner V2, or load the scales again after each wake_up",
    ),
    LookAlike(
        "Drafts in piecewise graphs",
        "an illegal memory access of gated delta nets with drafts under cudagraph_mode PIECEWISE, as reported of MTP",
        (("0.14.1", "0.33.0"),),
        (
            Need(
                "cudagraph_mode PIECEWISE",
                lambda deployment, _: deployment.piecewise_decodes(),
                clause="decodes run in piecewise graphs",
            ),
            _GATED_DELTA_NETS,
            DRAFTS,
            RUNNER_V1,
        ),
        "full graphs with this plugin, or --enforce-eager",
    ),
)


def look_alikes_of(source: Source, deployment: Deployment) -> list[tuple[LookAlike, Answer]]:
    """Return the defects that *deployment* has, or may have by what is known of it.

    None if *source* has no stock release's version: these are judged by the version alone.
    """
    releases = manifest.releases()
    if source.version not in releases:
        return []
    place = releases.index(source.version)
    likely = []
    for each in LOOK_ALIKES:
        if not any(releases.index(first) <= place <= releases.index(last) for first, last in each.releases):
            continue
        answer = judge(each.needs, deployment, "")
        facts = [need.fact(deployment, "") for need in each.needs]
        is_likely = answer.concern is Concern.UNKNOWN and any(fact is not None and fact.holds for fact in facts)
        if answer.concern is Concern.CONCERNS or is_likely:
            likely.append((each, answer))
    return likely
