"""TRL's settings of sampling, of all its trainers that an engine serves."""

from typing import Any

from trainer_adapters.errors import AdapterError

OFF: dict[str, tuple[Any, ...]] = {
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "generation_kwargs": (None, {}),
}
"""What an engine has not, and the values that ask for none of it."""


def check_sampling(args: Any) -> None:
    """AdapterError for settings that an engine cannot keep, by TRL's names."""
    for name, off in OFF.items():
        value = getattr(args, name, None)
        if value not in off:
            raise AdapterError(f"{name}={value!r} is not among what an engine samples with; leave it at {off[-1]!r}")
    if args.max_completion_length is None or args.max_completion_length < 1:
        raise AdapterError(f"max_completion_length must be at least 1 token, got {args.max_completion_length!r}")
    if args.top_k is not None and args.top_k < 0:
        raise AdapterError(f"top_k must be at least 0, got {args.top_k}; 0 turns it off")
