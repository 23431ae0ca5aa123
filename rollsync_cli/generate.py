"""`rollsync generate`: a file of prompts in, a line a rollout out, in the order of the prompts."""

import contextlib
import json
import math
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from rollout import (
    EngineConfig,
    FinishReason,
    GenerationEngine,
    InvalidRequestError,
    Rollout,
    RolloutError,
    SamplingParams,
)
from rollout.batches.prompts import encode_prompt
from rollout.batches.records import rollout_lines
from rollout.requests.delivery import RolloutFuture
from rollout.rollout_config import mix
from rollsync_cli.demo_model import DEMO_MODEL, demo_model_folder
from rollsync_cli.errors import CommandError, GenerationFailedError, OutputError
from rollsync_cli.interrupts import after_block

WINDOW = 1024
"""Prompts that are in the engine at once: enough to keep it busy, few enough to hold in memory."""
STDIO = Path("-")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the command line asked for; see `rollsync generate --help`."""

    prompts: Path
    model: str
    out: Path
    force: bool
    num_samples: int
    sampling: dict[str, Any]
    timeout_s: float | None
    chat: bool
    dtype: str
    device: str | None
    threads: int | None
    progress: bool


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the prompts' file."""

    number: int
    """Prompts are numbered from 0."""
    row: Any = None
    error: str | None = None
    """Why it is no prompt."""


def run(job: Job) -> int:
    """How many rollouts have an error. CommandError before anything is written if the job cannot start; GenerationFailedError
    when the engine gives up, OutputError when the output takes no more."""
    try:
        params = SamplingParams(**job.sampling)
    except InvalidRequestError as error:
        raise CommandError(str(error)) from None
    if job.timeout_s is not None and not 0 < job.timeout_s < math.inf:
        raise CommandError(
            f"--timeout must be a number of seconds above 0, got {job.timeout_s:g}; leave it out for none"
        )
    lines = read_prompts(job.prompts)
    check_out(job)
    with load_engine(job) as engine, _opened(job) as file:
        num_failed = 0
        shown = tqdm(
            total=len(lines) * job.num_samples,
            desc="rollouts",
            unit="rollout",
            file=sys.stderr,
            disable=not job.progress,
        )
        with shown:
            for rollout in rollouts(engine, lines, params, job):
                line = rollout_lines([rollout], tokenizer=engine.tokenizer)
                with after_block():
                    _append(file, line, job)
                num_failed += rollout.finish_reason is FinishReason.ERROR
                shown.update()
    return num_failed


def check_out(job: Job) -> None:
    """CommandError for a file that cannot be written or is to be kept; before a model is loaded for it."""
    if job.out == STDIO:
        return
    if not job.out.parent.is_dir():
        raise CommandError(f"{job.out} cannot be written: there is no folder {job.out.parent}; make it first")
    if not job.out.exists():
        return
    if job.out.is_dir():
        raise CommandError(f"--out {job.out} is a folder; give a file in it")
    if job.prompts != STDIO and job.out.samefile(job.prompts):
        raise CommandError(f"--out {job.out} is the file of the prompts; give another")
    if not job.force:
        raise CommandError(f"{job.out} exists; give another --out, or --force to replace it")


def read_prompts(path: Path) -> list[Line]:
    """Blank lines are skipped, and a mark of the byte order. CommandError if there is nothing to read; a line that is no JSON
    is a prompt that cannot work."""
    try:
        text = sys.stdin.read().removeprefix("\ufeff") if path == STDIO else path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CommandError(f"the prompts {path} are no UTF-8 text ({error}); save them as UTF-8") from None
    except OSError as error:
        raise CommandError(
            f"the prompts {path} cannot be read: {error.strerror}; give a file of prompts, or - for stdin"
        ) from None
    # not splitlines(), which also splits at characters that JSON allows inside a string
    texts = [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    if not texts:
        raise CommandError(f"{path} holds no prompts; a .jsonl file has one JSON value a line, others a prompt a line")
    if path.suffix.lower() != ".jsonl":
        return [Line(number=number, row=line) for number, line in enumerate(texts)]
    return [_json_line(number, line) for number, line in enumerate(texts)]


def load_engine(job: Job) -> GenerationEngine:
    """CommandError for a model, device or size that cannot work."""
    name_or_path = _name_or_path(job.model)
    if not job.progress:
        disable_progress_bar()
    device = None if job.device is None else _device(job.device)
    try:
        engine = GenerationEngine.from_pretrained(
            name_or_path,
            EngineConfig(num_threads=job.threads),
            dtype=None if job.dtype == "auto" else getattr(torch, job.dtype),
            device=device,
        )
    except (OSError, ValueError, RuntimeError, RolloutError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CommandError(
            f"an engine of the model {job.model!r} cannot be made: {reason} (--model is a transformers folder or a hub name)"
        ) from error
    if job.chat and getattr(engine.tokenizer, "chat_template", None) is None:
        raise CommandError(f"--chat: the model {job.model!r} has no chat template; give its prompts as they stand")
    return engine


def _name_or_path(model: str) -> str:
    if model == DEMO_MODEL:
        folder = demo_model_folder()
        if not folder.is_dir():
            raise CommandError(
                f"{model} is the model of the examples, and none has put it into {folder} yet: run one of them first (in a "
                "clone: make demo), or give --model a transformers folder or a hub name"
            )
        return str(folder)
    if not model.startswith(("/", ".", "~")) and model.count("/") <= 1:
        return model
    if not Path(model).expanduser().is_dir():
        raise CommandError(f"there is no folder {model!r}; --model is a transformers folder or a hub name")
    return str(Path(model).expanduser())


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise CommandError(f"--device {name} is none that torch knows; give cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CommandError(f"--device {name}: torch finds no CUDA device; see rollsync doctor")
    return device


def rollouts(engine: GenerationEngine, lines: Sequence[Line], params: SamplingParams, job: Job) -> Iterator[Rollout]:
    """`num_samples` for each line, in their order; those of a prompt that is refused say so in `error`."""
    waiting: deque[Sequence[RolloutFuture | Rollout]] = deque()
    try:
        for line in lines:
            waiting.append(_submit(engine, line, params, job))
            if len(waiting) > WINDOW:
                yield from map(_result, waiting.popleft())
        while waiting:
            yield from map(_result, waiting.popleft())
    except RolloutError as error:
        raise GenerationFailedError(f"the engine gave up: {error}") from error


def _submit(
    engine: GenerationEngine, line: Line, params: SamplingParams, job: Job
) -> "Sequence[RolloutFuture | Rollout]":
    name = f"p{line.number}"
    try:
        if line.error is not None:
            raise InvalidRequestError(line.error)
        row, prompt = line.row, line.row["prompt"] if isinstance(line.row, dict) else line.row
        if job.chat and isinstance(prompt, str):
            message = [{"role": "user", "content": prompt}]
            row = {**row, "prompt": message} if isinstance(row, dict) else message
        ids, columns = encode_prompt(row, engine.tokenizer)
        if params.seed is not None:
            # equal prompts draw different noise
            params = replace(params, seed=mix(mix(params.seed) ^ line.number) >> 1)
        return engine.submit_group(
            ids,
            params,
            size=job.num_samples,
            request_id=name,
            group_id=name,
            prompt_id=name,
            metadata={**columns, "prompt": prompt},
            timeout_s=job.timeout_s,
        )
    except (InvalidRequestError, KeyError) as error:
        reason = str(error) if isinstance(error, InvalidRequestError) else 'an object needs a "prompt"'
        return [_refused(name, index, line, reason) for index in range(job.num_samples)]


def _refused(name: str, index: int, line: Line, reason: str) -> Rollout:
    return Rollout(
        rollout_id=f"{name}-{index}",
        group_id=name,
        prompt_id=name,
        sample_index=index,
        prompt_ids=[],
        token_ids=[],
        logprobs=[],
        loss_mask=[],
        version_spans=[],
        prefill_version=None,
        finish_reason=FinishReason.ERROR,
        error=reason,
        metadata=line.row if isinstance(line.row, dict) else {"prompt": line.row},
    )


def _result(rollout: "RolloutFuture | Rollout") -> Rollout:
    return rollout if isinstance(rollout, Rollout) else rollout.result()


def _json_line(number: int, text: str) -> Line:
    try:
        return Line(number=number, row=json.loads(text))
    except RecursionError:
        return Line(number=number, row=text[:60], error="the JSON value is nested too deeply to be a prompt")
    except ValueError as error:
        return Line(
            number=number, row=text, error=f"no JSON: {error}; a line of text belongs into a file of another suffix"
        )


@contextmanager
def _opened(job: Job) -> Iterator[TextIO]:
    if job.out == STDIO:
        yield sys.stdout
        return
    try:
        file = job.out.open("w" if job.force else "x", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--out {job.out} cannot be written: {error.strerror}; give another") from None
    with file:
        yield file


def _append(file: TextIO, line: str, job: Job) -> None:
    try:
        file.write(line)
        file.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        with contextlib.suppress(OSError):
            file.close()  # here, where the rest that it cannot write is no second error
        raise OutputError(f"{job.out} takes no more: {error.strerror}; make room, or give another --out") from None
