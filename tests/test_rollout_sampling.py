"""The sampler draws from the distribution it reports, and from no randomness but its own."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from fakes import VOCAB_SIZE, random_prompts, tiny_llama

from rollout import EngineConfig, GenerationEngine, SamplingParams
from rollout.model.sampling import SamplingRow, draw_uniforms, keyed_uniform, pack_rows, sample

JUST_BELOW_ONE = 1 - 2**-48
UNIFORMS = [0.0, 2**-48, 0.2, 0.5, 0.77, 0.999, JUST_BELOW_ONE]


def logits_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def random_logits(num_rows: int, vocab: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def draw(logits: torch.Tensor, row: SamplingRow, uniforms: list[float]) -> tuple[list[int], torch.Tensor]:
    """One draw from logits [vocab] for each uniform number."""
    packed = pack_rows([row] * len(uniforms), uniforms)
    tokens, logprobs = sample(logits.expand(len(uniforms), -1), packed)
    return tokens.tolist(), logprobs


def grid(count: int) -> list[float]:
    return [(i + 0.5) / count for i in range(count)]


# ------------------------------------------------------------------------------------------------------- one token


def test_temperature_zero_takes_the_most_likely_token_whatever_is_drawn() -> None:
    logits = random_logits(5)
    for uniform in UNIFORMS:
        packed = pack_rows([SamplingRow(temperature=0, top_k=3, top_p=0.1)] * 5, [uniform] * 5)
        for shortcut in (True, False):
            tokens, logprobs = sample(logits, packed, any_random=shortcut, any_filter=shortcut)
            assert tokens.tolist() == logits.argmax(-1).tolist()
            expected = logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(logprobs, expected)


@pytest.mark.parametrize("temperature", [0.001, 0.3, 0.7, 1.0, 2.5, 1e6, 1e30])
def test_logprobs_are_those_of_the_scaled_logits(temperature: float) -> None:
    logits = random_logits(1)[0]
    tokens, logprobs = draw(logits, SamplingRow(temperature=temperature), UNIFORMS)
    torch.testing.assert_close(logprobs, (logits / temperature).log_softmax(-1)[tokens])


def test_top_k_keeps_k_tokens_and_renormalises() -> None:
    logits = random_logits(1)[0]
    for k in (1, 2, 5, VOCAB_SIZE):
        kept = logits.topk(k).indices
        tokens, logprobs = draw(logits, SamplingRow(temperature=0.7, top_k=k), grid(200) + UNIFORMS)
        assert set(tokens) <= set(kept.tolist())
        whole = torch.full_like(logits, -torch.inf)
        whole[kept] = logits[kept] / 0.7
        torch.testing.assert_close(logprobs, whole.log_softmax(-1)[tokens])


def test_top_p_keeps_the_smallest_set_that_reaches_p_and_renormalises() -> None:
    probs = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])
    for p, kept in [
        (0.3, [1]),
        (0.41, [1, 3]),
        (0.64, [1, 3]),
        (0.7, [1, 3, 4]),
        (0.94, [1, 3, 4, 0]),
        (1.0, range(5)),
    ]:
        tokens, logprobs = draw(probs.log(), SamplingRow(top_p=p), grid(400) + UNIFORMS)
        assert set(tokens) == set(kept), p
        torch.testing.assert_close(logprobs, (probs / probs[list(kept)].sum()).log()[tokens])


def test_top_p_counts_within_what_top_k_keeps() -> None:
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    tokens, _ = draw(probs.log(), SamplingRow(top_k=2, top_p=0.5), grid(100))
    assert set(tokens) == {0}, "0.4 of 0.7 is more than a half"


def test_top_k_1_is_the_greedy_token() -> None:
    logits = random_logits(20)
    tokens, logprobs = sample(logits, pack_rows([SamplingRow(top_k=1)] * 20, [0.99] * 20))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert logprobs.abs().max() < 1e-6, "nothing else could be drawn"


def test_top_k_beyond_the_vocabulary_and_beyond_an_int32_is_off() -> None:
    logits = random_logits(1)[0]
    plain = draw(logits, SamplingRow(), UNIFORMS)
    for k in (0, VOCAB_SIZE, VOCAB_SIZE + 1, 2**31, 2**70):
        tokens, logprobs = draw(logits, SamplingRow(top_k=k), UNIFORMS)
        assert tokens == plain[0]
        assert torch.equal(logprobs, plain[1])


@pytest.mark.parametrize("top_p", [1e-6, 1e-50, 5e-324])
def test_a_top_p_that_rounds_to_zero_keeps_the_most_likely_token(top_p: float) -> None:
    logits = random_logits(1)[0]
    tokens, logprobs = draw(logits, SamplingRow(top_p=top_p), UNIFORMS)
    assert set(tokens) == {int(logits.argmax())}
    assert logprobs.abs().max() < 1e-6


def test_logits_that_are_not_numbers_raise_nothing() -> None:
    for row in (SamplingRow(), SamplingRow(top_k=3), SamplingRow(top_p=0.5), SamplingRow(temperature=0)):
        tokens, _ = draw(torch.full((VOCAB_SIZE,), torch.nan), row, UNIFORMS)
        assert all(0 <= token < VOCAB_SIZE for token in tokens)


def test_a_token_without_probability_is_never_drawn() -> None:
    inf = torch.inf
    logits = logits_of([-inf, 0.0, -inf, -inf, 1.0, -200.0, -inf])[0]  # exp(-200) is 0 in float32
    for row in (SamplingRow(), SamplingRow(top_k=6), SamplingRow(top_p=0.999999)):
        tokens, logprobs = draw(logits, row, [*UNIFORMS, *grid(100)])
        assert set(tokens) == {1, 4}
        assert logprobs.isfinite().all()
    assert draw(logits, SamplingRow(), [0.0])[0] == [1]
    assert draw(logits, SamplingRow(), [JUST_BELOW_ONE])[0] == [4]


def test_the_last_token_of_a_large_vocabulary_is_drawn_as_often_as_it_should_be() -> None:
    vocab = 2**17
    tokens, logprobs = draw(torch.zeros(vocab), SamplingRow(), [0.0, 0.5, 1 - 0.5 / vocab, JUST_BELOW_ONE])
    assert tokens[0] == 0
    assert abs(tokens[1] - vocab // 2) <= vocab // 1000
    assert tokens[2:] == [vocab - 1, vocab - 1]
    torch.testing.assert_close(logprobs, torch.full((4,), -math.log(vocab)))


def test_frequencies_are_the_probabilities() -> None:
    logits = logits_of([0.3, -1.0, 2.0, 0.0, 1.0, -3.0])[0]
    for row in (SamplingRow(temperature=0.8), SamplingRow(temperature=1.5, top_k=4), SamplingRow(top_p=0.9)):
        count = 20_000
        uniforms = [keyed_uniform(7, 0, position) for position in range(count)]
        tokens, logprobs = draw(logits, row, uniforms)
        said = {token: math.exp(logprob) for token, logprob in zip(tokens, logprobs.tolist(), strict=True)}
        assert sum(said.values()) == pytest.approx(1, abs=1e-4), "every token that can be drawn was"
        chi_square = sum((tokens.count(t) - count * p) ** 2 / (count * p) for t, p in said.items())
        assert chi_square < 30, "at five degrees of freedom, chance gives more than 30 once in 60,000"


def test_rows_of_one_batch_are_sampled_as_if_alone() -> None:
    temperatures, ks, ps = [0.0, 0.5, 1.0], [0, 1, 3], [1.0, 0.5]
    rows = [SamplingRow(temperature=t, top_k=k, top_p=p) for t, k, p in itertools.product(temperatures, ks, ps)]
    logits = random_logits(len(rows))
    uniforms = [keyed_uniform(1, i, 0) for i in range(len(rows))]
    tokens, logprobs = sample(logits, pack_rows(rows, uniforms))
    for i, row in enumerate(rows):
        shortcuts = {"any_random": row.temperature > 0, "any_filter": row.top_k > 0 or row.top_p < 1}
        token, logprob = sample(logits[i : i + 1], pack_rows([row], uniforms[i : i + 1]), **shortcuts)
        assert tokens[i] == token[0], row
        torch.testing.assert_close(logprobs[i], logprob[0])


# ------------------------------------------------------------------------------------------------- uniform numbers


def test_a_keyed_uniform_number_depends_on_its_keys_alone() -> None:
    first = [keyed_uniform(3, 4, position) for position in range(20)]
    np.random.default_rng(0).random(1000)
    assert first == [keyed_uniform(3, 4, position) for position in range(20)]


def test_each_key_gives_another_uniform_number() -> None:
    keys = itertools.product([0, 1, 2, 2**63 - 1], [0, 1, 2, 2**63 - 1], [0, 1, 2, 2**40])
    numbers = [keyed_uniform(*key) for key in keys]
    assert len(set(numbers)) == len(numbers)


def test_uniform_numbers_lie_in_the_half_open_unit_interval_and_fill_it() -> None:
    generator = np.random.default_rng(0)
    seeded = draw_uniforms([(SamplingRow(seed=5), i) for i in range(2000)], generator)
    own = draw_uniforms([(SamplingRow(), i) for i in range(2000)], generator)
    for numbers in (seeded, own):
        assert all(0 <= u < 1 for u in numbers)
        assert abs(sum(numbers) / 2000 - 0.5) < 0.03
        assert all(any(i / 20 <= u < (i + 1) / 20 for u in numbers) for i in range(20))


def test_a_uniform_number_travels_with_48_bits() -> None:
    packed = pack_rows([SamplingRow()] * len(UNIFORMS), UNIFORMS)
    travelled = [(int(high) * 2**24 + int(low)) / 2**48 for high, low in zip(packed[3], packed[4], strict=True)]
    assert travelled == pytest.approx(UNIFORMS, abs=2**-48)
    assert travelled[0] == 0
    assert travelled[-1] == JUST_BELOW_ONE


# ------------------------------------------------------------------------------------------------------- an engine

SEEDED = SamplingParams(max_new_tokens=12, temperature=1.0, stop_token_ids=(), seed=11)


def test_a_seeded_request_draws_the_same_in_any_company_at_any_time() -> None:
    prompt = [5, 6, 7]
    with GenerationEngine(tiny_llama()) as engine:
        alone = engine.submit(prompt, SEEDED, sample_index=2).result(30)
        others = [engine.submit(p, SamplingParams(max_new_tokens=30)) for p in random_prompts([3, 17, 40])]
        beside = engine.submit(prompt, SEEDED, sample_index=2).result(30)
        for other in others:
            other.result(30)
        later = engine.submit(prompt, SEEDED, sample_index=2).result(30)
    with GenerationEngine(tiny_llama(), EngineConfig(max_batch_tokens=1, max_requests=1)) as engine:
        elsewhere = engine.submit(prompt, SEEDED, sample_index=2).result(30)
    assert alone.token_ids == beside.token_ids == later.token_ids == elsewhere.token_ids


def test_sample_index_and_seed_both_change_the_draw() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        futures = [engine.submit([5], SEEDED, sample_index=i) for i in range(4)]
        other = SamplingParams(max_new_tokens=12, stop_token_ids=(), seed=12)
        futures.append(engine.submit([5], other, sample_index=0))
        drawn = {tuple(future.result(30).token_ids) for future in futures}
    assert len(drawn) == 5


def test_requests_without_a_seed_differ() -> None:
    params = SamplingParams(max_new_tokens=12, stop_token_ids=())
    with GenerationEngine(tiny_llama()) as engine:
        drawn = {tuple(rollout.token_ids) for rollout in engine.generate([[5]] * 4, params)}
    assert len(drawn) == 4


def test_an_engine_leaves_the_process_wide_random_state_alone() -> None:
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    model = tiny_llama()
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    with GenerationEngine(model) as engine:
        assert torch.equal(torch.get_rng_state(), torch_state), "after construction and start"
        engine.generate([[5]] * 4, SamplingParams(max_new_tokens=5))
        engine.generate([[5]] * 4, SEEDED)
        with engine.update():
            pass
    assert torch.equal(torch.get_rng_state(), torch_state)
    now = np.random.get_state()
    assert now[0] == numpy_state[0]
    assert np.array_equal(now[1], numpy_state[1])
    assert now[2:] == numpy_state[2:]
    assert random.getstate() == python_state


def test_an_engines_own_draws_do_not_follow_the_process_wide_seed() -> None:
    params = SamplingParams(max_new_tokens=12, stop_token_ids=())
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        with GenerationEngine(tiny_llama()) as engine:
            drawn.append(engine.submit([5], params).result(30).token_ids)
    assert drawn[0] != drawn[1]


def test_sampled_tokens_of_one_request_follow_the_models_distribution() -> None:
    model = tiny_llama()
    with torch.no_grad():
        probs = model(torch.tensor([[5, 9]])).logits[0, -1].softmax(-1).tolist()
    count = 2000
    params = SamplingParams(max_new_tokens=1, stop_token_ids=(), seed=3)
    with GenerationEngine(model) as engine:
        tokens = [rollout.token_ids[0] for rollout in engine.generate([[5, 9]] * count, params)]
    likely = [t for t in range(VOCAB_SIZE) if probs[t] * count > 8]
    assert len(likely) > 3
    chi_square = sum((tokens.count(t) - count * probs[t]) ** 2 / (count * probs[t]) for t in likely)
    assert chi_square < len(likely) + 6 * math.sqrt(2 * len(likely)), "six standard deviations"
