"""LoRA adapters merged on the way to an engine, with the trainer's tensors left alone."""

import subprocess
import sys
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes import greedy_reference, tiny_llama
from peft import IA3Config, LoraConfig, get_peft_model, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from rollout import GenerationEngine, SamplingParams
from sync import SyncError, WeightSource, WeightSync
from sync.sources.lora import MergedLora

ATTENTION_AND_MLP = ["q_proj", "v_proj", "up_proj", "down_proj"]
PROMPT = [5, 17, 33, 8]


def with_lora(model: nn.Module, seed: int = 1, **config: Any) -> Any:
    """A PEFT model whose adapter does something: all its factors are random."""
    peft_model = get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": ATTENTION_AND_MLP, **config}))
    randomise_adapters(peft_model, seed)
    return peft_model


def randomise_adapters(model: nn.Module, seed: int = 1) -> None:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.1)


def merged_by_peft(peft_model: Any) -> dict[str, Tensor]:
    return deepcopy(peft_model).merge_and_unload().state_dict()


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor], atol: float = 1e-6) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.allclose(tensor, right[name], atol=atol, rtol=0), name


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(input_ids=torch.tensor([PROMPT])).logits
    return result


def in_a_plain_model(plain: PreTrainedModel, tensors: dict[str, Tensor]) -> PreTrainedModel:
    plain.load_state_dict(tensors)
    return plain


# --------------------------------------------------------------------------------------------------- the merged weights


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True, "lora_alpha": 3},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32}},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        {"use_dora": True},
        {"modules_to_save": ["lm_head", "norm"]},
        {"lora_dropout": 0.5},
        {"layers_to_transform": [1]},
    ],
    ids=lambda config: "-".join(config) or "plain",
)
def test_offers_what_peft_merges(config: dict[str, Any]) -> None:
    model = with_lora(tiny_llama(), **config).train()
    source = MergedLora(model)
    assert isinstance(source, WeightSource)
    tensors = dict(source.tensors())
    assert_close(tensors, merged_by_peft(model))
    assert {name: (spec.shape, spec.dtype) for name, spec in source.specs().items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("config", [{}, {"use_dora": True}, {"lora_bias": True}])
def test_offers_what_peft_merges_on_transposed_layers_with_biases(config: dict[str, bool]) -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    targets = ["c_attn", "c_fc", "c_proj"]
    model = with_lora(gpt2, target_modules=targets, fan_in_fan_out=True, **config)
    expected = merged_by_peft(model)
    del expected["lm_head.weight"]  # tied, so offered once
    assert_close(dict(MergedLora(model).tensors()), expected)


def test_trained_biases_of_the_layers_travel() -> None:
    model = with_lora(tiny_llama(attention_bias=True), target_modules=["q_proj"], bias="lora_only")
    bias = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.bias
    assert bias.requires_grad
    nn.init.normal_(bias)
    assert torch.equal(dict(MergedLora(model).tensors())["model.layers.0.self_attn.q_proj.bias"], bias)


def test_several_active_adapters_are_added_up_and_one_can_be_named() -> None:
    model = with_lora(tiny_llama(), target_modules=["q_proj"])
    model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj", "q_proj"], modules_to_save=["lm_head"]))
    randomise_adapters(model, seed=3)
    nn.init.normal_(model.base_model.model.lm_head.modules_to_save["other"].weight)
    only_first = merged_by_peft(model)
    assert_close(dict(MergedLora(model).tensors()), only_first)
    model.base_model.set_adapter(["default", "other"])
    both = merged_by_peft(model)
    assert not torch.equal(both["lm_head.weight"], only_first["lm_head.weight"])
    assert_close(dict(MergedLora(model).tensors()), both)
    assert_close(dict(MergedLora(model, adapter="default").tensors()), only_first)


def test_layer_scale_that_the_trainer_changed_counts() -> None:
    model = with_lora(tiny_llama(), target_modules=["q_proj"])
    source = MergedLora(model)
    for layer in model.base_model.model.model.layers:
        layer.self_attn.q_proj.scale_layer(3.0)
    assert_close(dict(source.tensors()), merged_by_peft(model))


def test_adapter_injected_without_a_peft_model_around_it_is_merged() -> None:
    around = with_lora(tiny_llama())
    injected = inject_adapter_in_model(LoraConfig(r=4, target_modules=ATTENTION_AND_MLP), tiny_llama())
    randomise_adapters(injected)
    assert_close(dict(MergedLora(injected).tensors()), merged_by_peft(around))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_result_has_the_bases_dtype_and_is_rounded_once(dtype: torch.dtype) -> None:
    model = with_lora(tiny_llama().to(dtype), target_modules=["q_proj"])
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    exact = layer.base_layer.weight.double() + layer.scaling["default"] * (b @ a)
    got = dict(MergedLora(model).tensors())["model.layers.0.self_attn.q_proj.weight"]
    assert got.dtype == dtype
    if dtype == torch.bfloat16:  # half a unit in the last of 8 bits, and what float32 adds
        assert ((got.double() - exact).abs() <= exact.abs() * 2**-8 * 1.001).all()
    else:
        assert torch.allclose(got, exact, atol=1e-12, rtol=0)


def test_autocast_around_a_publish_changes_nothing() -> None:
    source = MergedLora(with_lora(tiny_llama()))
    expected = dict(source.tensors())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = dict(source.tensors())
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


# ----------------------------------------------------------------------------------------------------------- tied weights


def test_tied_weights_without_an_adapter_are_offered_once() -> None:
    model = with_lora(tiny_llama(tie_word_embeddings=True))
    expected = merged_by_peft(model)
    del expected["lm_head.weight"]
    assert_close(dict(MergedLora(model).tensors()), expected)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("config", [{"target_modules": ["embed_tokens"]}, {"modules_to_save": ["lm_head"]}])
def test_adapter_on_one_of_two_tied_weights_is_published_as_the_trainer_runs_it(config: dict[str, Any]) -> None:
    # PEFT's own merge would change the other one too, and the merged model would say something else.
    model = with_lora(tiny_llama(tie_word_embeddings=True), **config).eval()
    if "modules_to_save" in config:
        nn.init.normal_(model.base_model.model.lm_head.modules_to_save["default"].weight)
    plain = in_a_plain_model(tiny_llama(), dict(MergedLora(model).tensors()))
    assert torch.allclose(logits(plain), logits(model), atol=1e-5)
    with (
        GenerationEngine(tiny_llama(tie_word_embeddings=True), copy_weights=True) as engine,
        WeightSync(engine) as weight_sync,
        pytest.raises(SyncError, match="tied"),
    ):
        weight_sync.publish(MergedLora(model))


def test_tied_adapters_are_offered_once() -> None:
    targets = {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}
    model = with_lora(tiny_llama(tie_word_embeddings=True), **targets).eval()
    tensors = dict(MergedLora(model).tensors())
    assert "lm_head.weight" not in tensors
    plain = tiny_llama(tie_word_embeddings=True)
    assert plain.load_state_dict(tensors, strict=False).missing_keys == ["lm_head.weight"]
    assert torch.allclose(logits(plain), logits(model), atol=1e-5)


# ---------------------------------------------------------------------------------------------------- the trainer's model


def test_trainers_tensors_are_bit_identical_after_a_hundred_passes() -> None:
    model = with_lora(tiny_llama().bfloat16(), modules_to_save=["lm_head"]).train()
    model(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    every = [*model.named_parameters(), *model.named_buffers()]
    before = [(t, t.detach().clone(), t._version, t.data_ptr(), t.requires_grad) for _, t in every]
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert gradients
    source = MergedLora(model)
    first = {name: tensor.clone() for name, tensor in source.tensors()}
    for _ in range(99):
        last = dict(source.tensors())
    assert all(torch.equal(last[name], tensor) for name, tensor in first.items())
    for tensor, values, version, address, requires_grad in before:
        assert torch.equal(tensor, values)
        assert (tensor._version, tensor.data_ptr(), tensor.requires_grad) == (version, address, requires_grad)
    assert all(torch.equal(dict(model.named_parameters())[name].grad, g) for name, g in gradients.items())
    assert model.training


def test_merged_tensor_lies_in_memory_of_its_own() -> None:
    model = with_lora(tiny_llama(), target_modules=["q_proj"])
    theirs = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    merged = {name: tensor for name, tensor in MergedLora(model).tensors() if "q_proj" in name}
    assert merged
    assert all(tensor.untyped_storage().data_ptr() not in theirs for tensor in merged.values())


def test_pass_between_forward_and_backward_changes_no_gradient() -> None:
    def gradients(publish: bool) -> list[Tensor]:
        model = with_lora(tiny_llama()).train()
        loss = model(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss
        if publish:
            assert all(not tensor.requires_grad for _, tensor in MergedLora(model).tensors())
        loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert all(torch.equal(left, right) for left, right in zip(gradients(True), gradients(False), strict=True))


def test_engine_says_what_the_trained_model_says_step_after_step() -> None:
    model = with_lora(tiny_llama(seed=2)).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=5.0)
    greedy = SamplingParams(max_new_tokens=8, temperature=0, stop_token_ids=())
    with GenerationEngine(tiny_llama(), copy_weights=True) as engine, WeightSync(engine) as weight_sync:
        for _ in range(3):
            weight_sync.publish(MergedLora(model))
            got = engine.generate([PROMPT], greedy)[0].token_ids
            assert got == greedy_reference(deepcopy(model).eval().merge_and_unload(), PROMPT, 8)
            model(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
            optimizer.step()


@pytest.mark.parametrize("wrap", [torch.compile, DistributedDataParallel, lambda m: torch.compile(nn.DataParallel(m))])
def test_wrappers_around_the_peft_model_change_nothing(wrap: Any) -> None:
    model = with_lora(tiny_llama())
    expected = dict(MergedLora(model).tensors())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        got = dict(MergedLora(wrap(model)).tensors())
    finally:
        dist.destroy_process_group()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


# ------------------------------------------------------------------------------------------------- merged, disabled, refused


def test_merged_adapter_is_not_added_again() -> None:
    model = with_lora(tiny_llama())
    expected = merged_by_peft(model)
    model.merge_adapter()
    assert_close(dict(MergedLora(model).tensors()), expected)


def test_adapter_merged_besides_the_one_in_use_is_refused() -> None:
    model = with_lora(tiny_llama())
    model.add_adapter("other", LoraConfig(r=2, target_modules=ATTENTION_AND_MLP))
    source = MergedLora(model)
    model.merge_adapter(["other"])
    with pytest.raises(SyncError, match=r"holds the merged adapters other, but default should be published"):
        source.specs()


def test_disabled_adapter_is_refused_unless_it_is_named() -> None:
    model = with_lora(tiny_llama())
    source, expected = MergedLora(model), merged_by_peft(model)
    with model.disable_adapter():
        with pytest.raises(SyncError, match=r"is disabled.*outside disable_adapter\(\)"):
            source.specs()
        assert_close(dict(MergedLora(model, adapter="default").tensors()), expected)
    assert_close(dict(source.tensors()), expected)


def test_unknown_adapter_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SyncError, match=r"no adapter 'best'; the model has default"):
        MergedLora(with_lora(tiny_llama()), adapter="best")


def test_model_without_adapters_is_refused() -> None:
    with pytest.raises(SyncError, match="publish the module itself"):
        MergedLora(tiny_llama())


class ConvModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3)


REFUSED = {
    "conv": (ConvModel, {"target_modules": ["conv"]}, r"conv is a peft\.tuners\.lora\.layer\.Conv1d"),
    "dora on embeddings": (tiny_llama, {"target_modules": ["embed_tokens"], "use_dora": True}, "DoraEmbeddingVariant"),
    "mica": (tiny_llama, {"init_lora_weights": "mica"}, "MiCALinearVariant"),
    "trainable tokens": (tiny_llama, {"trainable_token_indices": [1, 2]}, "TrainableTokensWrapper|token_adapter"),
    "lora_bias without a bias": (tiny_llama, {"lora_bias": True}, "lora_bias but its base layer no bias"),
}


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_right_is_refused(case: str) -> None:
    build, config, message = REFUSED[case]
    with pytest.raises(SyncError, match=message):
        MergedLora(with_lora(build(), **config))


def test_two_dora_adapters_at_once_are_refused() -> None:
    model = with_lora(tiny_llama(), use_dora=True)
    model.add_adapter("other", LoraConfig(r=2, target_modules=ATTENTION_AND_MLP))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(SyncError, match="only active adapter"):
        MergedLora(model)


def test_adapters_that_are_not_lora_are_refused() -> None:
    ia3 = get_peft_model(tiny_llama(), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(SyncError, match=r"ia3\.layer\.Linear"):
        MergedLora(ia3)


@pytest.mark.parametrize("on", ["q_proj", "k_proj"], ids=["with an adapter", "without one"])
@pytest.mark.parametrize("kind", ["integers", "a quantiser's class"])
def test_quantised_weights_are_refused(on: str, kind: str) -> None:
    model = with_lora(tiny_llama(), target_modules=["q_proj"])
    layer = getattr(model.base_model.model.model.layers[0].self_attn, on)
    layer = getattr(layer, "base_layer", layer)
    if kind == "integers":
        layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    else:
        params4bit = type("Params4bit", (nn.Parameter,), {"__module__": "bitsandbytes.nn.modules"})
        layer.weight = params4bit(layer.weight.detach())
    with pytest.raises(SyncError, match=rf"{on}\.weight is quantised"):
        MergedLora(model)


def test_package_works_without_peft() -> None:
    code = (
        "import sys, torch; sys.modules['peft'] = None; from sync.sources.lora import merged_exports; "
        "print(len(merged_exports(torch.nn.Linear(2, 2))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "2"), done.stderr
