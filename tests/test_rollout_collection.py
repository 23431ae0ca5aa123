"""What each event makes of samples and groups."""

import json

from rollout import FinishReason, Rollout, SamplingParams, VersionSpan
from rollout.batches.collection import Collection
from rollout.batches.entries import Ending
from rollout.batches.group_work import GroupWork, parse_sample_id
from rollout.batches.groups import Failure, FailureKind, Verdict
from rollout.batches.prompts import Prompt
from rollout.rollout_config import RolloutConfig
from rollout.workers.wire import Finished


def a_collection(**settings: object) -> Collection:
    config = RolloutConfig(**{"group_size": 3, "sampling": SamplingParams(max_new_tokens=10), **settings})
    return Collection(config, None, lambda work, ending: None)


def admitted(collection: Collection, number: int = 0) -> GroupWork:
    prompt = Prompt(number=number, prompt_id=f"p{number}", prompt_ids=[5, 6])
    work = collection.admit(prompt, version=0, now=0.0)
    assert work is not None
    return work


def rollout_of(rollout_id: str, *, tokens: int, attempt: int = 0, reason: FinishReason | None = None) -> Rollout:
    return Rollout(
        rollout_id=rollout_id,
        attempt=attempt,
        prompt_ids=[5, 6],
        token_ids=[7] * tokens,
        logprobs=[-1.0] * tokens,
        loss_mask=[1] * tokens,
        version_spans=[VersionSpan(0, 0)] if tokens else [],
        prefill_version=0,
        finish_reason=reason,
    )


def test_ids_are_read_back_and_those_of_others_are_not_taken_for_ours() -> None:
    assert parse_sample_id("g12-3") == (12, 0, 3)
    assert parse_sample_id("g12r2-3") == (12, 2, 3)
    for other in ("", "g12", "x1-2", "g-1", "g1r-2", "g1r2", "eval0-1", "g1-x"):
        assert parse_sample_id(other) is None


def test_a_whole_fresh_group_is_one_item_and_what_is_left_of_one_is_not() -> None:
    collection = a_collection()
    work = admitted(collection)
    samples = list(work.entry.samples.values())
    (item,) = collection.dispatch(work, samples, "w0", 0)
    assert (item.request_id, item.size, item.sample_index) == ("g0", 3, 0)
    for sample in samples[1:]:
        collection.fail(work, sample, Failure(kind=FailureKind.INFRA, reason="died"))
    items = collection.dispatch(work, samples[1:], "w1", 0)
    assert [(item.request_id, item.size, item.attempt) for item in items] == [("g0-1", 1, 1), ("g0-2", 1, 1)]


def test_a_prompts_columns_go_to_no_worker_with_a_partial() -> None:
    collection = a_collection()
    prompt = Prompt(number=0, prompt_id="p0", prompt_ids=[5, 6], metadata={"answer": 4})
    work = collection.admit(prompt, version=0, now=0.0)
    assert work is not None
    collection.dispatch(work, list(work.entry.samples.values()), "w0", 0)
    died = Finished(rollout=rollout_of("g0-0", tokens=4, reason=FinishReason.ERROR), attempt=0, incarnation=0)
    taken = collection.accept(died)
    assert taken is not None
    collection.fail(*taken, Failure(kind=FailureKind.INFRA, reason="died"))
    again = a_collection()
    again.load_state_dict(json.loads(json.dumps(collection.state_dict())), {0: prompt}, now=0.0)
    for books in (collection, again):
        (item,) = books.dispatch(books.works[0], [books.works[0].entry.samples[0]], "w0", 0)
        assert item.resume_from is not None
        assert item.resume_from.metadata == {}


def test_a_failure_of_a_worker_keeps_the_tokens_and_the_noise_and_one_of_the_sample_gets_others() -> None:
    collection = a_collection()
    work = admitted(collection)
    (first,) = collection.dispatch(work, list(work.entry.samples.values()), "w0", 0)
    died = Finished(
        rollout=rollout_of("g0-0", tokens=4, reason=FinishReason.ERROR),
        attempt=0,
        incarnation=0,
    )
    taken = collection.accept(died)
    assert taken is not None
    assert collection.fail(*taken, Failure(kind=FailureKind.INFRA, reason="died")) is Verdict.RETRY
    sample = work.entry.samples[0]
    (item,) = collection.dispatch(work, [sample], "w0", 0)
    assert item.resume_from is not None
    assert item.resume_from.token_ids == [7] * 4
    assert item.params.seed == first.params.seed
    taken = collection.accept(
        Finished(rollout=rollout_of("g0-0", tokens=9, reason=FinishReason.STOP), attempt=1, incarnation=0)
    )
    assert taken is not None
    assert collection.fail(*taken, Failure(kind=FailureKind.DATA, reason="no reward")) is Verdict.RETRY
    (item,) = collection.dispatch(work, [sample], "w0", 0)
    assert item.resume_from is None
    assert item.params.seed != first.params.seed


def test_a_partial_of_another_round_or_worker_is_not_gone_on_from() -> None:
    collection = a_collection()
    work = admitted(collection)
    collection.dispatch(work, list(work.entry.samples.values()), "w0", 0)
    collection.note_partial(rollout_of("g0-0", tokens=3), "w1")
    collection.note_partial(rollout_of("g0-1", tokens=10), "w0")
    collection.note_partial(rollout_of("g0-2", tokens=3), "w0")
    assert sorted(work.partials) == [2], "another worker's, a full one, and a good one"
    renewed = collection.expire(work, version=1, now=0.0)
    assert renewed is not None
    collection.dispatch(renewed, list(renewed.entry.samples.values()), "w0", 0)
    collection.note_partial(rollout_of("g0-0", tokens=3), "w0")
    assert renewed.partials == {}
    assert sorted(collection.cancelled) == [("w0", "g0-0"), ("w0", "g0-1"), ("w0", "g0-2")]


def test_infrastructure_and_data_have_budgets_of_their_own() -> None:
    collection = a_collection(max_infra_retries=2, max_data_retries=1)
    work = admitted(collection)
    sample = work.entry.samples[0]
    verdicts = []
    for kind in [FailureKind.INFRA, FailureKind.DATA, FailureKind.INFRA, FailureKind.DATA]:
        collection.dispatch(work, [sample], "w0", 0)
        verdicts.append(collection.fail(work, sample, Failure(kind=kind, reason="failed")))
    assert verdicts == [Verdict.RETRY, Verdict.RETRY, Verdict.RETRY, Verdict.SHRINK]
    assert sorted(work.entry.samples) == [1, 2]
    assert collection.ledger.ended["samples"][Ending.FAILED] == 1
    collection.ledger.check()


def test_a_group_that_shrinks_below_its_minimum_is_dropped() -> None:
    collection = a_collection(max_infra_retries=0, min_group_size=2)
    work = admitted(collection)
    collection.dispatch(work, list(work.entry.samples.values()), "w0", 0)
    died = Failure(kind=FailureKind.INFRA, reason="died")
    assert collection.fail(work, work.entry.samples[0], died) is Verdict.SHRINK
    assert collection.fail(work, work.entry.samples[1], died) is Verdict.DROP
    assert collection.works == {}
    assert collection.ledger.ended["samples"][Ending.FAILED] == 3
    collection.ledger.check()


def test_a_prompt_that_cannot_work_is_never_refilled() -> None:
    collection = a_collection(on_failed_sample="refill", min_group_size=1)
    work = admitted(collection)
    collection.dispatch(work, list(work.entry.samples.values()), "w0", 0)
    for index in range(3):
        collection.fail(work, work.entry.samples[index], Failure(kind=FailureKind.HOPELESS, reason="too long"))
    assert collection.works == {}
    assert collection.ledger.issued["samples"] == 3
