"""A soak: random operations from several threads at one engine, checked against what must hold whatever happens.

Every accepted request ends once; its tokens are those of the versions it says; its log-probs are a plain forward's
wherever one set of weights stands behind a token; a stream's tokens are its rollout's; and in the end nothing is left in
any structure, block of the cache or byte of memory. `pytest -m slow` runs it for half an hour, or for as many seconds as
ROLLSYNC_SOAK_S says.
"""

import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import psutil
import pytest
import torch
from fakes import mark, marker_llama, random_prompts, tiny_gemma3, tiny_llama, wait_until
from test_rollout_lifecycle import sizes_of
from test_rollout_longlife import Letters
from transformers import PreTrainedModel

from rollout import (
    EngineConfig,
    EngineState,
    EngineStateError,
    FinishReason,
    GenerationEngine,
    InvalidRequestError,
    Rollout,
    RolloutError,
    SamplingParams,
)
from rollout.requests.delivery import RolloutFuture, TokenStream

SHORT_S = 6.0
LONG_S = float(os.environ.get("ROLLSYNC_SOAK_S", "1800"))
MAX_OUTSTANDING = 40
NUM_DEATHS = 2
MEMORY_BOUND = 48 << 20
"""What the process may grow by after its warm-up, in bytes. A leak of one KV cache or of a few rollouts a second is more."""


@dataclass(frozen=True)
class Kind:
    """What soaks: a model whose weights of version k are known, and how to check a rollout against them."""

    make: Callable[[], PreTrainedModel]
    write: Callable[[torch.nn.Module, int], None]
    """Puts the weights of a version in place."""
    says_its_version: bool
    kv_at_update: str


def say(model: torch.nn.Module, version: int) -> None:
    """In place: the model says token `version`, in a vocabulary of 64."""
    mark(model, version % 64)


def scatter(model: torch.nn.Module, version: int) -> None:
    """In place: random weights that depend on the version alone."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


KINDS = {
    "versions": Kind(marker_llama, say, True, "keep"),
    "versions, refreshed": Kind(marker_llama, say, True, "refresh"),
    "numbers": Kind(tiny_llama, scatter, False, "keep"),
    "numbers, refreshed, sliding window": Kind(tiny_gemma3, scatter, False, "refresh"),
}


@dataclass(eq=False)
class Ticket:
    """One accepted request."""

    future: RolloutFuture
    params: SamplingParams
    num_resumed: int = 0
    stream: TokenStream | None = None
    calls: list[Rollout] = field(default_factory=list)


class BurnsDownError(Exception):
    """Kills the loop."""


class Soak:
    """One run: `run()` drives the engine for a while, then checks what is left of it."""

    def __init__(self, kind: Kind, seed: int, seconds: float) -> None:
        self.kind, self.seed, self.seconds = kind, seed, seconds
        self.random = random.Random(seed)
        model = kind.make()
        kind.write(model, 0)
        self.reference, self.reference_version = kind.make(), -1
        config = EngineConfig(
            page_size=4,
            num_blocks=50,  # hardly more than the largest request needs, so that others lose theirs
            max_batch_tokens=24,
            max_requests=8,
            max_waiting=30,
            kv_at_update=kind.kv_at_update,
        )
        self.engine = GenerationEngine(model, config, tokenizer=Letters())
        self.engine.model.register_forward_pre_hook(self._maybe_burn)
        self.burning = threading.Event()
        self.done = threading.Event()
        self.lock = threading.Condition()
        self.open: set[Ticket] = set()
        self.ended: list[Ticket] = []
        self.partials: list[Rollout] = []
        self.num_accepted = self.num_calls = self.num_checked_logprobs = 0
        self.worst_logprob = 0.0
        self.counts: Counter[str] = Counter()
        self.failures: list[BaseException] = []

    # ------------------------------------------------------------------------------------------------- the operations

    def run(self) -> str:
        threads = [
            threading.Thread(target=self._pester, args=(number,), name=f"pester-{number}", daemon=True)
            for number in range(2)
        ]
        began = time.monotonic()
        deaths = [began + self.seconds * (number + 1) / (NUM_DEATHS + 1) for number in range(NUM_DEATHS)]
        warm_at, warm = began + max(self.seconds / 4, 2.0), 0
        operations = [self.submit] * 8 + [self.submit_group] * 3 + [self.cancel] * 4 + [self.cancel_many]
        operations += [self.stream] * 2 + [self.resume] * 3 + [self.update] * 3 + [self.break_update, self.look]
        with self.engine:
            for thread in threads:
                thread.start()
            try:
                while time.monotonic() < began + self.seconds and not self.failures:
                    self.random.choice(operations)(self.random)
                    self._make_room(MAX_OUTSTANDING)
                    self._check_ended()
                    if deaths and time.monotonic() > deaths[0]:
                        deaths.pop(0)
                        self.die()
                    if not warm and time.monotonic() > warm_at:
                        warm = resident()
            finally:
                self.done.set()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive(), f"{thread.name} hangs"
            self._make_room(0)
            self._check_ended()
            if self.failures:
                raise self.failures[0]
            grown = resident() - warm
            self._check_what_is_left()
        assert grown < MEMORY_BOUND, f"the process has grown by {grown >> 20} MiB since it was warm"
        return (
            f"{self.seconds:.0f} s, seed {self.seed}: {self.num_accepted} requests, {dict(sorted(self.counts.items()))}, "
            f"version {self.engine.version}, {self.engine.stats().generated_tokens} tokens, "
            f"{self.engine.stats().preemptions} preemptions, {self.num_checked_logprobs} log-probs within "
            f"{self.worst_logprob:.1e}, grown by {grown >> 10} KiB"
        )

    def submit(self, rng: random.Random) -> None:
        params = self._params(rng)
        timeout_s = rng.choice([None, None, None, 1e-4, 0.01, 0.1])
        self._accept(lambda: [self.engine.submit(self._prompt(rng), params, timeout_s=timeout_s)], params)

    def submit_group(self, rng: random.Random) -> None:
        params, size = self._params(rng), rng.choice([1, 2, 3, 5, 8, 11])
        timeout_s = rng.choice([None, None, None, 0.02])
        prompt = self._prompt(rng)
        self._accept(lambda: self.engine.submit_group(prompt, params, size=size, timeout_s=timeout_s), params)

    def stream(self, rng: random.Random) -> None:
        params = self._params(rng)
        streams: list[TokenStream] = []

        def submit() -> list[RolloutFuture]:
            streams.append(self.engine.stream(self._prompt(rng), params))
            assert streams[0].future is not None
            return [streams[0].future]

        tickets = self._accept(submit, params, streams)
        if tickets and rng.random() < 0.3:
            streams[0].close()

    def resume(self, rng: random.Random) -> None:
        with self.lock:
            if not self.partials:
                return
            partial = self.partials.pop(rng.randrange(len(self.partials)))
        params = self._params(rng)
        num_resumed = len(partial.token_ids)
        if num_resumed < params.max_new_tokens:
            resume = lambda: [self.engine.submit(partial.prompt_ids, params, resume_from=partial)]  # noqa: E731
            self._accept(resume, params, num_resumed=num_resumed)
            self.counts["resumed"] += 1

    def cancel(self, rng: random.Random) -> None:
        with self.lock:
            ticket = rng.choice(list(self.open)) if self.open else None
        if ticket is None:
            return
        if rng.random() < 0.5:
            ticket.future.cancel()
        else:
            with suppress(InvalidRequestError):  # it has ended in the meantime
                self.engine.cancel(ticket.future.request_id)

    def cancel_many(self, rng: random.Random) -> None:
        with self.lock:
            tickets = rng.sample(list(self.open), len(self.open) // 2)
        for ticket in tickets:
            ticket.future.cancel()

    def update(self, rng: random.Random) -> None:
        def commit(engine: GenerationEngine) -> None:
            with engine.update() as model:
                self.kind.write(model, engine.version + 1)

        try:
            if rng.random() < 0.5:
                commit(self.engine)
            else:
                self.engine.call(commit).result(60)
        except EngineStateError:
            self.counts["refused update"] += 1  # dead at that moment

    def break_update(self, rng: random.Random) -> None:
        """Fences the engine, and repairs it."""
        try:
            with self.engine.update() as model:
                self.kind.write(model, 1000 + rng.randrange(1000))
                raise BurnsDownError
        except BurnsDownError:
            self.counts["broken update"] += 1
            self.update(rng)
        except EngineStateError:
            pass

    def look(self, rng: random.Random) -> None:
        self.engine.stats()
        try:
            snapshot = self.engine.snapshot()
        except RolloutError:
            return  # dead at that moment
        for rollout in snapshot:
            assert rollout.finish_reason is None
            self._check_versions(rollout)

    def die(self) -> None:
        self.burning.set()
        # something must run for the loop to die of it
        while self.engine.state != EngineState.DEAD:
            try:
                self.engine.submit([5], SamplingParams(max_new_tokens=1)).add_done_callback(self._count_extra)
            except EngineStateError:
                self.update(self.random)  # fenced, or dead by now
            else:
                self.num_accepted += 1
            self._make_room(0)
        self.burning.clear()
        self.engine.restart()
        self.counts["death"] += 1

    def _count_extra(self, _: object) -> None:
        self.num_calls += 1

    def _pester(self, number: int) -> None:
        rng = random.Random(self.seed * 10 + number)
        operations = [self.look, self.cancel, self.cancel, self.update, self.submit, self.submit_group]
        try:
            while not self.done.wait(rng.random() * 0.05):
                rng.choice(operations)(rng)
                self._make_room(MAX_OUTSTANDING)
        except BaseException as failure:
            self.failures.append(failure)

    def _maybe_burn(self, *_: object) -> None:
        if self.burning.is_set():
            raise BurnsDownError

    def _prompt(self, rng: random.Random) -> list[int]:
        # few different ones, so that prefixes are found and shared
        return random_prompts([rng.choice([1, 2, 3, 4, 5, 8, 9, 20, 33, 50, 70])], seed=rng.randrange(3))[0]

    def _params(self, rng: random.Random) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=rng.choice([1, 2, 5, 20, 60, 120]),
            temperature=rng.choice([0, 0.7, 1.0, 1.0]),
            top_k=rng.choice([0, 0, 0, 5]),
            seed=rng.choice([None, 7]),
            stop_token_ids=rng.choice([(), (), None]),
            stop=rng.choice([(), (), (), ("ddddd",), ("ab", "eE")]),
        )

    def _accept(
        self,
        submit: Callable[[], list[RolloutFuture]],
        params: SamplingParams,
        streams: list[TokenStream] | None = None,
        num_resumed: int = 0,
    ) -> list[Ticket]:
        try:
            futures = submit()
        except EngineStateError:
            self.counts["refused"] += 1  # dead or fenced at that moment
            return []
        tickets = [Ticket(future, params, num_resumed) for future in futures]
        if streams:
            tickets[0].stream = streams[0]
        with self.lock:
            self.num_accepted += len(tickets)
            self.open.update(tickets)
        for ticket in tickets:
            ticket.future.add_done_callback(lambda future, ticket=ticket: self._on_done(ticket, future.result()))
        return tickets

    def _on_done(self, ticket: Ticket, rollout: Rollout) -> None:
        with self.lock:
            self.num_calls += 1
            ticket.calls.append(rollout)
            self.open.discard(ticket)
            self.ended.append(ticket)
            self.lock.notify_all()

    def _make_room(self, at_most: int) -> None:
        with self.lock:
            assert self.lock.wait_for(lambda: len(self.open) <= at_most, 60), (
                f"{len(self.open)} requests did not end: {self.engine.stats()}"
            )

    # --------------------------------------------------------------------------------------------------- the checks

    def _check_ended(self) -> None:
        with self.lock:
            tickets, self.ended = self.ended, []
        for ticket in tickets:
            assert len(ticket.calls) == 1, "a future resolved twice"
            rollout = ticket.calls[0]
            self.counts[str(rollout.finish_reason)] += 1
            assert len(rollout.token_ids) <= ticket.params.max_new_tokens
            assert (
                rollout.finish_reason != FinishReason.LENGTH or len(rollout.token_ids) == ticket.params.max_new_tokens
            )
            assert len(rollout.token_ids) >= ticket.num_resumed
            if rollout.finish_reason == FinishReason.ERROR:
                assert "BurnsDownError" in (rollout.error or ""), rollout.error
            if ticket.stream is not None:
                assert list(ticket.stream) == rollout.token_ids, "a stream is not its rollout"
            self._check_versions(rollout)
            if not self.kind.says_its_version and not rollout.renormalised:
                self._check_logprobs(ticket, rollout)
            if rollout.finish_reason in {FinishReason.ABORT, FinishReason.TIMEOUT, FinishReason.ERROR}:
                self.partials = [*self.partials[-30:], rollout]

    def _check_versions(self, rollout: Rollout) -> None:
        if self.kind.says_its_version:
            assert rollout.token_ids == [version % 64 for version in rollout.versions], rollout

    def _check_logprobs(self, ticket: Ticket, rollout: Rollout) -> None:
        """Of the tokens with weights of one version behind them: refreshed, all; else those of the prefill's version."""
        refreshed = self.kind.kv_at_update == "refresh"
        versions = rollout.versions
        for version in sorted(set(versions[ticket.num_resumed :])):
            if not refreshed and version != rollout.prefill_version:
                continue
            if version != self.reference_version:
                self.kind.write(self.reference, version)
                self.reference_version = version
            with torch.no_grad():
                logits = self.reference(torch.tensor([rollout.prompt_ids + rollout.token_ids])).logits[0].float()
            scaled = logits[len(rollout.prompt_ids) - 1 : -1] / (ticket.params.temperature or 1.0)
            tokens = torch.tensor(rollout.token_ids)
            expected = scaled.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
            chosen = torch.tensor([v == version for v in versions])
            chosen[: ticket.num_resumed] = False
            errors = (expected - torch.tensor(rollout.logprobs)).abs()[chosen]
            self.num_checked_logprobs += len(errors)
            self.worst_logprob = max(self.worst_logprob, float(errors.max()))
            assert errors.max() < 1e-4, (version, rollout)

    def _check_what_is_left(self) -> None:
        engine = self.engine
        with engine.update() as model:  # nothing is kept for sharing across it
            self.kind.write(model, engine.version + 1)
        wait_until(lambda: not any(sizes_of(engine).values()))
        assert self.num_calls == self.num_accepted
        stats = engine.stats()
        assert (stats.active, stats.waiting, stats.kv_used) == (0, 0, 0.0)
        assert stats.finished == self.num_accepted
        scheduler = engine.manager.batch_processor.scheduler
        assert not scheduler.cancelled_unborn
        for allocator in engine.manager.batch_processor.cache.cache_allocators.values():
            assert not any(vars(allocator.ledger).values()), vars(allocator.ledger)
        rollout = engine.submit([5], SamplingParams(max_new_tokens=4, temperature=0, stop_token_ids=())).result(30)
        self._check_versions(rollout)


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def soak(kind: str, seed: int, seconds: float) -> None:
    run = Soak(KINDS[kind], seed, seconds)
    try:
        print(f"{kind}: {run.run()}")
    except BaseException:
        print(f"the soak {kind!r} failed with seed {seed} after {run.num_accepted} requests, {dict(run.counts)}")
        raise


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_wrong_or_left_behind_under_random_operations(kind: str) -> None:
    soak(kind, seed=1, seconds=SHORT_S)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_wrong_or_left_behind_in_a_long_life(kind: str) -> None:
    soak(kind, seed=random.SystemRandom().randrange(10**6), seconds=LONG_S / len(KINDS))
