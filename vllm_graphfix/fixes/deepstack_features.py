"""`deepstack-features`: language models are compiled with the inputs for features of images (PR 43617)."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Diagnosis, Event, Patch, Slice, StockFunction, Verdict
from vllm_graphfix.source.part import module_name

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_MODELS = (
    ("vllm/model_executor/models/qwen3_vl.py", "Qwen3VLForConditionalGeneration"),
    ("vllm/model_executor/models/qwen3_omni_moe_thinker.py", "Qwen3OmniMoeThinkerForConditionalGeneration"),
)
_GET = "_get_deepstack_input_embeds"
_BUFFERS, _HELD = "deepstack_input_embeds", "deepstack_input_embeds_num_tokens"
_HANDED_ON = "return IntermediateTensors({...: self.deepstack_input_embeds[idx][:num_tokens] for idx in ...})"
_NOTHING_HELD = "if getattr(self, 'deepstack_input_embeds_num_tokens', 0) == 0:\n    return None"
_NO_BUFFERS = "if not getattr(self, 'deepstack_input_embeds', None):\n    return None"
_ARCHITECTURES = frozenset(
    """ColQwen3 OpsColQwen3Model Qwen3OmniMoeForConditionalGeneration Qwen3VLForConditionalGeneration
    Qwen3VLMoeForConditionalGeneration Qwen3VLNemotronEmbedModel""".split()
)
"""Architectures that vLLM serves with these models, and that have such features."""

FEATURES_DROPPED = Event(
    "image-features-dropped",
    "A step had features of images for the layers of a language model that was compiled without them: on stock its "
    "compiled code leaves them out.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find a model that passes no tensors on while it has no features, as in the run in which it is compiled."""
    each = (source.function(path, f"{model}.{_GET}") for path, model in _MODELS)
    getters = [get for get in each if get is not None]
    if len(getters) == len(_MODELS) and all(get.find_unique(_HANDED_ON) for get in getters):
        if all(map(_may_be_none, getters)):
            return Diagnosis.affected(
                "a batch without images passes no features on, and the first one is what is compiled",
                getters[0].at(getters[0].find(_NOTHING_HELD)[0]),
                "none-without-images",
            )
        if all(map(_is_always_handed_on, getters)):
            return Diagnosis.fixed("every batch passes features on, of zeros if it has none", getters[0].where)
    place = getters[0] if getters else _MODELS[0][0]
    return Diagnosis.unrecognised("features of images are passed on in a way", place)


def _may_be_none(get: Function) -> bool:
    return get.find_unique(_NOTHING_HELD) is not None and len(get.find("return None")) == 2


def _is_always_handed_on(get: Function) -> bool:
    """Tell if only a model without buffers passes no tensors on."""
    return get.always(_HANDED_ON, _NO_BUFFERS) and not get.find(_NOTHING_HELD)


def _always_hand_on(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `_get_deepstack_input_embeds(self, num_tokens)`, which a model calls in each step before its layers.

    Stock passes features on if it holds those of some tokens, and clears them after the step. The buffers are zero
    behind these, so that it may hold as many tokens as the batch has, with padding, in every step. Then it also clears
    them in each step, and in each graph of the whole model.
    """
    met, corrects = activity.counter(FEATURES_DROPPED), activity.corrects
    first_without: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # by model: code is compiled at its first call

    @functools.wraps(stock)
    def get(self: Any, num_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if getattr(self, _BUFFERS, None):
                held = getattr(self, _HELD, 0)
                if corrects:
                    if self not in first_without:
                        _renew(self)
                    if _runs_in_micro_batches():
                        # Each micro-batch is given the first rows: features of another's. Without, as on stock.
                        for each in self.deepstack_input_embeds:
                            each.zero_()
                    if held < num_tokens:
                        _grow(self, num_tokens)
                        setattr(self, _HELD, num_tokens)
                compiles = not getattr(self.language_model.model, "do_not_compile", False)
                if first_without.setdefault(self, not held) and held and compiles:
                    met.count += 1
        except Exception as error:
            activity.failed(error)
        return stock(self, num_tokens, *args, **kwargs)

    return get


def _renew(model: Any) -> None:
    """Give *model* buffers of the language model's device, before it is compiled or captured.

    Without a tower for images they are on the meta device; and sleep mode, which discards what was made while weights
    were loaded, leaves such memory undefined when it wakes up.
    """
    from torch import inference_mode, zeros_like

    with inference_mode(False):  # as the ones that they replace, they may be written to outside of it, too
        model.deepstack_input_embeds = [
            zeros_like(each, device=next(model.language_model.parameters()).device) if each.is_meta else each.clone()
            for each in model.deepstack_input_embeds
        ]


def _runs_in_micro_batches() -> bool:
    """Tell if the model is called for one micro-batch of a step (--enable-dbo)."""
    ubatching = sys.modules.get("vllm.v1.worker.ubatching")
    return ubatching is not None and ubatching.dbo_enabled()


def _grow(model: Any, num_tokens: int) -> None:
    """Let the buffers of *model*, (tokens, size) each, have room for a padded batch that is larger than any other."""
    missing = num_tokens - model.deepstack_input_embeds[0].size(0)
    if missing > 0:
        from torch import cat

        buffers = model.deepstack_input_embeds
        model.deepstack_input_embeds = [cat([each, each.new_zeros(missing, each.size(1))]) for each in buffers]


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment.needs import TORCH_COMPILE, Need

    return (
        Need(
            "Qwen3-VL or Qwen3-Omni",
            _serves_such_a_model,
            "ColQwen3, too",
            clause="the model is Qwen3-VL or Qwen3-Omni",
        ),
        TORCH_COMPILE,
        Need(
            "images or videos",
            _takes_images,
            "no --language-model-only",
            (_NO_IMAGES,),
            clause="requests bring images or videos",
        ),
    )


_NO_IMAGES = "--language-model-only"


def _serves_such_a_model(deployment: Deployment, _: str) -> Fact:
    """Tell if the model has features of images for its first layers."""
    is_one = "Qwen3-VL, Qwen3-Omni or ColQwen3"
    return deployment.has_architecture(_ARCHITECTURES, is_one, "neither Qwen3-VL nor Qwen3-Omni")


def _takes_images(deployment: Deployment, _: str) -> Fact:
    from vllm_graphfix.deployment import Fact

    without = deployment.switched_on(_NO_IMAGES)
    return Fact(None if without.holds is None else not without.holds, without.source)


FIX = fix(
    "deepstack-features",
    diagnose=diagnose,
    surroundings=(
        *(
            part
            for path, model in _MODELS
            for part in (
                Slice(path, f"{model}.{_GET}"),
                Slice(path, f"{model}._resize_deepstack_input_embeds"),
                Slice(path, f"{model}.forward", f"{_BUFFERS} {_GET}"),
                # Who fills, counts and clears the buffers, and the layers that add the features
                Slice(
                    path,
                    "",
                    f"{_BUFFERS} {_HELD} {_GET} _set_deepstack_input_embeds _clear_deepstack_input_embeds",
                    Verdict.AFFECTED,
                ),
            )
        ),
        Slice("vllm/model_executor/models/qwen3_vl_moe.py", "", f"{_BUFFERS} {_HELD}", Verdict.AFFECTED),
    ),
    recognised=(_HANDED_ON, _NOTHING_HELD, _NO_BUFFERS),
    corrections=tuple(Patch(module_name(path), f"{model}.{_GET}", _always_hand_on) for path, model in _MODELS),
    events=(FEATURES_DROPPED,),
    needs=needs,
    default_rationale="answers",
    changes_compiled_code=True,
)
