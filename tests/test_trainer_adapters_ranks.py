"""The policy of a run on two ranks (gloo, one of them slow), whole and the same on both, however it is sharded."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_ranks import CASES, PUBLISHED, bare_model

Seen = list[dict[str, Any]]
"""What each rank saw, by case."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("policy_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{script.parent.parent}:{script.parent}", "HF_HUB_OFFLINE": "1"},
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_get_the_same_tensors_in_one_order(seen: Seen, case: str) -> None:
    first, second = (results[case] for results in seen)
    assert first["names"] == second["names"]
    assert all(torch.equal(second["tensors"][name], tensor) for name, tensor in first["tensors"].items())
    assert all(result["repeats"] for result in (first, second))


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_comes_whole_under_the_bare_models_name(seen: Seen, case: str) -> None:
    bare = bare_model(tie_word_embeddings="tied" in case)
    expected = {
        name: tensor for name, tensor in bare.state_dict().items() if "tied" not in case or name != "lm_head.weight"
    }
    prefix = "policy." if case == "fsdp1 inside" else ""
    tensors = {name.removeprefix(prefix): tensor for name, tensor in seen[0][case]["tensors"].items()}
    if prefix:
        assert tensors.pop("rest.weight").shape == (2, 2)
        assert tensors.pop("rest.bias").shape == (2,)
    assert {name: (t.shape, t.dtype) for name, t in tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in expected.items()
    }
    assert torch.equal(tensors["model.layers.0.kept"], torch.arange(3.0))


@pytest.mark.parametrize("case", CASES)
def test_specs_promise_what_comes(seen: Seen, case: str) -> None:
    result = seen[0][case]
    assert result["specs"] == {name: (tuple(t.shape), t.dtype) for name, t in result["tensors"].items()}


def plain_name(name: str) -> str:
    wrappers = {"module", "_orig_mod", "_fsdp_wrapped_module", "base_layer"}
    return ".".join(part for part in name.removeprefix("base_model.model.").split(".") if part not in wrappers)


@pytest.mark.parametrize("case", [case for case in CASES if "lora" not in case])
def test_values_are_those_of_the_trained_weights_in_full_precision(seen: Seen, case: str) -> None:
    result = seen[0][case]
    expected = {plain_name(name): tensor for name, tensor in result["expected"].items()}
    weights = {name: tensor for name, tensor in result["tensors"].items() if name in expected}
    assert len(weights) >= len(result["tensors"]) - 1  # all but the buffer
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[name]), name
    initial = dict(bare_model(tie_word_embeddings="tied" in case).named_parameters())
    name = "model.embed_tokens.weight"
    assert not torch.equal(initial[name], weights[f"policy.{name}" if case == "fsdp1 inside" else name])


@pytest.mark.parametrize("case", [case for case in CASES if "lora" in case])
def test_adapters_are_merged_into_the_gathered_weights(seen: Seen, case: str) -> None:
    result = seen[0][case]
    whole = {name.replace("_fsdp_wrapped_module.", ""): tensor for name, tensor in result["expected"].items()}
    num_merged = 0
    for name, tensor in result["tensors"].items():
        owner, _, leaf = f"base_model.model.{name}".rpartition(".")
        expected = whole.get(f"{owner}.{leaf}", whole.get(f"{owner}.base_layer.{leaf}"))
        if f"{owner}.lora_A.default.weight" in whole:
            delta = whole[f"{owner}.lora_B.default.weight"] @ whole[f"{owner}.lora_A.default.weight"]
            expected, num_merged = expected + 2.0 * delta, num_merged + 1  # the scale is lora_alpha / r = 8 / 4
        assert expected is None or torch.allclose(tensor, expected, atol=1e-6, rtol=0), name
    assert num_merged == 4


@pytest.mark.parametrize("case", CASES)
def test_cast_rounds_the_whole_tensor_once(seen: Seen, case: str) -> None:
    result = seen[1][case]
    if "lora" in case:  # rounded from float32, which two computations may differ in
        return
    assert all(torch.equal(result["low"][name], tensor.bfloat16()) for name, tensor in result["tensors"].items())


@pytest.mark.parametrize("case", CASES)
def test_trainer_is_untouched_and_trains_on(seen: Seen, case: str) -> None:
    assert all(results[case]["untouched"] for results in seen)
    assert all(0 < results[case]["loss_after"] < 20 for results in seen)


@pytest.mark.parametrize("case", PUBLISHED)
def test_engine_on_the_first_rank_holds_what_both_ranks_trained(seen: Seen, case: str) -> None:
    first, second = (results[f"published {case}"] for results in seen)
    assert first["versions"] == second["versions"] == [1, 2]
    expected = {plain_name(name): tensor for name, tensor in first["expected"].items()}
    assert first["engine"].keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in first["engine"].items())


def test_interrupt_of_the_first_rank_ends_the_wait_of_the_others(seen: Seen) -> None:
    first, second = (results["dealt"]["interrupted"] for results in seen)
    assert first.startswith("KeyboardInterrupt")
    assert second.startswith("AdapterError: the first rank failed, and with it all of them: KeyboardInterrupt: ")


def test_wait_for_the_first_rank_has_a_limit_of_its_own_and_leaves_the_trainers_group_alone(seen: Seen) -> None:
    assert "the first rank did not give its part within 10 s, or has gone" in seen[1]["dealt"]["late"]
    assert "another rank did not take its part within 10 s, or has gone" in seen[0]["dealt"]["late"]
    assert [results["dealt"]["total"] for results in seen] == [2.0, 2.0]


def test_error_of_the_first_rank_is_not_said_to_come_of_the_others_having_gone(seen: Seen) -> None:
    assert seen[0]["dealt"]["late failure"] == "KeyError: 'too late' caused by None"


def test_adapter_in_another_fsdp1_unit_than_its_base_is_refused(seen: Seen) -> None:
    for results in seen:
        assert "layers.0.self_attn.q_proj.weight lies in another FSDP unit than its base" in results["refused"]
