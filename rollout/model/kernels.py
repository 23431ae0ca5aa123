"""Compiled kernels for engines on a CPU, made from `kernels.c` on first use where there is a C compiler.

The library is kept in the user's cache, under a name that tells its source, compiler and CPU. Without a compiler, or with
ROLLSYNC_NO_KERNEL=1, there is none, and torch does the same work more slowly.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("kernels.c")
COMPILERS = ("gcc", "cc", "clang")
COMPILE_LIMIT_S = 120.0

_logger = logging.getLogger(__name__)


def kernels() -> "Kernels | None":
    """This process's kernels, compiled at the first call; None where there are none."""
    return None if os.environ.get("ROLLSYNC_NO_KERNEL") == "1" else _library.get()


class Kernels:
    """The functions of a compiled library, on fp32 CPU tensors. They run on as many threads as torch would give the
    calling thread, and release the GIL."""

    def __init__(self, path: Path) -> None:
        """OSError if `path` is not such a library."""
        library = ctypes.CDLL(str(path))
        try:
            self._attend, self._linear = library.rollsync_attend, library.rollsync_linear
            self._sample, self._rms_norm = library.rollsync_sample, library.rollsync_rms_norm
            self._scratch_size = library.rollsync_linear_scratch
        except AttributeError as error:
            raise OSError(f"{path}: {error}") from None
        pointer, size, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
        self._attend.argtypes = [pointer, size, size, *[pointer] * 6, *[size] * 4, real, real, pointer, number]
        self._attend.restype = None
        self._linear.argtypes = [*[pointer] * 4, *[size] * 3, pointer, number]
        self._sample.argtypes = [*[pointer] * 3, size, size, pointer, pointer, number]
        self._rms_norm.argtypes = [pointer, pointer, real, real, pointer, size, size, number]
        self._linear.restype = self._sample.restype = self._rms_norm.restype = None
        self._scratch_size.argtypes = [size, size]
        self._scratch_size.restype = size
        self._scratch = threading.local()

    def __deepcopy__(self, memo: object) -> "Kernels":
        # a copy of an engine's module computes with the same functions, and ctypes has no copies of them
        return self

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        rows: torch.Tensor,
        batch_rows: torch.Tensor,
        starts: torch.Tensor,
        stops: torch.Tensor,
        scale: float,
        softcap: float | None,
        out: torch.Tensor,
    ) -> None:
        """Attention of requests with one query each, written to rows `batch_rows` of `out`.

        queries [batch, num_heads, head_dim], its last dimension dense; keys and values [cache_rows, num_kv_heads,
        head_dim] and out [batch, num_heads, head_dim], all dense. Request i has the query in row `batch_rows[i]` and the
        keys in rows `rows[starts[i]:stops[i]]` of the cache, which must exist: nothing checks them (all int64).
        """
        num_heads, head_dim = queries.shape[1:]
        kv_heads = keys.shape[1]
        assert queries.stride(2) == 1
        assert all(t.is_contiguous() for t in (keys, values, out, rows, batch_rows, starts, stops))
        assert keys.shape[1:] == values.shape[1:]
        assert keys.shape[2] == head_dim
        assert out.shape == queries.shape
        assert {t.dtype for t in (queries, keys, values, out)} == {torch.float32}
        assert {t.dtype for t in (rows, batch_rows, starts, stops)} == {torch.int64}
        self._attend(
            queries.data_ptr(),
            queries.stride(0),
            queries.stride(1),
            keys.data_ptr(),
            values.data_ptr(),
            rows.data_ptr(),
            batch_rows.data_ptr(),
            starts.data_ptr(),
            stops.data_ptr(),
            batch_rows.numel(),
            kv_heads,
            num_heads // kv_heads,
            head_dim,
            scale,
            softcap or 0.0,
            out.data_ptr(),
            torch.get_num_threads(),
        )

    def linear(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`F.linear`; weight and bias are dense, [num_outputs, dim] and [num_outputs]."""
        num_outputs, dim = weight.shape
        inputs = inputs.contiguous()
        out = inputs.new_empty(*inputs.shape[:-1], num_outputs)
        num_inputs = inputs.numel() // dim
        self._linear(
            inputs.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            num_inputs,
            num_outputs,
            dim,
            self._scratch_of(self._scratch_size(num_inputs, dim)).data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def sample(
        self, logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Next tokens [num_rows] (int64) and their log-probs [num_rows] from dense logits [num_rows, vocab].

        temperatures [num_rows], 0 for greedy; uniforms [num_rows] in [0, 1), float64: where in the cumulative
        distribution each token is drawn. The log-prob of a greedy row is that at temperature 1.
        """
        num_rows, vocab = logits.shape
        temperatures = temperatures.contiguous()
        assert logits.is_contiguous()
        assert uniforms.is_contiguous()
        assert (logits.dtype, temperatures.dtype, uniforms.dtype) == (torch.float32, torch.float32, torch.float64)
        tokens, logprobs = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
        self._sample(
            logits.data_ptr(),
            temperatures.data_ptr(),
            uniforms.data_ptr(),
            num_rows,
            vocab,
            tokens.data_ptr(),
            logprobs.data_ptr(),
            torch.get_num_threads(),
        )
        return tokens, logprobs

    def rms_norm(self, inputs: torch.Tensor, weight: torch.Tensor, *, offset: float, epsilon: float) -> torch.Tensor:
        """`F.rms_norm` over the last dimension, times (offset + weight); both dense."""
        dim = weight.shape[0]
        out = torch.empty_like(inputs)
        self._rms_norm(
            inputs.data_ptr(),
            weight.data_ptr(),
            offset,
            epsilon,
            out.data_ptr(),
            inputs.numel() // dim,
            dim,
            torch.get_num_threads(),
        )
        return out

    def _scratch_of(self, size: int) -> torch.Tensor:
        """At least `size` floats, the calling thread's own and kept: fresh pages at every layer cost more than the copy."""
        buffer: torch.Tensor | None = getattr(self._scratch, "buffer", None)
        if buffer is None or buffer.numel() < size:
            buffer = self._scratch.buffer = torch.empty(size)
        return buffer


class KernelLibrary:
    """Kernels that are compiled into the folder that `folder` gives, by the first of `compilers` that is there, when they
    are first asked for."""

    def __init__(self, folder: Callable[[], Path], compilers: Sequence[str] = COMPILERS) -> None:
        self._folder = folder
        self._compilers = compilers
        self._lock = threading.Lock()
        self._asked = False
        self._kernels: Kernels | None = None

    def get(self) -> Kernels | None:
        """None without a compiler, or where it fails, which is logged once."""
        with self._lock:
            if not self._asked:
                self._asked = True
                try:
                    self._kernels = self._load()
                except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                    _logger.warning("no compiled kernels, torch does their work more slowly: %s", error)
            return self._kernels

    def _load(self) -> Kernels | None:
        found = [path for path in map(shutil.which, self._compilers) if path is not None]
        if not found:
            _logger.info("no compiled kernels: none of %s is installed", ", ".join(self._compilers))
            return None
        folder = self._folder()
        _make_private(folder)
        runtime = _openmp_runtime()
        path = folder / f"kernels-{_fingerprint(found[0], runtime)}.so"
        try:
            return Kernels(path)
        except OSError:  # not there yet, or damaged
            _compile(found[0], runtime, path)
        return Kernels(path)


def _compile(compiler: str, runtime: str | None, target: Path) -> None:
    """Makes `target`, whole or not at all. OSError or SubprocessError if the compiler cannot.

    Flags that a compiler refuses are left out. Threads come only from the OpenMP runtime that torch has loaded: a second
    one would bring a second pool, and the waiting threads of each would take the cores from the other.
    """
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as folder:
        compiled, linked = Path(folder) / "kernels.o", Path(folder) / target.name
        reasons = []
        for native in (["-march=native"], []):
            for openmp, libraries in ((["-fopenmp"], [runtime, "-Wl,-z,defs"]), ([], [])):
                if openmp and runtime is None:
                    continue
                to_object = [compiler, "-O3", "-fPIC", *native, *openmp, "-c", str(SOURCE), "-o", str(compiled)]
                to_library = [compiler, "-shared", str(compiled), *filter(None, libraries), "-lm", "-o", str(linked)]
                try:
                    for command in (to_object, to_library):
                        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_LIMIT_S)
                    linked.replace(target)
                except subprocess.CalledProcessError as error:
                    reasons.append(error.stderr.decode(errors="replace").strip()[:300])
                except FileNotFoundError:
                    reasons.append("it reported success and made nothing")
                else:
                    return
        raise OSError(f"{compiler} failed: {reasons[-1]}")


def _make_private(folder: Path) -> None:
    """OSError where somebody else could put a library into `folder`."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to another user")
    folder.chmod(0o700)


def _openmp_runtime() -> str | None:
    """The path of GNU's OpenMP runtime in this process, which torch brings along."""
    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = [line.split(maxsplit=5)[5] for line in mapped if "libgomp" in line]
    return paths[0] if paths else None


def _fingerprint(compiler: str, runtime: str | None) -> str:
    """A folder in a home may be shared by machines with other CPUs, compilers and versions of torch."""
    try:
        cpu = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        cpu = [platform.processor()]
    features = [line for line in cpu if line.startswith(("model name", "flags", "Features", "CPU part"))]
    version = subprocess.run(
        [compiler, "--version"], check=False, capture_output=True, timeout=COMPILE_LIMIT_S
    ).stdout.decode()
    parts = [SOURCE.read_text(), compiler, version, str(runtime), platform.machine(), *(features or cpu)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollsync" / "kernels"


_library = KernelLibrary(_cache_folder)
