"""The compiled attention equals torch's and a dense one, is compiled once, and is never needed."""

import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fakes import ARCHITECTURES, greedy_reference, random_prompts, tiny_llama

from rollout import GenerationEngine, SamplingParams
from rollout.model.attention import PagedKeys, paged_attention, plan_batch
from rollout.model.kernels import KernelLibrary, Kernels, kernels
from rollout.model.sampling import SamplingRow, pack_rows, sample

CACHE_ROWS = 1000
MODULE = torch.nn.Module()


@pytest.fixture
def compiled() -> Kernels:
    found = kernels()
    if found is None:
        pytest.skip("there is no C compiler")
    return found


def decode(
    lengths: list[int],
    library: Kernels | None,
    *,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    softcap: float | None = None,
    shared: int = 0,
    scale: float | None = None,
    magnitude: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ours, dense in float64) outputs [num_requests, num_heads, head_dim] of a step in which every request decodes; the
    first `shared` keys are the same rows of the cache for all of them."""
    generator = torch.Generator().manual_seed(len(lengths) + head_dim)
    keys = torch.randn(CACHE_ROWS, kv_heads, head_dim, generator=generator) * magnitude
    values = torch.randn(CACHE_ROWS, kv_heads, head_dim, generator=generator)
    # as a model makes them: [batch, heads, tokens, dim], a transposed view
    queries = torch.randn(1, len(lengths), kv_heads * group, head_dim, generator=generator).transpose(1, 2)
    prefix = torch.randperm(CACHE_ROWS, generator=generator)[:shared]
    own = [
        torch.cat([prefix, torch.randperm(CACHE_ROWS, generator=generator)[: length - shared]]) for length in lengths
    ]
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    plan = plan_batch(
        list(range(len(lengths) + 1)), ends, torch.cat(own), window=None, dtype=torch.float32, kernels=library
    )
    assert (plan.ragged is not None) == (library is not None)
    scale = head_dim**-0.5 if scale is None else scale
    new = torch.zeros(1, kv_heads, len(lengths), head_dim)
    paged = PagedKeys(keys=keys, values=values, plan=plan)
    out, _ = paged_attention(MODULE, queries, new, new, None, scaling=scale, softcap=softcap, paged=paged)
    expected = torch.empty(len(lengths), kv_heads * group, head_dim, dtype=torch.float64)
    for i, rows in enumerate(own):
        k = keys[rows].repeat_interleave(group, dim=1).double()
        v = values[rows].repeat_interleave(group, dim=1).double()
        scores = torch.einsum("hd,khd->hk", queries[0, :, i].double(), k) * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        expected[i] = torch.einsum("hk,khd->hd", scores.softmax(-1), v)
    return out[0], expected


def check(compiled: Kernels, lengths: list[int], **shape: object) -> None:
    ours, expected = decode(lengths, compiled, **shape)
    fallback, _ = decode(lengths, None, **shape)
    torch.testing.assert_close(ours.double(), expected, atol=3e-6, rtol=3e-5)
    torch.testing.assert_close(ours, fallback, atol=3e-6, rtol=3e-5)


RAGGED = [1, 2, 31, 32, 33, 64, 100, 255, 256, 300]


@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 64, 72, 80, 96, 128])
def test_the_kernel_is_dense_attention_for_every_head_size(compiled: Kernels, head_dim: int) -> None:
    check(compiled, RAGGED, head_dim=head_dim)


@pytest.mark.parametrize(
    ("kv_heads", "group"), [(1, 1), (4, 1), (1, 4), (3, 3), (2, 7), (1, 16), (1, 17), (2, 40)], ids=str
)
def test_the_kernel_is_dense_attention_for_every_ratio_of_heads(compiled: Kernels, kv_heads: int, group: int) -> None:
    check(compiled, RAGGED, kv_heads=kv_heads, group=group)


@pytest.mark.parametrize("length", range(1, 301, 13))
def test_the_kernel_is_dense_attention_for_every_length(compiled: Kernels, length: int) -> None:
    check(compiled, [length, 301 - length, length])


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_the_kernel_caps_logits(compiled: Kernels, softcap: float) -> None:
    check(compiled, RAGGED, softcap=softcap, magnitude=4.0)


def test_samples_that_share_a_prefix_each_get_their_own_answer(compiled: Kernels) -> None:
    check(compiled, [200, 201, 230, 200, 290], shared=200)


@pytest.mark.parametrize("magnitude", [1e-6, 30.0, 1e4])
def test_scores_far_apart_neither_overflow_nor_vanish(compiled: Kernels, magnitude: float) -> None:
    ours, expected = decode(RAGGED, compiled, magnitude=magnitude)
    # scores this large differ by their own rounding
    torch.testing.assert_close(ours.double(), expected, atol=max(3e-6, magnitude * 3e-6), rtol=3e-5)


def test_what_is_not_a_number_stays_that_and_stays_with_its_request(compiled: Kernels) -> None:
    keys, values = torch.randn(10, 1, 8), torch.randn(10, 1, 8)
    keys[3, 0, 5] = torch.nan
    queries, out = torch.randn(2, 1, 8), torch.empty(2, 1, 8)
    index = {"rows": torch.tensor([1, 3, 2, 4]), "batch_rows": torch.arange(2)}
    ends = {"starts": torch.tensor([0, 2]), "stops": torch.tensor([2, 4])}
    compiled.attend(queries, keys, values, **index, **ends, scale=1.0, softcap=None, out=out)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_the_order_of_requests_and_the_number_of_threads_change_no_bit(compiled: Kernels) -> None:
    before = torch.get_num_threads()
    one, _ = decode(RAGGED, compiled)
    torch.set_num_threads(3)
    three, _ = decode(RAGGED, compiled)
    torch.set_num_threads(before)
    assert torch.equal(one, three)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("without", ["0", "1"], ids=["kernel", "torch"])
def test_greedy_tokens_are_those_of_generate(architecture: str, without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLSYNC_NO_KERNEL", without)
    model = ARCHITECTURES[architecture]()
    prompts = random_prompts([1, 3, 9, 20, 33, 70, 12, 5])
    with GenerationEngine(model) as engine:
        rollouts = engine.generate(prompts, SamplingParams(max_new_tokens=24, temperature=0, stop_token_ids=()))
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        assert rollout.token_ids == greedy_reference(model, prompt, 24)


# ---------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("vocab", [1, 7, 64, 255, 256, 257, 1000])
def test_the_kernel_draws_what_torch_draws(compiled: Kernels, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(60, vocab, generator=generator) * 3
    rows = [SamplingRow(temperature=[0.0, 0.3, 1.0, 2.0][i % 4]) for i in range(60)]
    packed = pack_rows(rows, torch.rand(60, generator=generator).tolist())
    tokens, logprobs = sample(logits, packed, any_filter=False, kernels=compiled)
    expected, expected_logprobs = sample(logits, packed, any_filter=False)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-5, rtol=1e-5)


def test_the_kernel_draws_the_ends_of_the_distribution_and_nothing_of_no_weight(compiled: Kernels) -> None:
    logits = torch.full((4, 600), -torch.inf)
    logits[:, [3, 300, 590]] = 0.0
    uniforms = torch.tensor([0.0, 0.34, 0.5, 1 - 2**-48], dtype=torch.float64)
    tokens, logprobs = compiled.sample(logits, torch.ones(4), uniforms)
    assert tokens.tolist() == [3, 300, 300, 590]
    torch.testing.assert_close(logprobs, torch.full((4,), 1 / 3).log())


def test_the_kernels_greedy_token_is_the_first_of_the_best(compiled: Kernels) -> None:
    logits = torch.zeros(2, 100)
    logits[0, [40, 70, 99]] = 2.0
    tokens, _ = compiled.sample(logits, torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert tokens.tolist() == [40, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_still_give_a_token(compiled: Kernels, temperature: float) -> None:
    logits = torch.full((3, 100), torch.nan)
    logits[1, 5:] = 1.0
    logits[2, 7] = torch.inf
    tokens, logprobs = compiled.sample(logits, torch.full((3,), temperature), torch.full((3,), 0.5).double())
    assert bool(((tokens >= 0) & (tokens < 100)).all())
    assert logprobs.isnan().all()


# ------------------------------------------------------------------------------------------------------- compilation


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "fake-cc"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\n{script}\n')
    path.chmod(0o755)
    return str(path)


def counting_compiler(folder: Path, *, refuses: str = "nothing") -> tuple[str, Callable[[], int]]:
    """The real compiler, which counts how often it compiles the source and refuses one flag."""
    log = folder / "calls"
    script = f'case " $* " in *" {refuses} "*) exit 1;; *" -c "*) echo >> {log};; esac\nexec cc "$@"'
    return fake_compiler(folder, script), lambda: len(log.read_text().splitlines()) if log.exists() else 0


def works(library: Kernels | None) -> bool:
    x, weight = torch.randn(9, 5), torch.randn(7, 5)
    return library is not None and torch.allclose(library.linear(x, weight, None), x @ weight.T, atol=1e-5)


def test_concurrent_first_uses_compile_once(compiled: Kernels, tmp_path: Path) -> None:
    compiler, count = counting_compiler(tmp_path)
    library = KernelLibrary(lambda: tmp_path / "cache", [compiler])
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: library.get(), range(8)))
    assert works(found[0])
    assert all(other is found[0] for other in found)
    assert count() == 1
    assert works(KernelLibrary(lambda: tmp_path / "cache", [compiler]).get()), "another process loads what is there"
    assert count() == 1


def test_the_cache_is_private_and_holds_only_whole_libraries(compiled: Kernels, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o777)
    KernelLibrary(lambda: cache, ["cc"]).get()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert [path.suffix for path in cache.iterdir()] == [".so"]


@pytest.mark.parametrize("flag", ["-march=native", "-fopenmp"])
def test_a_flag_that_the_compiler_refuses_is_left_out(compiled: Kernels, flag: str, tmp_path: Path) -> None:
    compiler, _ = counting_compiler(tmp_path, refuses=flag)
    assert works(KernelLibrary(lambda: tmp_path / "cache", [compiler]).get())


@pytest.mark.parametrize(
    "script", ["echo broken >&2; exit 1", "exit 0", 'for last; do :; done; echo junk > "$last"'], ids=str
)
def test_a_broken_compiler_is_logged_once_and_leaves_torch(
    script: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = KernelLibrary(lambda: tmp_path / "cache", [fake_compiler(tmp_path, script)])
    assert library.get() is None
    assert library.get() is None
    assert len(caplog.records) == 1


def test_without_a_compiler_there_is_no_kernel(tmp_path: Path) -> None:
    library = KernelLibrary(lambda: tmp_path / "cache", ["no-such-compiler"])
    assert library.get() is None
    assert not (tmp_path / "cache").exists()


def test_a_damaged_library_is_made_again(compiled: Kernels, tmp_path: Path) -> None:
    KernelLibrary(lambda: tmp_path / "whole", ["cc"]).get()
    (whole,) = (tmp_path / "whole").iterdir()
    damaged = tmp_path / "cache" / whole.name
    damaged.parent.mkdir()
    damaged.write_bytes(whole.read_bytes()[:100])
    assert works(KernelLibrary(lambda: damaged.parent, ["cc"]).get())
    assert damaged.stat().st_size == whole.stat().st_size


def test_a_folder_that_cannot_be_made_leaves_torch(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert KernelLibrary(lambda: tmp_path / "file" / "cache", ["cc"]).get() is None


def test_the_environment_turns_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLSYNC_NO_KERNEL", "1")
    assert kernels() is None
    with GenerationEngine(tiny_llama()) as engine:
        assert engine.manager.batch_processor.cache.kernels is None
