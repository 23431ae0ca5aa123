"""What may be published into a module, and what is refused before anything is copied."""

import pytest
import torch
from torch import nn

from sync import ManifestError, SyncError, TensorSpec, WeightSource
from sync.layout import Layout, empty_run
from sync.manifest import Manifest, held_tensors
from sync.sources.source import as_source
from sync.staging import Staging


class Tied(nn.Module):
    """Two names for one weight, a persistent buffer and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(2, dtype=torch.float32))
        self.register_buffer("scratch", torch.ones(7), persistent=False)


def specs(**shapes: list[int]) -> dict[str, TensorSpec]:
    return {
        name.replace("__", "."): TensorSpec(shape=tuple(shape), dtype=torch.float32) for name, shape in shapes.items()
    }


def test_tied_names_are_one_slot_and_transient_buffers_are_none() -> None:
    manifest = Manifest.of(Tied())
    assert [slot.names for slot in manifest.slots] == [("scale",), ("embed.weight", "head.weight")]
    assert manifest.index["embed.weight"] == manifest.index["head.weight"]


@pytest.mark.parametrize("name", ["embed__weight", "head__weight"])
def test_tied_group_is_covered_by_any_of_its_names(name: str) -> None:
    Manifest.of(Tied()).check(specs(scale=[2], **{name: [5, 3]}))


def test_missing_unexpected_and_misshapen_tensors_are_all_in_one_diff() -> None:
    offered = specs(head__weight=[5, 4], ghost=[1])
    with pytest.raises(ManifestError) as refused:
        Manifest.of(Tied()).check(offered)
    message = str(refused.value)
    assert "missing: scale [2]" in message
    assert "unexpected: ghost [1]" in message
    assert "wrong shape: head.weight: offered [5, 4], the engine holds [5, 3]" in message


def test_missing_tied_weight_is_shown_with_all_its_names() -> None:
    with pytest.raises(ManifestError, match=r"missing: embed.weight \[5, 3\] \(or head.weight, tied to it\)"):
        Manifest.of(Tied()).check(specs(scale=[2]))


def test_persistent_buffer_must_be_offered_and_transient_one_must_not() -> None:
    manifest = Manifest.of(Tied())
    with pytest.raises(ManifestError, match="missing: scale"):
        manifest.check(specs(embed__weight=[5, 3]))
    with pytest.raises(ManifestError, match="unexpected: scratch"):
        manifest.check(specs(embed__weight=[5, 3], scale=[2], scratch=[7]))


def test_another_float_type_is_accepted_and_integers_for_floats_are_not() -> None:
    manifest = Manifest.of(Tied())
    offered = specs(embed__weight=[5, 3], scale=[2])
    manifest.check({**offered, "scale": TensorSpec(shape=(2,), dtype=torch.bfloat16)})
    with pytest.raises(ManifestError, match=r"wrong dtype: scale: offered torch.int8, the engine holds torch.float32"):
        manifest.check({**offered, "scale": TensorSpec(shape=(2,), dtype=torch.int8)})


def test_long_diff_is_cut_with_a_count() -> None:
    with pytest.raises(ManifestError, match=r"unexpected: 15 more") as refused:
        Manifest.of(Tied()).check(specs(scale=[2], head__weight=[5, 3], **{f"x{i}": [1] for i in range(25)}))
    assert str(refused.value).count("unexpected: x") == 10


def test_state_that_is_no_tensor_is_refused() -> None:
    class WithExtraState(nn.Module):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 3}

    with pytest.raises(SyncError, match="_extra_state is a dict"):
        held_tensors(WithExtraState())


def test_module_offers_a_tied_weight_once() -> None:
    source = as_source(Tied())
    assert isinstance(source, WeightSource)
    assert list(source.specs()) == ["scale", "embed.weight"]


@pytest.mark.parametrize("source", ["weights.safetensors", 3, {"a": [1.0]}])
def test_source_of_another_kind_is_refused(source: object) -> None:
    with pytest.raises(SyncError, match=r"cannot publish a|only tensors"):
        as_source(source)


def staging_for(module: nn.Module) -> Staging:
    layout = Layout(Manifest.of(module), 64)
    return Staging(layout, empty_run(layout.num_bytes, torch.device("cpu"), zeroed=True))


def fill(staging: Staging, module: nn.Module) -> None:
    for held in held_tensors(module):
        staging.put(held.names[0], held.tensor)


def test_staging_casts_to_the_receivers_dtype() -> None:
    staging = staging_for(Tied().bfloat16())
    source = Tied()
    fill(staging, source)
    staging.seal()
    assert torch.equal(staging.layout.views(staging.run)[1], source.embed.weight.bfloat16())
    assert staging.num_bytes == 2 * (2 + 15)


def test_staging_made_in_inference_mode_can_be_written_outside_it() -> None:
    with torch.inference_mode():
        staging = staging_for(Tied())
        fill(staging, Tied())
    staging.clear()
    fill(staging, Tied())
    staging.seal()


def test_sealing_an_incomplete_staging_names_what_is_missing() -> None:
    staging = staging_for(Tied())
    staging.put("head.weight", torch.zeros(5, 3))
    with pytest.raises(ManifestError, match=r"missing: scale"):
        staging.seal()


def test_tensor_of_wrong_shape_is_refused_on_arrival() -> None:
    staging = staging_for(Tied())
    with pytest.raises(ManifestError, match=r"wrong shape: scale"):
        staging.put("scale", torch.zeros(2, 1))


def test_tied_names_must_carry_equal_values() -> None:
    staging = staging_for(Tied())
    staging.put("embed.weight", torch.zeros(5, 3))
    staging.put("head.weight", torch.zeros(5, 3))
    with pytest.raises(SyncError, match=r"head.weight differs"):
        staging.put("head.weight", torch.ones(5, 3))


def test_equal_means_equal_bytes() -> None:
    staging = staging_for(Tied())
    staging.put("scale", torch.tensor([float("nan"), 0.0]))
    staging.put("scale", torch.tensor([float("nan"), 0.0]))
    with pytest.raises(SyncError, match="scale differs"):
        staging.put("scale", torch.tensor([float("nan"), -0.0]))


def test_quantised_receiver_is_refused_with_the_remedy() -> None:
    marked = Tied()
    marked.is_quantized = True
    scaled = Tied()
    scaled.embed.weight.data = scaled.embed.weight.data.to(torch.float8_e4m3fn)
    for module, what in ((marked, "Tied is quantised"), (scaled, r"weight is quantised \(torch.float8_e4m3fn\)")):
        with pytest.raises(SyncError, match=what + ".*host the engine in float32"):
            Manifest.of(module)
