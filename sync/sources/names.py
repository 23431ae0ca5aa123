"""The name that a tensor has in the engine, whatever a trainer wrapped around its model."""

from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise

from sync.errors import ManifestError

ANYWHERE = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"})
"""Parts that torch.compile, FSDP, activation checkpointing and PEFT put into a name at any depth."""

LEADING = (("module",), ("base_model", "model"))
"""What DDP (DeepSpeed, DataParallel) and PEFT put before every name."""

LEFTOVER = frozenset({"_flat_param", "_fpw_module", "modules_to_save", "token_adapter", "trainable_tokens_delta"})
"""Parts of wrappers whose tensor is no weight of the model as it stands."""

Path = tuple[str, ...]


def canonical_names(names: Iterable[str], *, adapters: Collection[str] | None = None) -> dict[str, str | None]:
    """The engine's name of each of a wrapped module's tensors, in the order given; None for a tensor that the engine
    does not hold by itself: the factors of an adapter, and a module that a trained copy replaces.

    Takes all names of a module at once, since what leads *every* name is a wrapper, and what leads some is a layer that
    happens to be called `module`. The order in which the wrappers were applied does not matter.

    `adapters` are the PEFT adapters in use: of the copies under `modules_to_save.<adapter>` theirs count, and where they
    have none, the original. None: every copy counts.

    Raises ManifestError, with both names, if two tensors would have one name, and, with the part, if a part of a wrapper
    remains.
    """
    paths = _without_leading({name: tuple(without_inner_wrappers(name).split(".")) for name in names})
    copies = _copies(paths.values())
    canonical = {name: _resolve(path, copies, adapters) for name, path in paths.items()}
    owners: dict[str, str] = {}
    for name, resolved in canonical.items():
        if resolved is None:
            continue
        _check_leftover(name, resolved)
        if (other := owners.setdefault(resolved, name)) != name:
            raise ManifestError(
                f"{other} and {name} would both be {resolved} in the engine; publish one of them, or name the adapter "
                "whose copy counts"
            )
    return canonical


def without_inner_wrappers(name: str) -> str:
    """The name without the parts that wrappers put in at any depth; what they put before it stays."""
    return ".".join(part for part in name.split(".") if part not in ANYWHERE)


def _without_leading(paths: Mapping[str, Path]) -> Mapping[str, Path]:
    for wrapper in LEADING:
        size = len(wrapper)
        if paths and all(path[:size] == wrapper and len(path) > size for path in paths.values()):
            return _without_leading({name: path[size:] for name, path in paths.items()})
    return paths


def _copies(paths: Iterable[Path]) -> Mapping[Path, set[str]]:
    """The adapters that have a copy of a module, by the module's path."""
    copies: dict[Path, set[str]] = {}
    for path in paths:
        owner, adapter, leaf = _split_copy(path)
        if leaf:
            copies.setdefault(owner, set()).add(adapter)
    return copies


def _split_copy(path: Path) -> tuple[Path, str, Path]:
    """(owner, adapter, leaf) of `owner.modules_to_save.<adapter>.leaf`; the leaf is empty for any other path."""
    if "modules_to_save" not in path:
        return path, "", ()
    at = path.index("modules_to_save")
    return path[:at], "".join(path[at + 1 : at + 2]), path[at + 2 :]


def _resolve(path: Path, copies: Mapping[Path, set[str]], adapters: Collection[str] | None) -> str | None:
    if any(part.startswith("lora_") for part in path):
        return None
    owner, adapter, leaf = _split_copy(path)
    if leaf:
        return ".".join(owner + leaf) if adapters is None or adapter in adapters else None
    if "original_module" in path:
        at = path.index("original_module")
        of_owner = copies.get(path[:at], set())
        if of_owner if adapters is None else of_owner & set(adapters):
            return None
        return ".".join(path[:at] + path[at + 1 :])
    return ".".join(path)


def _check_leftover(name: str, resolved: str) -> None:
    parts = resolved.split(".")
    left = [part for part in parts if part in LEFTOVER or not part]
    if any(pair == LEADING[1] for pair in pairwise(parts)):
        left.append("base_model.model")
    if left:
        raise ManifestError(
            f"{name} still has {left[0] or 'an empty part'} of a wrapper in it, so it is no tensor of the engine; gather "
            "sharded weights (PolicyView does), and publish the model that generates, not one around it"
        )
