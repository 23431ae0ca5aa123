"""What goes wrong with weights elsewhere, and what happens here: one test for each report that no other test names.

Reports that other files' tests name: sglang-omni#784, tokenspeed#672, miles#1724, NeMo/RL#3591, trl#6796 and
open-instruct#1535 (test_sync_protocol_faults, _joining, _opening), trl#6688, slime#1731 and verl#6958 (test_sync_hundred, test_sync_shared_memory).
"""

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fakes import (
    StepGate,
    forward_logprobs,
    greedy_reference,
    mark,
    marker_llama,
    random_prompts,
    tiny_llama,
    wait_until,
)
from fakes_sync import FakeTarget, Memory, marked, marks
from torch import Tensor, nn

from rollout import (
    EngineConfig,
    EngineFencedError,
    EngineState,
    FinishReason,
    GenerationEngine,
    InvalidRequestError,
    SamplingParams,
)
from sync import ManifestError, SyncConfig, SyncError, WeightSync
from sync.manifest import held_tensors
from sync.receiver import add_derived

PROMPT = [5, 17, 33, 8]
GREEDY = SamplingParams(max_new_tokens=20, temperature=0, stop_token_ids=())
ENDLESS = SamplingParams(max_new_tokens=400, stop_token_ids=())


def own(model: Any, config: EngineConfig | None = None) -> GenerationEngine:
    return GenerationEngine(model, config, copy_weights=True)


@pytest.mark.parametrize("donor", ["finished", "in flight"])
def test_a_new_request_matches_no_prefix_of_older_weights(donor: str) -> None:
    """NVIDIA-NeMo/RL#4018, prime-rl#2270, lmdeploy#4917: a prefix cache keyed by tokens alone serves KV of older weights.
    Here the log-probs of a prompt seen before are those of the published model. (At the engine: test_rollout_versions.)"""
    (prompt,) = random_prompts([30])
    with own(tiny_llama(), EngineConfig(page_size=4)) as engine, WeightSync(engine) as weight_sync:
        first = engine.submit(prompt, GREEDY if donor == "finished" else ENDLESS)
        if donor == "finished":
            first.result(30)
        else:
            wait_until(lambda: engine.stats().generated_tokens > 10)
        trainer = tiny_llama(seed=1)
        weight_sync.publish(trainer)
        for _ in range(3):
            rollout = engine.submit(prompt, GREEDY).result(30)
            assert rollout.prefill_version == 1
            error = torch.tensor(rollout.logprobs) - forward_logprobs(trainer, prompt, rollout.token_ids)
            assert error.abs().max() < 1e-4


def test_no_byte_changes_while_a_forward_is_in_flight() -> None:
    """sglang#27886: a forward in flight races the mutation. Here the step in progress ends first."""
    with own(marker_llama()) as engine, WeightSync(engine) as weight_sync:
        gate = StepGate(engine)
        request = engine.submit(PROMPT, SamplingParams(max_new_tokens=8, stop_token_ids=()))
        gate.step(2)
        gate.wait_for_arrival()
        before = {held.names: (held.tensor._version, held.tensor.clone()) for held in held_tensors(engine.model)}
        trainer = marker_llama()
        mark(trainer, 1)
        publishing = weight_sync.publish(trainer, wait=False)
        wait_until(engine.manager.background_thread_status.is_pause_requested)
        for held in held_tensors(engine.model):  # the commit waits, and the forward has not run yet
            counter, weights = before[held.names]
            assert held.tensor._version == counter
            assert torch.equal(held.tensor, weights)
        assert not publishing.done()
        gate.open()
        assert publishing.result(30).straddlers == 1
        rollout = request.result(30)
        assert rollout.token_ids == rollout.versions
        assert set(rollout.versions) == {0, 1}


def test_a_model_whose_forward_runs_collectives_is_refused() -> None:
    """sglang#22620: a broadcast starts while tensor-parallel collectives run. Here no engine has a forward that runs
    any."""
    model = tiny_llama()
    model._device_mesh = object()
    with pytest.raises(InvalidRequestError, match="tensor-parallel models are not supported"):
        own(model)


def test_a_version_flip_ends_no_request_and_moves_no_other_number() -> None:
    """miles#2296: labelling a version aborts in-flight requests. Here all of them go on to their own end."""
    trainer = marker_llama()
    with own(marker_llama()) as engine, WeightSync(engine) as weight_sync:
        gate = StepGate(engine)
        params = SamplingParams(max_new_tokens=12, stop_token_ids=())
        requests = [engine.submit(prompt, params) for prompt in random_prompts([3, 9, 5])]
        gate.step(4)
        gate.wait_for_arrival()
        before = engine.stats()
        mark(trainer, 1)
        publishing = weight_sync.publish(trainer, wait=False)
        wait_until(engine.manager.background_thread_status.is_pause_requested)
        gate.open()
        publishing.result(30)
        rollouts = [request.result(30) for request in requests]
        after = engine.stats()
    assert {(rollout.finish_reason, len(rollout.token_ids)) for rollout in rollouts} == {(FinishReason.LENGTH, 12)}
    assert (after.preemptions, after.finished) == (before.preemptions, 3)
    assert after.updates == before.updates + 1


def test_the_version_moves_after_the_last_weight_and_not_before() -> None:
    """tokenspeed#672: a version is published before the last chunk was in. Here the old one stands until all is in place."""
    target = FakeTarget("a")
    seen: list[tuple[int, bool]] = []
    engine = target.engine
    engine.at = lambda point: seen.append((engine.version, marks(engine.model) == {1.0}))
    with WeightSync(target, Memory(), SyncConfig(bucket_bytes=64)) as weight_sync:
        weight_sync.publish(marked(1.0))
    assert [version for version, _ in seen] == [0] * (len(seen) - 1) + [1]
    assert [complete for _, complete in seen] == [False] * (len(seen) - 2) + [True, True]


BAD_PAYLOADS = {
    "nothing": lambda state: {},
    "only what is frozen": lambda state: {"model.embed_tokens.weight": state["model.embed_tokens.weight"]},
    "one tensor short": lambda state: {name: tensor for name, tensor in state.items() if name != "lm_head.weight"},
}


@pytest.mark.parametrize("kind", ["dict", "iterable"])
@pytest.mark.parametrize("payload", BAD_PAYLOADS)
def test_a_payload_without_all_trained_tensors_is_refused(payload: str, kind: str) -> None:
    """verl#7495: a payload without the trained tensors is "synced"."""
    offered = BAD_PAYLOADS[payload](tiny_llama(seed=1).state_dict())
    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync:
        with pytest.raises(ManifestError, match="missing: "):
            weight_sync.publish(offered if kind == "dict" else iter(offered.items()))
        assert engine.version == 0


def test_a_payload_equal_to_the_last_one_warns(caplog: pytest.LogCaptureFixture) -> None:
    """verl#7495: a payload without the trained tensors is "synced"."""
    trainer = tiny_llama(seed=1)
    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync, caplog.at_level(logging.WARNING):
        weight_sync.publish(trainer)
        assert not caplog.messages
        weight_sync.publish(trainer)
    (warning,) = [message for message in caplog.messages if "did the optimizer step?" in message]
    assert warning.startswith("version 2 has the very bytes of the one before it")


def test_a_payload_of_adapter_weights_is_refused_with_the_remedy() -> None:
    """verl#7495: a payload without the trained tensors is "synced". The base of an adapter alone is one."""
    state = {f"base_model.model.{name}": tensor for name, tensor in tiny_llama(seed=1).state_dict().items()}
    state["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"] = torch.ones(4, 32)
    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync:
        with pytest.raises(SyncError, match=r"lora_A\.default\.weight belongs to an adapter.*MergedLora"):
            weight_sync.publish(state)
        assert engine.version == 0


def test_addresses_stay_and_what_is_derived_from_the_weights_is_refreshed_with_them() -> None:
    """vllm#48941, vllm#48312: storage or derived tensors are rebound under CUDA graphs."""
    packed = Packed()
    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync:
        engine.call(add_derived, packed).result(30)
        addresses = [held.tensor.data_ptr() for held in held_tensors(engine.model)]
        objects = [id(held.tensor) for held in held_tensors(engine.model)]
        packed_address = packed.copy.data_ptr()
        for seed in (1, 2):
            trainer = tiny_llama(seed=seed)
            weight_sync.publish(trainer)
            assert [held.tensor.data_ptr() for held in held_tensors(engine.model)] == addresses
            assert [id(held.tensor) for held in held_tensors(engine.model)] == objects
            assert packed.copy.data_ptr() == packed_address
            assert torch.equal(packed.copy, trainer.lm_head.weight.T)


class Packed:
    """A transposed copy of the head."""

    def __init__(self) -> None:
        self.copy = torch.empty(32, 64)

    def prepare(self, staged: Any) -> Tensor:
        packed: Tensor = staged["lm_head.weight"].T.clone()
        return packed

    def install(self, prepared: Tensor) -> None:
        self.copy.copy_(prepared)


def test_a_rebound_parameter_fences_the_engine_instead_of_serving_through_old_addresses() -> None:
    """vllm#48941, vllm#48312: storage or derived tensors are rebound under CUDA graphs."""
    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync:
        with pytest.raises(EngineFencedError, match="Write into it in place"), engine.update() as model:
            model.lm_head.weight.data = torch.zeros_like(model.lm_head.weight)
        assert engine.state == EngineState.FENCED
        trainer = tiny_llama(seed=1)
        weight_sync.publish(trainer)
        assert engine.generate([PROMPT], GREEDY)[0].token_ids == greedy_reference(trainer, PROMPT, 20)


def _compiled(model: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(model)
    return compiled


def _compiled_layers(model: nn.Module) -> nn.Module:
    model.model.layers[0] = torch.compile(model.model.layers[0])
    return model


class _Distributed(nn.Module):
    """What DDP and DataParallel do to names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    "wrap", [_compiled, _compiled_layers, _Distributed, lambda model: _compiled(_Distributed(model))]
)
@pytest.mark.parametrize("kind", ["module", "dict"])
def test_a_wrapped_model_is_published_under_the_engines_names(wrap: Any, kind: str) -> None:
    """Our own: torch.compile's prefix `_orig_mod.` in every name."""
    trainer = tiny_llama(seed=1)
    expected = greedy_reference(trainer, PROMPT, 20)
    wrapped = wrap(trainer)
    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync:
        weight_sync.publish(wrapped if kind == "module" else wrapped.state_dict())
        assert engine.generate([PROMPT], GREEDY)[0].token_ids == expected


def test_a_trainer_is_never_blocked_for_longer_than_it_allows() -> None:
    """NeMo/RL#3591, trl#6796: a dead rank blocks the trainer for ever. Here the wait ends, and names phase and target.
    (Target by target, state by state: test_sync_protocol_faults; ranks of the trainer: test_sync_ranks.)"""
    entered, leave = threading.Event(), threading.Event()

    def hang(_: GenerationEngine) -> bool:
        entered.set()
        return leave.wait(60)

    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync:
        weight_sync.publish(tiny_llama(seed=1))
        hanging = engine.call(hang)
        assert entered.wait(30)
        with pytest.raises(SyncError, match=r"engine\[0\]: its commit of version 2 exceeded 1 s"):
            weight_sync.publish(tiny_llama(seed=2), timeout_s=1.0)
        leave.set()
        assert hanging.result(30)
        assert weight_sync.publish(tiny_llama(seed=3)).version == 3


def _stop_before(name: str, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for held, tensor in model.state_dict().items():
        if held == name:
            return
        yield held, tensor


def test_what_a_broken_source_has_offered_so_far_reaches_no_engine() -> None:
    """verl#7495: a payload without the trained tensors is "synced". A generator that ends early offers one."""
    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync:
        before = {held.names: held.tensor.clone() for held in held_tensors(engine.model)}
        with pytest.raises(ManifestError, match=r"missing: lm_head\.weight"):
            weight_sync.publish(_stop_before("lm_head.weight", tiny_llama(seed=1)))
        for held in held_tensors(engine.model):
            assert torch.equal(held.tensor, before[held.names])
