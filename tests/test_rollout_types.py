"""SamplingParams refuses what cannot work; a Rollout's parts agree; version spans are what per-token versions say."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout import InvalidRequestError, Rollout, SamplingParams, VersionSpan
from rollout.requests.inflight import stamp, trim

REFUSED_PARAMS = [
    ("max_new_tokens", 0, "at least 1"),
    ("max_new_tokens", -1, "at least 1"),
    ("max_new_tokens", None, "must be an integer"),
    ("max_new_tokens", True, "must be an integer"),
    ("max_new_tokens", 2.5, "must be an integer"),
    ("max_new_tokens", 2.0, "must be an integer"),
    ("max_new_tokens", "5", "must be an integer"),
    ("temperature", "1", "must be a number"),
    ("temperature", b"1", "must be a number"),
    ("temperature", None, "must be a number"),
    ("temperature", True, "must be a number"),
    ("temperature", [1.0], "must be a number"),
    ("temperature", torch.ones(2), "must be a number"),
    ("temperature", 1j, "must be a number"),
    ("temperature", float("nan"), "must be finite"),
    ("temperature", float("inf"), "must be finite"),
    ("temperature", -1, "at least 0"),
    ("temperature", 1e-5, "use 0 for greedy"),
    ("top_k", -1, "at least 0"),
    ("top_k", 1.5, "must be an integer"),
    ("top_k", None, "must be an integer"),
    ("top_k", True, "must be an integer"),
    ("top_p", 0, r"in \(0, 1\]"),
    ("top_p", -0.1, r"in \(0, 1\]"),
    ("top_p", 1.5, r"in \(0, 1\]"),
    ("top_p", float("nan"), "must be finite"),
    ("top_p", None, "must be a number"),
    ("stop_token_ids", [-1], "at least 0"),
    ("stop_token_ids", [1.5], "must be an integer"),
    ("stop_token_ids", [True], "must be an integer"),
    ("stop_token_ids", [None], "must be an integer"),
    ("stop_token_ids", ["</s>"], "must be an integer"),
    ("stop_token_ids", "</s>", "list of token ids"),
    ("stop_token_ids", b"ab", "list of token ids"),
    ("stop_token_ids", bytearray(b"ab"), "list of token ids"),
    ("stop_token_ids", {1}, "list of token ids"),
    ("stop_token_ids", 1, "list of token ids"),
    ("stop", "###", "list of non-empty strings"),
    ("stop", None, "list of non-empty strings"),
    ("stop", 5, "list of non-empty strings"),
    ("stop", [""], "list of non-empty strings"),
    ("stop", [1], "list of non-empty strings"),
    ("seed", -1, "at least 0"),
    ("seed", 2**63, "below"),
    ("seed", 1.5, "must be an integer"),
    ("seed", True, "must be an integer"),
    ("seed", "7", "must be an integer"),
]


@pytest.mark.parametrize(("name", "value", "remedy"), REFUSED_PARAMS, ids=lambda x: repr(x)[:24])
def test_a_sampling_parameter_that_cannot_work_is_refused_by_name_and_value(
    name: str, value: object, remedy: str
) -> None:
    with pytest.raises(InvalidRequestError, match=remedy) as refusal:
        SamplingParams(**{name: value})
    shown = value[0] if isinstance(value, list) and name == "stop_token_ids" else value
    number = str(shown.item()) if isinstance(shown, torch.Tensor) and shown.numel() == 1 else repr(shown)
    assert number in str(refusal.value), "the message shows what was passed"
    assert name.removesuffix("s").replace("_", " ") in str(refusal.value).replace("_", " ")


def test_a_temperature_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="temperature must be a number"):
        SamplingParams(temperature=10**400)


def test_numbers_of_other_libraries_become_plain_ones() -> None:
    params = SamplingParams(
        max_new_tokens=np.int64(3),
        temperature=np.float32(0.5),
        top_k=torch.tensor(4),
        top_p=torch.tensor(0.5),
        stop_token_ids=[np.int32(7), torch.tensor(8)],
        seed=np.int64(9),
    )
    plain = SamplingParams(max_new_tokens=3, temperature=0.5, top_k=4, top_p=0.5, stop_token_ids=(7, 8), seed=9)
    assert params == plain
    kinds = [type(getattr(params, name)) for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")]
    assert kinds == [int, float, int, float, int]
    assert [type(token) for token in params.stop_token_ids] == [int, int]


def test_an_integer_temperature_is_a_temperature() -> None:
    assert SamplingParams(temperature=1).temperature == 1.0
    assert isinstance(SamplingParams(temperature=1).temperature, float)


def test_a_later_change_of_the_callers_list_changes_nothing() -> None:
    stop = [3]
    params = SamplingParams(stop_token_ids=stop)
    stop.append(-5)
    assert params.stop_token_ids == (3,)


def make(**changes: object) -> Rollout:
    fields: dict[str, object] = {
        "rollout_id": "r",
        "prompt_ids": [5],
        "token_ids": [7, 8, 9],
        "logprobs": [-0.1, -0.2, -0.3],
        "loss_mask": [1, 1, 1],
        "version_spans": [VersionSpan(0, 2), VersionSpan(2, 5)],
        "prefill_version": 2,
        "finish_reason": None,
    }
    return Rollout(**{**fields, **changes})


def test_versions_of_a_rollout_follow_its_spans() -> None:
    rollout = make()
    assert (rollout.versions, rollout.min_version, rollout.max_version) == ([2, 2, 5], 2, 5)


@pytest.mark.parametrize(
    ("prefill_version", "versions", "spans_update"),
    [(2, [2, 2], False), (2, [2, 5], True), (2, [5, 5], True), (5, [2, 5], True), (2, [], False), (None, [], False)],
)
def test_an_update_met_a_rollout_whose_prompt_and_tokens_are_of_several_versions(
    prefill_version: int | None, versions: list[int], spans_update: bool
) -> None:
    spans = [VersionSpan(first, version) for first, version in enumerate(versions) if version not in versions[:first]]
    num_tokens = len(versions)
    per_token = {"token_ids": [1] * num_tokens, "logprobs": [-1.0] * num_tokens, "loss_mask": [1] * num_tokens}
    assert make(prefill_version=prefill_version, version_spans=spans, **per_token).spans_update is spans_update


def test_a_rollout_without_tokens_has_no_versions() -> None:
    rollout = make(token_ids=[], logprobs=[], loss_mask=[], version_spans=[])
    assert (rollout.versions, rollout.min_version, rollout.max_version) == ([], None, None)


INCONSISTENT = {
    "a log-prob is missing": {"logprobs": [-0.1, -0.2]},
    "a mask entry is missing": {"loss_mask": [1, 1]},
    "no span": {"version_spans": []},
    "no token under the first version": {"version_spans": [VersionSpan(1, 2)]},
    "starts decrease": {"version_spans": [VersionSpan(0, 1), VersionSpan(2, 2), VersionSpan(1, 3)]},
    "an empty span": {"version_spans": [VersionSpan(0, 1), VersionSpan(0, 2)]},
    "the version stays": {"version_spans": [VersionSpan(0, 1), VersionSpan(1, 1)]},
    "the version falls": {"version_spans": [VersionSpan(0, 2), VersionSpan(1, 1)]},
    "a span behind the last token": {"version_spans": [VersionSpan(0, 1), VersionSpan(3, 2)]},
    "a span without tokens": {"token_ids": [], "logprobs": [], "loss_mask": []},
}


@pytest.mark.parametrize("changes", INCONSISTENT.values(), ids=INCONSISTENT)
def test_a_rollout_whose_parts_disagree_cannot_be_made(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"span|equally many"):
        make(**changes)


def test_a_rollout_cannot_be_made_inconsistent_by_replace() -> None:
    with pytest.raises(ValueError, match="equally many"):
        replace(make(), token_ids=[1])


# An update is (tokens sampled since the one before, step of the version); what follows the last is `tail`.
UPDATES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), max_size=8)


@given(first=st.integers(0, 5), updates=UPDATES, tail=st.integers(0, 4))
def test_stamped_spans_say_what_a_list_of_versions_says(first: int, updates: list[tuple[int, int]], tail: int) -> None:
    spans, naive, version = [VersionSpan(0, first)], [], first
    for sampled, step in updates:
        naive += [version] * sampled
        version += step
        spans = stamp(spans, len(naive), version)
    naive += [version] * tail
    for num_tokens in range(len(naive) + 1):  # a stop may cut the rollout anywhere
        rollout = make(
            token_ids=[7] * num_tokens,
            logprobs=[-0.1] * num_tokens,
            loss_mask=[1] * num_tokens,
            version_spans=trim(spans, num_tokens),
        )
        assert rollout.versions == naive[:num_tokens]


def test_stamp_and_trim_leave_their_argument_alone() -> None:
    spans = [VersionSpan(0, 1), VersionSpan(3, 2)]
    before = list(spans)
    stamp(spans, 1, 9)
    trim(spans, 1)
    assert spans == before
