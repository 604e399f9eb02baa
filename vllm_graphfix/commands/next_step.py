"""The ways out for a deployment that has a defect: the plugin, another release, other flags, each with its price."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from vllm_graphfix import manifest
from vllm_graphfix.commands.look_alikes import look_alikes_of
from vllm_graphfix.deployment import Answer, Concern, Deployment, needs
from vllm_graphfix.deployment.secrets import without_secrets
from vllm_graphfix.fix import Diagnosis, Fix, Verdict
from vllm_graphfix.fixes import FIXES, about
from vllm_graphfix.source.files import Source, stock_release

_V2 = "VLLM_USE_V2_MODEL_RUNNER"
_DRAFTS = ("--speculative-config", "--spec-method", "--spec-model", "--spec-tokens")


class _Change(NamedTuple):
    """A change of the command line that may avoid a defect."""

    text: str
    names: tuple[str, ...]
    """Flags and variables that get another value."""
    value: object
    """None removes them; a dictionary is merged into a JSON object."""
    price: str


_CHANGES = (
    _Change("no --specialize-active-lora", ("--specialize-active-lora",), None, "kernels run for all adapters"),
    _Change("--kv-cache-dtype auto", ("--kv-cache-dtype",), "auto", "the KV cache holds half as many tokens"),
    _Change("no --enable-dbo", ("--enable-dbo",), None, "communication of experts does not overlap"),
    _Change(
        "-cc.cudagraph_mm_encoder=false",
        ("--compilation-config",),
        {"cudagraph_mm_encoder": False},
        "images are encoded at the speed without graphs",
    ),
    _Change(
        "-cc.cudagraph_mode=FULL_DECODE_ONLY",
        ("--compilation-config",),
        {"cudagraph_mode": "FULL_DECODE_ONLY"},
        "steps with prompts run without graphs",
    ),
    _Change(f"{_V2}=0", (_V2,), "0", "without the gains of model runner V2"),
    _Change("no --enable-prefix-caching", ("--enable-prefix-caching",), None, "shared prefixes are computed anew"),
    _Change("no speculative decoding", _DRAFTS, None, "one token a step"),
    _Change(
        "-cc.cudagraph_mode=PIECEWISE",
        ("--compilation-config",),
        {"cudagraph_mode": "PIECEWISE"},
        "decodes at a sixth to two fifths of the speed of full graphs, as measured",
    ),
    _Change(
        "--enforce-eager",
        ("--enforce-eager",),
        "",
        "decodes at an eighth to a fifth of the speed of full graphs, as measured",
    ),
)
"""By their price, the lowest first; prices of graph modes as in docs/performance.md."""


def answer_to(fix: Fix, diagnosis: Diagnosis, deployment: Deployment) -> Answer:
    """Answer if the defect of *fix* can show in *deployment*, on a vLLM with this *diagnosis*."""
    # A diagnosis `fixed` with a shape has open cases, and the fix's needs tell which deployments have them.
    is_open = diagnosis.verdict is Verdict.FIXED and diagnosis.shape
    if diagnosis.verdict in (Verdict.FIXED, Verdict.ABSENT) and not is_open:
        return Answer(Concern.DOES_NOT, f"this vLLM does not have the defect: {diagnosis.reason}")
    answer = needs.judge(fix.needs(), deployment, diagnosis.shape)
    # The address of a model may have a password in it.
    reason, *missing = map(without_secrets, (answer.reason, *answer.missing))
    answer = answer._replace(reason=reason, missing=tuple(missing))
    if is_open and answer.concern is Concern.CONCERNS:
        return Answer(Concern.UNKNOWN, f"a run of such an engine: {diagnosis.reason}")
    if diagnosis.verdict is Verdict.UNRECOGNISED and answer.concern is Concern.CONCERNS:
        return Answer(Concern.UNKNOWN, f"a person who reads the code: {diagnosis.reason}")
    return answer


def _is_free(
    source: Source, diagnoses: Iterable[tuple[Fix, Diagnosis]], deployment: Deployment, look_alikes: Sequence[str]
) -> bool:
    """Tell if no defect can show in *deployment*: none of the *diagnoses*, and no look-alike but *look_alikes*."""
    answers = (answer_to(fix, diagnosis, deployment) for fix, diagnosis in diagnoses)
    return all(answer.concern is Concern.DOES_NOT for answer in answers) and all(
        title in look_alikes for title in _titles(source, deployment)
    )


def _titles(source: Source, deployment: Deployment) -> list[str]:
    return [look_alike.title for look_alike, _ in look_alikes_of(source, deployment)]


def _unless(is_free: Callable[[Deployment], bool], deployment: Deployment) -> str:
    """Name the model runner with which *deployment* is not free, if its line chooses none.

    The variable may be set in the image or the pod, of which the line says nothing.
    """
    if deployment.setting(_V2) is not None:
        return ""
    values = [value for value in ("0", "1") if not is_free(deployment.changed((_V2,), value))]
    return f", unless {_V2}{f'={values[0]}' if len(values) == 1 else ''} is set" if values else ""


def upgrade(source: Source, deployment: Deployment) -> str:
    """Name the next stock releases in which no defect can show in *deployment*, or say that none is recorded."""
    version = re.match(r"\d+(\.\d+)+", source.version or "")
    if version is None:
        return "unknown: the version of this vLLM cannot be read"
    here = [int(part) for part in version[0].split(".")]
    later = [release for release in manifest.releases() if [int(part) for part in release.split(".")] > here]
    before = _titles(source, deployment)

    def is_free(changed: Deployment, release: str) -> bool:
        stock = stock_release(release)
        diagnoses = ((fix, manifest.diagnose(fix, stock)) for fix in FIXES)
        return _is_free(stock, diagnoses, changed.on(stock), before)

    free = [is_free(deployment, release) for release in later]
    if True not in free:
        newest = f" to {later[-1]}" if later else ""
        return f"no later release{newest} is judged free of all known defects under these flags"
    first = free.index(True)
    last = next((at for at in range(first, len(free)) if not free[at]), len(free)) - 1
    unless = _unless(lambda each: all(is_free(each, release) for release in later[first : last + 1]), deployment)
    if last == len(free) - 1:
        return f"{later[first]} or later (judged to {later[-1]}){unless}"
    free_ones = later[first] if first == last else f"any of {later[first]} to {later[last]}"
    return f"{free_ones}{unless}; {later[last + 1]} is not judged free of all known defects under these flags"


def other_flags(source: Source, diagnoses: Sequence[tuple[Fix, Diagnosis]], deployment: Deployment) -> str:
    """Name the cheapest change of flags after which none of the *diagnoses* concerns *deployment*, and its price."""
    before = _titles(source, deployment)

    def is_free(changed: Deployment) -> bool:
        return _is_free(source, diagnoses, changed, before)

    for change in _CHANGES:
        changed = deployment.changed(change.names, change.value)
        if is_free(changed):
            return f"{change.text} ({change.price}){_unless(is_free, changed)}"
    return "no single flag avoids all of them: `vllm-graphfix explain FIX` has a workaround for each"


def may_be_stored(fix: Fix) -> bool:
    """Return True if a cache that outlives the engine may hold wrong entries after this defect."""
    return not about(fix).in_caches.startswith(("nothing", "none"))
