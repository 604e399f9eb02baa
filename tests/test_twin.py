"""Twins of models: what is reduced, what stays, and what each reduction may hide."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import check_compare, report
from vllm_graphfix.commands.compare import CompareError
from vllm_graphfix.commands.compare import twin as fitting
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.verify.engine import twin
from vllm_graphfix.verify.engine.reduction import REDUCTIONS, Change, Plan, narrowed, reduced

CONFIGS = Path(__file__).parent / "configs"
EIGHT_RANKS_TO_ONE = (8, 1)


def config(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return read


def reduce(name: str, ranks: tuple[int, int] = (1, 1), **sizes: Any) -> dict[str, Any]:
    return reduced(config(name), {}, lambda section: Plan(section, ranks, **sizes))[0]


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        (
            "deepseek-v3.1",
            EIGHT_RANKS_TO_ONE,
            {"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 16, "n_routed_experts": 16}
            | {"num_nextn_predict_layers": 1, "moe_intermediate_size": 256, "kv_lora_rank": 512, "topk_group": 4},
        ),
        (
            "qwen3-235b-a22b",
            EIGHT_RANKS_TO_ONE,
            {"num_attention_heads": 8, "num_key_value_heads": 1, "moe_intermediate_size": 192, "num_experts": 16},
        ),
        (
            "gpt-oss-120b",
            (1, 1),
            {"layer_types": ["sliding_attention", "full_attention"], "hidden_size": 448, "sliding_window": 128}
            | {"num_attention_heads": 16, "num_key_value_heads": 2, "num_local_experts": 8},
        ),
        ("nemotron-h-8b", (1, 1), {"hybrid_override_pattern": "M-M-M-M*", "mamba_num_heads": 16, "n_groups": 8}),
        (
            "kimi-linear-48b-a3b",
            (1, 1),
            {"num_hidden_layers": 4, "num_experts": 16, "first_k_dense_replace": 1, "num_attention_heads": 32},
        ),
        ("jamba-mini", (1, 1), {"num_hidden_layers": 8, "attn_layer_offset": 4, "hidden_size": 1024}),
        ("mamba-codestral-7b", (1, 1), {"num_heads": 16, "head_dim": 64, "hidden_size": 512, "n_groups": 8}),
        ("falcon-h1-7b", (1, 1), {"mamba_n_heads": 4, "mamba_d_ssm": 512, "num_attention_heads": 12}),
        ("llama-3.1-8b", (8, 2), {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 2048}),
        ("qwen3-next-80b-a3b", (1, 1), {"num_hidden_layers": 4, "num_experts": 20, "linear_num_key_heads": 16}),
        ("qwen3-next-80b-a3b", (8, 8), {"num_attention_heads": 16, "num_key_value_heads": 2}),
    ],
)
def test_a_twin_has_the_shares_of_one_rank_and_each_kind_of_layer(
    name: str, ranks: tuple[int, int], expected: dict[str, Any]
) -> None:
    made = reduce(name, ranks)
    assert {key: made[key] for key in expected} == expected


def test_layers_with_windows_may_have_more_key_value_heads() -> None:
    section = {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "num_hidden_layers": 48}
    section |= {"swa_num_attention_heads": 64, "swa_num_key_value_heads": 8}
    made = reduced(section, {}, Plan)[0]
    assert (made["num_attention_heads"], made["num_key_value_heads"]) == (32, 2)
    assert (made["swa_num_attention_heads"], made["swa_num_key_value_heads"]) == (32, 4)


@pytest.mark.parametrize(
    ("config", "saved", "expected"),
    [
        ({}, "layers.0.hc_pre.hc_attn_layer.hc_fn", ["layers.0.hc_attn_layer.hc_pre.hc_fn"]),
        ({}, "model.hc_pre.hc_head.hc_head_fn", ["model.hc_head.hc_head_fn"]),
        ({}, "model.hc_head.hc_fn", ["model.hc_head_fn"]),
        ({}, "layers.0.attn.norm.weight", ["layers.0.attn.kv_norm.weight"]),
        ({"zero_expert_num": 2, "n_routed_experts": 4}, "mlp.experts.3.w", ["mlp.experts.3.w"]),
        ({"zero_expert_num": 2, "n_routed_experts": 4}, "mlp.experts.4.w", []),
    ],
)
def test_weights_have_the_names_that_vllm_loads(config: dict[str, Any], saved: str, expected: list[str]) -> None:
    import torch

    assert list(twin._as_vllm_loads({saved: torch.ones(1)}, config)) == expected


def test_a_norm_that_vllm_loads_but_does_not_run_is_there() -> None:
    import torch

    norm = "model.layers.0.post_attention_layernorm.weight"
    config = {"model_type": "axk1", "first_k_dense_replace": 1}
    assert "model.layers.0.post_mlp_layernorm.weight" in twin._as_vllm_loads({norm: torch.ones(1)}, config)


def test_the_sections_of_a_model_of_images_are_reduced_alone() -> None:
    made = reduce("llama-4-scout")
    assert made["text_config"]["no_rope_layers"] == [1, 1, 1, 0]
    assert made["text_config"]["num_hidden_layers"] == 4
    assert made["vision_config"]["num_hidden_layers"] == 2
    assert made["vision_config"]["hidden_size"] == 1408


def test_layers_that_are_numbered_are_those_that_are_there() -> None:
    linear = reduce("kimi-linear-48b-a3b")["linear_attn_config"]
    assert linear["full_attn_layers"] == [4]
    assert linear["kda_layers"] == [1, 2, 3]


def test_tokens_with_a_meaning_are_in_the_smaller_vocabulary_and_differ() -> None:
    made = reduce("llama-4-scout")
    text = made["text_config"]
    tokens = [made["image_token_index"], text["bos_token_id"], *text["eos_token_id"]]
    assert len(set(tokens)) == len(tokens)
    assert max(tokens) < text["vocab_size"]


def test_expert_parallelism_leaves_experts_whole() -> None:
    assert reduce("qwen3-235b-a22b", EIGHT_RANKS_TO_ONE, whole_experts=True)["moe_intermediate_size"] == 256


@pytest.mark.parametrize(("size", "most", "expected"), [(7168, 512, 512), (2880, 512, 448), (192, 256, 192), (2, 9, 2)])
def test_a_width_keeps_its_alignment_and_gains_none(size: int, most: int, expected: int) -> None:
    assert narrowed(size, most) == expected


def test_what_a_reduction_may_hide_is_a_fix_or_has_a_reason() -> None:
    whys = [(each.hides, each.why) for each in REDUCTIONS]
    whys += [(hides, why) for _, hides, why in fitting._FITTED.values()]
    for hides, why in whys:
        assert set(hides) <= BY_NAME.keys()
        assert why


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., fitting.FittedTwin]:
    """`fit` without weights, on a machine with two GPUs."""

    def make(config: dict[str, Any], folder: Path, plan: Any) -> twin.Twin:
        return twin.Twin(folder, *reduced(config, {}, plan), linear={"layers.0.q_proj.weight": (16, 16)})

    monkeypatch.setattr(twin, "make", make)
    monkeypatch.setattr(fitting, "_devices", lambda: 2)
    return lambda name, *flags: fitting.fit(str(CONFIGS / f"{name}.json"), flags, tmp_path)


def after(made: fitting.FittedTwin, flag: str) -> str:
    """Return the last value of *flag*, which is the one that counts."""
    return made.flags[len(made.flags) - made.flags[::-1].index(flag)]


def test_ranks_are_as_many_as_gpus_and_the_flags_before_them_stay(fit: Callable[..., fitting.FittedTwin]) -> None:
    made = fit("llama-3.1-8b", "-tp=8", "-dp", "4", "-dcp", "4", "--load-format", "runai_streamer")
    assert made.flags[:6] == ("-tp=8", "-dp", "4", "-dcp", "4", "--load-format")
    assert after(made, "--tensor-parallel-size") == "2"
    assert after(made, "--decode-context-parallel-size") == "2"
    assert after(made, "--data-parallel-size") == "1"
    assert after(made, "--load-format") == "auto"
    assert after(made, "--tokenizer") == str(made.folder)
    assert Change("--tensor-parallel-size", "8", "2", (), fitting._OF_RANKS) in made.changes
    assert "idle-rank" in next(line for line in made.lines() if "--data-parallel-size" in line)


def test_stages_stay_where_there_are_gpus_for_them(fit: Callable[..., fitting.FittedTwin]) -> None:
    assert not any("pipeline" in flag for flag in fit("llama-3.1-8b", "-pp", "2").flags)
    assert after(fit("llama-3.1-8b", "-tp", "2", "-pp", "2"), "--pipeline-parallel-size") == "1"


def test_overrides_of_the_config_come_before_the_reduction(fit: Callable[..., fitting.FittedTwin]) -> None:
    made = fit("llama-3.1-8b", "--hf-overrides", '{"vocab_size": 1000}')
    assert after(made, "--hf-overrides") == "{}"
    assert not any(change.key == "vocab_size" for change in made.changes)


@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_drafts_that_need_no_model_stay(fit: Callable[..., fitting.FittedTwin], method: str) -> None:
    drafts = json.dumps({"method": method, "num_speculative_tokens": 3})
    assert fit("deepseek-v3.1", "--speculative-config", drafts).flags.count("--speculative-config") == 1


def test_a_draft_model_has_a_twin_of_its_own(fit: Callable[..., fitting.FittedTwin], tmp_path: Path) -> None:
    drafts = {"model": str(CONFIGS / "llama-3.1-8b.json"), "method": "draft_model", "num_speculative_tokens": 3}
    made = fit("qwen3-235b-a22b", "-tp", "8", f"--speculative-config={json.dumps(drafts)}")
    assert json.loads(after(made, "--speculative-config")) == drafts | {
        "model": str(tmp_path / "draft"),
        "revision": None,
    }
    assert any(change.key == "draft num_hidden_layers" for change in made.changes)


def test_an_eagle_head_has_the_sizes_of_its_target(fit: Callable[..., fitting.FittedTwin]) -> None:
    """Also where it is named by the target's own config.json, which is no reason to take the target for the head."""
    drafts = {"model": str(CONFIGS / "llama-3.1-8b.json"), "method": "eagle", "num_speculative_tokens": 3}
    made = fit("llama-3.1-8b", "-tp", "8", "--speculative-config", json.dumps(drafts))
    folder = json.loads(after(made, "--speculative-config"))["model"]
    head = json.loads(Path(folder, "config.json").read_text())
    assert (head["num_hidden_layers"], head["head_dim"]) == (1, 128)
    sizes = {change.key: change.after for change in made.changes}
    assert {"hidden_size", "num_attention_heads"} <= sizes.keys()
    assert all(head[key] == sizes[key] for key in ("hidden_size", "num_attention_heads"))


def test_a_draft_model_of_an_unknown_form_is_refused(fit: Callable[..., fitting.FittedTwin]) -> None:
    drafts = {"model": str(CONFIGS / "gpt-oss-120b.json"), "method": "eagle3", "num_speculative_tokens": 3}
    with pytest.raises(CompareError, match="eagle3 are not known here; leave out --speculative-config"):
        fit("llama-3.1-8b", "--speculative-config", json.dumps(drafts))


def test_adapters_are_made_for_the_twin(fit: Callable[..., fitting.FittedTwin]) -> None:
    made = fit("llama-3.1-8b", "--enable-lora")
    assert [json.loads(Path(each, "adapter_config.json").read_text())["target_modules"] for each in made.adapters] == [
        ["q_proj"],
        ["q_proj"],
    ]


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        ("nobody/nothing", (), "is no folder, no config.json and not in this machine's cache"),
        (__file__, (), "cannot be read as a config.json"),
        (str(CONFIGS / "llama-3.1-8b.json"), ("--config", "x.yaml"), "write those of --config on the command line"),
        (str(CONFIGS / "llama-3.1-8b.json"), ("-tp", "many"), "is no number of ranks"),
    ],
)
def test_what_has_no_twin_is_refused(tmp_path: Path, model: str, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(CompareError, match=message):
        fitting.fit(model, flags, tmp_path)


def test_an_architecture_without_a_class_is_refused() -> None:
    with pytest.raises(twin.TwinError, match="has no class NobodyForCausalLM, whose names of weights are needed"):
        twin.make({"architectures": ["NobodyForCausalLM"]}, Path(), Plan)


def test_quantised_weights_have_the_size_of_those_that_are_not() -> None:
    import torch

    values = torch.randn(192, 320)
    made = twin._in_fp8("w.weight", values, (128, 128))
    scales = made["w.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)[:192, :320]
    assert made["w.weight_scale_inv"].shape == (2, 3)
    torch.testing.assert_close(made["w.weight"].float() * scales, values, rtol=2**-4, atol=0.01)
    fp4 = twin._in_mxfp4("w", torch.empty(2, 512, 64))
    scale = 2.0 ** (fp4["w_scales"][0, 0, 0].item() - 127)
    steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    small = steps[(fp4["w_blocks"] & 7).long()] * scale
    assert small.square().mean().sqrt().item() == pytest.approx(512**-0.5, rel=0.45)


@pytest.mark.slow
def test_a_twin_in_mxfp4_has_widths_of_whole_blocks(tmp_path: Path) -> None:
    """vLLM takes the number of packed bytes from the config: a third of a block would have none."""
    made = twin.make(config("gpt-oss-120b"), tmp_path, lambda section: Plan(section, EIGHT_RANKS_TO_ONE))
    assert made.config["intermediate_size"] == 192


def test_weights_of_a_twin_give_logits_that_are_not_flat(tmp_path: Path) -> None:
    """Falcon-H1's multipliers would leave a standard deviation of a hundredth."""
    import torch
    import transformers

    made = twin.make(config("falcon-h1-7b"), tmp_path, Plan)
    assert made.spread is not None
    assert made.spread < 0.1
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    logits = model(input_ids=torch.arange(30, 60)[None], use_cache=False).logits.float()[0]
    assert 1.5 < logits.std(-1).mean().item() < 6
    assert len(logits.argmax(-1).unique()) > 15


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-235b-a22b"])
def test_an_engine_on_the_cpu_serves_a_twin(tmp_path: Path, name: str) -> None:
    """It has no graphs, so exit code 3 is the best there is."""
    asks = ("--num-prompts", "4", "--max-tokens", "12", "--json", "-O0", "--max-model-len", "256", "-tp", "8")
    made = report(check_compare(tmp_path, str(CONFIGS / f"{name}.json"), "--twin", *asks, code=3))
    assert "no CUDA graphs were used" in made["inconclusive"]
    assert {prompt["kind"] for prompt in made["prompts"]} == {"equal"}
    assert {change["key"] for change in made["twin"]["changes"]} >= {"num_hidden_layers", "--tensor-parallel-size"}
    assert not Path(made["twin"]["folder"]).exists()
