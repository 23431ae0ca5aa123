"""The trainer's model is never altered, and computes beside a running engine what it computes alone."""

from copy import deepcopy

import pytest
import torch
from fakes import ARCHITECTURES, random_prompts, tiny_llama, tiny_qwen2
from transformers import PreTrainedModel

from rollout import GenerationEngine, SamplingParams
from rollout.model.shell import WeightWatch, build_shell
from rollout.model.weights import by_identity, weights_of

STEPS = 50


def train(model: PreTrainedModel, *, engine: GenerationEngine | None, training: bool) -> tuple[list[float], list, list]:
    """Losses, last gradients and final weights of 50 steps on fixed batches; each step inside an update, if there is an
    engine, which generates all the while."""
    torch.manual_seed(7)
    model.train(training)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        batch = torch.tensor(random_prompts([24] * 4, seed=step))
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        if engine is None:
            optimizer.step()
        else:
            with engine.update():
                optimizer.step()
        losses.append(loss.item())
    gradients = [p.grad.clone() for p in model.parameters()]
    return losses, gradients, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("training", [True, False], ids=["train mode", "eval mode"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_training_beside_an_engine_is_bitwise_training_alone(training: bool, attention: str) -> None:
    def make() -> PreTrainedModel:
        model = tiny_llama(attention_dropout=0.1)
        model.set_attn_implementation(attention)
        return model

    losses, gradients, weights = train(make(), engine=None, training=training)
    model = make()
    before = deepcopy(model.config.to_dict()), deepcopy(model.generation_config.to_dict()), attention
    with GenerationEngine(model) as engine:
        params = SamplingParams(max_new_tokens=450, stop_token_ids=(), seed=3)
        futures = [engine.submit(prompt, params) for prompt in random_prompts([4, 20, 33, 50] * 4)]
        beside = train(model, engine=engine, training=training)
        assert engine.version == STEPS
        # only now, and not by a lack of work, did generation end
        assert not all(future.done() for future in futures)
        for future in futures:
            future.cancel()
        rollouts = [future.result(30) for future in futures]
    assert max(rollout.max_version or 0 for rollout in rollouts) >= STEPS - 1
    assert beside[0] == losses
    assert all(torch.equal(a, b) for a, b in zip(beside[1], gradients, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(beside[2], weights, strict=True))
    after = model.config.to_dict(), model.generation_config.to_dict(), model.config._attn_implementation
    assert after == before
    assert model.training is training


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_engine_leaves_no_trace_on_the_model(architecture: str) -> None:
    model = ARCHITECTURES[architecture]().train()
    ids = {name: (id(p), p.data_ptr(), p._version, p.requires_grad) for name, p in model.named_parameters()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    for copy_weights in (False, True):
        with GenerationEngine(model, copy_weights=copy_weights) as engine:
            engine.generate(random_prompts([3, 9]), SamplingParams(max_new_tokens=4))
    assert model.training
    assert {name: (id(p), p.data_ptr(), p._version, p.requires_grad) for name, p in model.named_parameters()} == ids
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_the_shell_shares_parameters_or_has_its_own() -> None:
    model = tiny_qwen2()
    shared, own = build_shell(model, copy_weights=False), build_shell(model, copy_weights=True)
    for (name, theirs), (_, same), (_, other) in zip(
        model.named_parameters(), shared.named_parameters(), own.named_parameters(), strict=True
    ):
        assert same is theirs, name
        assert other is not theirs
        assert other.data_ptr() != theirs.data_ptr()
        assert torch.equal(other, theirs)
    for shell in (shared, own):
        assert shell.lm_head.weight is shell.model.embed_tokens.weight, "tied weights were untied"
        assert shell.config is not model.config
        assert not shell.training


def test_the_rotary_tables_are_the_shells_own() -> None:
    model = tiny_llama()
    shell = build_shell(model, copy_weights=False)
    for name, buffer in model.named_buffers():
        ours = shell.get_buffer(name)
        assert torch.equal(ours, buffer)
        assert ours.data_ptr() != buffer.data_ptr()
    assert all(
        tensor.device.type == "cpu" for m in shell.modules() for tensor in vars(m).values() if torch.is_tensor(tensor)
    )


def test_tied_weights_are_one_object_with_several_names() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    names = dict.fromkeys(model.state_dict())
    groups = by_identity(model.state_dict(keep_vars=True))
    assert [each for each, _ in groups if len(each) > 1] == [("model.embed_tokens.weight", "lm_head.weight")]
    assert sorted(name for each, _ in groups for name in each) == sorted(names)
    assert [each[0] for each, _ in groups] == list(weights_of(model)) == [n for n in names if n != "lm_head.weight"]
    assert groups[0][1] is model.lm_head.weight


def test_the_watch_sees_every_way_to_write() -> None:
    model = tiny_llama()
    weight = model.model.layers[1].mlp.up_proj.weight
    watch = WeightWatch(model)
    ways = {
        "in place": lambda: weight.detach().add_(1.0),
        "by an optimizer": lambda: torch.optim.AdamW([weight], foreach=False).step(),
        "by a foreach optimizer": lambda: torch.optim.AdamW([weight], foreach=True).step(),
        "by a fused optimizer": lambda: torch.optim.AdamW([weight], fused=True).step(),
        "through .data": lambda: weight.data.mul_(1.5),
        "re-pointed": lambda: setattr(weight, "data", weight.data.clone()),
        "load_state_dict": lambda: model.load_state_dict(model.state_dict()),
    }
    weight.grad = torch.ones_like(weight)
    for way, write in ways.items():
        assert watch.changed() is None
        with torch.no_grad():
            write()
        assert watch.changed() is not None, f"a write {way} went unnoticed"
        watch.record()


def test_reading_and_training_passes_are_no_changes() -> None:
    model = tiny_llama().train()
    watch = WeightWatch(model)
    batch = torch.tensor(random_prompts([8]))
    model(input_ids=batch, labels=batch).loss.backward()
    model.zero_grad()
    assert watch.changed() is None
