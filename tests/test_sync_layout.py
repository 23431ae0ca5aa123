"""Where bytes lie, and how they are cut and verified."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sync.layout import ALIGNMENT, Layout, digest, empty_run, seal
from sync.manifest import Manifest, Slot

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]

slots = st.builds(
    lambda shape, dtype: (tuple(shape), dtype),
    st.lists(st.integers(0, 7), max_size=3),
    st.sampled_from(DTYPES),
)
layouts = st.builds(
    lambda forms, bucket_bytes: Layout(
        Manifest(
            tuple(
                Slot(names=(f"t{index}",), shape=shape, dtype=dtype, device=torch.device("cpu"))
                for index, (shape, dtype) in enumerate(forms)
            )
        ),
        bucket_bytes,
    ),
    st.lists(slots, max_size=8),
    st.integers(1, 700),
)


@given(layouts)
def test_slots_lie_apart_in_order_at_aligned_places_inside_the_run(layout: Layout) -> None:
    end = 0
    for slot, offset in zip(layout.manifest.slots, layout.offsets, strict=False):
        assert offset >= end
        assert offset % ALIGNMENT == 0
        end = offset + math.prod(slot.shape) * slot.dtype.itemsize
    assert layout.num_bytes >= end


@given(layouts)
def test_buckets_cover_the_run_once_and_none_is_larger_than_asked(layout: Layout) -> None:
    edges = [0]
    for number, bucket in enumerate(layout.buckets):
        assert (bucket.index, bucket.start) == (number, edges[-1])
        assert bucket.num_bytes <= layout.bucket_bytes
        edges.append(bucket.stop)
    assert edges[-1] == layout.num_bytes
    assert layout.num_bytes == 0 or all(bucket.num_bytes for bucket in layout.buckets)


@given(layouts)
def test_views_write_into_the_run_and_have_the_receivers_form(layout: Layout) -> None:
    run = empty_run(layout.num_bytes, torch.device("cpu"), zeroed=True)
    for slot, view in zip(layout.manifest.slots, layout.views(run), strict=True):
        assert (tuple(view.shape), view.dtype) == (slot.shape, slot.dtype)
        view.fill_(1)
    written = sum(view.numel() for view in layout.views(run))
    assert sum(int(view.ne(0).sum()) for view in layout.views(run)) == written


@given(layouts, st.data())
def test_one_changed_byte_changes_the_digest_of_its_bucket_alone_and_the_seal(
    layout: Layout, data: st.DataObject
) -> None:
    if layout.num_bytes == 0:
        return
    run = empty_run(layout.num_bytes, torch.device("cpu"), zeroed=True)
    before = layout.digests(run)
    at = data.draw(st.integers(0, layout.num_bytes - 1))
    run[at] += 1
    after = layout.digests(run)
    changed = [index for index, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    assert changed == [at // layout.bucket_bytes]
    assert seal(before) != seal(after)


def test_digest_depends_on_bytes_not_on_where_they_lie() -> None:
    run = torch.arange(100, dtype=torch.uint8)
    assert digest(run[3:9]) == digest(run[3:9].clone()) != digest(run[4:10])


@pytest.mark.parametrize("num_bytes", [0, 5])
def test_a_run_starts_as_zeros_since_gaps_are_digested_too(num_bytes: int) -> None:
    assert empty_run(num_bytes, torch.device("cpu"), zeroed=True).tolist() == [0] * num_bytes
