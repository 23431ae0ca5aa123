"""Rollouts as JSON: for checkpoints, and for the file that a run leaves behind."""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from rollout.types import Decoder, FinishReason, Rollout, Timings, VersionSpan

log = logging.getLogger("rollsync")


def rollout_to_json(rollout: Rollout) -> dict[str, Any]:
    """JSON-safe, without the metadata, which may be anything."""
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "prompt_id": rollout.prompt_id,
        "sample_index": rollout.sample_index,
        "attempt": rollout.attempt,
        "prompt_ids": rollout.prompt_ids,
        "token_ids": rollout.token_ids,
        "logprobs": rollout.logprobs,
        "loss_mask": rollout.loss_mask,
        "version_spans": [[span.start, span.version] for span in rollout.version_spans],
        "prefill_version": rollout.prefill_version,
        "finish_reason": None if rollout.finish_reason is None else str(rollout.finish_reason),
        "reward": rollout.reward,
        "error": rollout.error,
        "worker_id": rollout.worker_id,
        "stop_string": rollout.stop_string,
        "renormalised": rollout.renormalised,
        "num_reprefills": rollout.num_reprefills,
        "timings": None if rollout.timings is None else asdict(rollout.timings),
    }


def rollout_from_json(saved: Mapping[str, Any], metadata: Mapping[str, Any]) -> Rollout:
    """The inverse. ValueError for one that does not agree with itself."""
    return Rollout(
        **{
            **saved,
            "version_spans": [VersionSpan(start, version) for start, version in saved["version_spans"]],
            "finish_reason": None if saved["finish_reason"] is None else FinishReason(saved["finish_reason"]),
            "timings": None if saved["timings"] is None else Timings(**saved["timings"]),
            "metadata": metadata,
        }
    )


def rollout_lines(
    rollouts: Iterable[Rollout],
    *,
    step: int | None = None,
    trained_version: int | None = None,
    ending: str | None = None,
    tokenizer: Decoder | None = None,
) -> str:
    """Lines of a `rollouts.jsonl`, each with its newline; the same whoever writes them.

    Next to `rollout_to_json`: where a tokenizer is given, "text" and "prompt", the latter with its special tokens, as the
    model read it; "step" and "trained_version", the step of the trainer that trained on it and the version that it was
    handed out at, or null if none did (a controller counts the batches that were trained on, from 1); "ending", how its
    group ended, if a controller writes it; and its metadata, of which what JSON cannot say is written as its repr.
    """
    lines: list[str] = []
    prompts: dict[tuple[int, ...], str] = {}  # decoded once for all samples of a prompt
    for rollout in rollouts:
        line = {
            **rollout_to_json(rollout),
            "step": step,
            "trained_version": trained_version,
            "ending": ending,
            "metadata": {str(name): _or_repr(value) for name, value in rollout.metadata.items()},
        }
        if tokenizer is not None:
            ids = tuple(rollout.prompt_ids)
            if ids not in prompts:
                prompts[ids] = tokenizer.decode(rollout.prompt_ids, skip_special_tokens=False)
            line["prompt"] = prompts[ids]
            line["text"] = rollout.text(tokenizer)
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)


def saveable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as it comes out of JSON. A value that JSON cannot say is left out, and named in the log."""
    saved: dict[str, Any] = {}
    for name, value in metadata.items():
        try:
            saved[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError, RecursionError) as error:
            log.warning("the metadata %r of a reward is not in the checkpoint: %s", name, error)
    return saved


def _or_repr(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, default=repr))
    except (TypeError, ValueError, RecursionError):  # keys that are no names, or a value that holds itself
        return repr(value)
