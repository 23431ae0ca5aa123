"""One name per tensor, whatever is wrapped around the model."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from sync import ManifestError
from sync.sources.names import canonical_names

PARTS = st.sampled_from(["model", "layers", "0", "1", "self_attn", "q_proj", "lm_head", "norm", "module_list", "base"])
LEAVES = st.sampled_from(["weight", "bias", "e_score_correction_bias"])
NAMES = st.sets(
    st.tuples(st.lists(PARTS, min_size=1, max_size=4).map(tuple), LEAVES).map(lambda pair: (*pair[0], pair[1])),
    min_size=1,
    max_size=8,
)
INNER = st.sampled_from(["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
OUTER = st.sampled_from(["module", "base_model.model", "_orig_mod", "_fsdp_wrapped_module"])


@st.composite
def wrapped_models(draw: st.DrawFn) -> dict[str, str]:
    """The plain name of each tensor of a model, by its name once the model's modules, and then the model as a whole,
    have been wrapped any number of times in any order."""
    names = draw(NAMES)
    modules = sorted({path[:depth] for path in names for depth in range(1, len(path))})
    around = {module: draw(st.lists(INNER, max_size=2)) for module in modules}
    outside = draw(st.lists(OUTER, max_size=4))
    wrapped = {}
    for path in names:
        parts = list(outside)
        for depth, part in enumerate(path, start=1):
            parts += [part, *around.get(path[:depth], [])]
        wrapped[".".join(parts)] = ".".join(path)
    return wrapped


@given(wrapped_models())
def test_wrapping_in_any_order_gives_the_plain_names(wrapped: dict[str, str]) -> None:
    assert canonical_names(wrapped) == wrapped


@given(NAMES)
def test_canonical_names_are_their_own(paths: set[tuple[str, ...]]) -> None:
    names = [".".join(path) for path in paths]
    assert canonical_names(names) == {name: name for name in names}


@given(NAMES, st.permutations(["module", "base_model.model", "_orig_mod"]))
def test_adapter_factors_have_no_name_and_the_layer_under_them_has_its_own(
    paths: set[tuple[str, ...]], outside: list[str]
) -> None:
    expected: dict[str, str | None] = {}
    for *owner, leaf in paths:
        prefix = ".".join([*outside, *owner])
        expected[f"{prefix}.base_layer.{leaf}"] = ".".join([*owner, leaf])
        expected[f"{prefix}.lora_A.default.weight"] = None
        expected[f"{prefix}.lora_embedding_B.default"] = None
    assert canonical_names(expected) == expected


def test_real_wrappers_leave_the_plain_names() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))

    plain = set(model().state_dict())
    inside, around = model(), model()
    inside[0] = checkpoint_wrapper(inside[0])
    inside[1] = torch.compile(inside[1])
    for wrapped in (inside, torch.compile(around), nn.DataParallel(torch.compile(nn.DataParallel(around)))):
        assert set(canonical_names(wrapped.state_dict()).values()) == plain
        assert wrapped is inside or set(wrapped.state_dict()) != plain


COPIES = [
    "base_model.model.lm_head.original_module.weight",
    "base_model.model.lm_head.modules_to_save.a.weight",
    "base_model.model.lm_head.modules_to_save.b.weight",
]


@pytest.mark.parametrize(("adapters", "chosen"), [(["a"], 1), (["b"], 2), (["b", "c"], 2), (["c"], 0), ([], 0)])
def test_copy_of_the_adapter_in_use_takes_the_place_of_the_original(adapters: list[str], chosen: int) -> None:
    assert canonical_names(COPIES, adapters=adapters) == {
        name: "lm_head.weight" if at == chosen else None for at, name in enumerate(COPIES)
    }


def test_only_copy_counts_without_being_named() -> None:
    assert list(canonical_names(COPIES[:2]).values()) == [None, "lm_head.weight"]


def test_collision_names_both_tensors() -> None:
    with pytest.raises(
        ManifestError, match=r"modules_to_save\.a\.weight and .*modules_to_save\.b\.weight would both be"
    ):
        canonical_names(COPIES)
    with pytest.raises(ManifestError, match=r"0\._orig_mod\.weight and 0\.weight would both be 0\.weight"):
        canonical_names(["0._orig_mod.weight", "0.weight"])


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("module.layers.0._fsdp_wrapped_module._flat_param", "_flat_param"),
        ("policy.base_model.model.lm_head.weight", "base_model.model"),
        ("embed_tokens.token_adapter.trainable_tokens_delta.default", "token_adapter"),
        ("lm_head.modules_to_save.default", "modules_to_save"),
        ("_orig_mod", "an empty part"),
    ],
)
def test_leftover_of_a_wrapper_is_named(name: str, part: str) -> None:
    with pytest.raises(ManifestError, match=f"{name} still has {part}"):
        canonical_names([name])


def test_layer_that_is_called_module_keeps_its_name() -> None:
    names = ["module.weight", "head.weight"]
    assert canonical_names(names) == {name: name for name in names}
    assert list(canonical_names([f"module.{name}" for name in names]).values()) == names
