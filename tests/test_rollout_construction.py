"""What an engine cannot run fails in its constructor, with a remedy; what it can, it leaves as it was."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from fakes import (
    EOS_ID,
    greedy_reference,
    mark,
    marker_llama,
    tiny_llama,
)
from peft import LoraConfig, PeftModel, get_peft_model
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import ContinuousBatchingConfig, LlamaConfig, LlamaModel, T5Config, T5ForConditionalGeneration

from rollout import (
    EngineConfig,
    FinishReason,
    GenerationEngine,
    InvalidRequestError,
    SamplingParams,
)


def greedy(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0, stop_token_ids=())


def own_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("rollsync"))


@pytest.mark.parametrize("name", ["num_blocks", "max_batch_tokens", "max_requests", "max_waiting", "num_threads"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
def test_a_size_that_is_no_positive_integer_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} must be an integer of at least 1 or None, got {value!r}"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("value", [0, 1, 3, 4.0])
def test_a_page_size_below_four_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"page_size must be an integer of at least 4 or None, got {value!r}"):
        EngineConfig(page_size=value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, "bfloat16"])
def test_an_autocast_dtype_that_is_none_is_refused(dtype: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"autocast_dtype must be torch\.bfloat16"):
        EngineConfig(autocast_dtype=dtype)


@pytest.mark.parametrize(
    ("config", "number"),
    [
        (EngineConfig(num_blocks=10**9), "num_blocks=1000000000"),
        (EngineConfig(num_blocks=10**18), "num_blocks=1000000000000000000"),
        (EngineConfig(page_size=10**9), "page_size=1000000000"),
        (EngineConfig(max_batch_tokens=10**9), "max_batch_tokens=1000000000"),
        (EngineConfig(max_requests=10**12), "max_requests=1000000000000"),
        (EngineConfig(continuous_batching=ContinuousBatchingConfig(page_size=1)), "page_size=1"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_sizes_that_do_not_fit_fail_in_the_constructor_with_their_numbers(config: EngineConfig, number: str) -> None:
    before = own_threads()
    with pytest.raises(InvalidRequestError, match=number):
        GenerationEngine(tiny_llama(), config)
    assert own_threads() == before, "a thread was left behind"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduler_type": "lottery"}, "lottery"),
        ({"safety_margin": 7.0}, "safety_margin"),
        ({"cpu_offload_space": 1.0}, "for the KV cache of a GPU"),
    ],
    ids=str,
)
def test_upstream_settings_that_cannot_work_fail_in_the_constructor(changes: dict[str, object], message: str) -> None:
    before = own_threads()
    with pytest.raises(InvalidRequestError, match=message):
        GenerationEngine(tiny_llama(), EngineConfig(continuous_batching=ContinuousBatchingConfig(**changes)))
    assert own_threads() == before, "a thread was left behind"


def test_upstream_settings_of_another_kind_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"must be transformers' ContinuousBatchingConfig.* got dict"):
        GenerationEngine(tiny_llama(), EngineConfig(continuous_batching={"page_size": 16}))


def tiny_t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def headless() -> nn.Module:
    return LlamaModel(LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return tiny_llama()


def with_adapters() -> PeftModel:
    return get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]))


def tensor_parallel() -> nn.Module:
    model = tiny_llama()
    model._device_mesh = object()  # what `from_pretrained(tp_plan="auto")` leaves
    return model


@pytest.fixture
def one_process_mesh() -> Iterator[DeviceMesh]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_model_sharded_by_fsdp2_is_refused(one_process_mesh: DeviceMesh) -> None:
    model = tiny_llama()
    fully_shard(model, mesh=one_process_mesh)
    with pytest.raises(InvalidRequestError, match=r"is spread over several processes .*WeightSync"):
        GenerationEngine(model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(2, 2), "must be a transformers PreTrainedModel, got Linear; unwrap it first"),
        (lambda: nn.DataParallel(tiny_llama()), "got DataParallel; unwrap it"),
        (with_adapters, r"got PeftModel; unwrap it first .*publish PolicyView\(peft_model\) to it"),
        (lambda: with_adapters().get_base_model(), r"do not follow from its config.*PolicyView\(peft_model\)"),
        (lambda: None, "must be a transformers PreTrainedModel, got NoneType"),
        (tiny_t5, "T5ForConditionalGeneration is an encoder-decoder"),
        (headless, "LlamaModel has no language-model head; use its ForCausalLM class"),
        (on_meta, "must be on one real device, got .*meta"),
        (tensor_parallel, "tensor-parallel models are not supported; load the model on one device"),
    ],
    ids=["module", "wrapped", "PEFT", "adapters", "None", "encoder-decoder", "no head", "meta", "tensor-parallel"],
)
def test_a_model_that_cannot_be_hosted_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    before = own_threads()
    with pytest.raises(InvalidRequestError, match=message):
        GenerationEngine(make())
    assert own_threads() == before


def test_the_model_and_its_config_are_as_before() -> None:
    model = tiny_llama()
    model.set_attn_implementation("eager")
    config, generation = model.config.to_dict(), model.generation_config.to_dict()
    with GenerationEngine(model) as engine:
        engine.generate([[5]], SamplingParams(max_new_tokens=3))
    assert model.config.to_dict() == config
    assert model.generation_config.to_dict() == generation
    assert model.config._attn_implementation == "eager"


def test_the_settings_object_is_as_before() -> None:
    upstream = ContinuousBatchingConfig(num_blocks=8, page_size=16)
    before = vars(upstream).copy()
    config = EngineConfig(continuous_batching=upstream, max_requests=3)
    with GenerationEngine(tiny_llama(), config) as engine:
        assert engine.manager.max_request_tokens == 128
        engine.generate([[5]], greedy(2))
    assert vars(upstream) == before
    assert config == EngineConfig(continuous_batching=upstream, max_requests=3)


def test_from_pretrained_loads_what_save_pretrained_wrote(tmp_path: "object") -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    with GenerationEngine.from_pretrained(str(tmp_path), tokenizer="none needed") as engine:
        assert engine.generate([[5, 6]], greedy(6))[0].token_ids == greedy_reference(model, [5, 6], 6)
        assert engine.tokenizer == "none needed"


def test_the_models_own_eos_ends_a_rollout_by_default() -> None:
    model = marker_llama()
    mark(model, EOS_ID)
    with GenerationEngine(model) as engine:
        default, never = (SamplingParams(max_new_tokens=3, stop_token_ids=ids) for ids in (None, ()))
        (rollout,) = engine.generate([[5]], default)
        assert (rollout.token_ids, rollout.finish_reason) == ([EOS_ID], FinishReason.STOP)
        assert engine.generate([[5]], never)[0].token_ids == [EOS_ID] * 3
