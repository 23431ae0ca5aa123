"""rollsync_cli -> trainer_adapters -> sync -> rollout -> transformers, torch, ray: read from the imports."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rollout", "sync", "trainer_adapters", "rollsync_cli")
NEVER_IMPORTED = {package: set(PACKAGES[number + 1 :]) for number, package in enumerate(PACKAGES)}
PARTS = ("model", "requests", "manager", "workers", "batches", "fleet", "simulate")
ABOVE = {part: {f"rollout.{above}" for above in PARTS[number + 1 :]} for number, part in enumerate(PARTS)}
ABOVE["model"].remove("rollout.manager")  # the module's shell asks the manager's package what upstream calls things
"""Within `rollout`."""
MAY_IMPORT: dict[str, set[Path]] = {
    "ray": {
        Path("rollout/fleet/pool.py"),
        Path("rollout/workers/remote.py"),
        Path("rollout/worker_config.py"),
        Path("sync/transports/object_store.py"),
        Path("trainer_adapters/ray_train.py"),
    },
    "trl": {
        Path("trainer_adapters/trl/trainers.py"),
        Path("trainer_adapters/trl/async_grpo.py"),
        Path("trainer_adapters/trl/prompts.py"),
        Path("trainer_adapters/trl/samples.py"),
        Path("trainer_adapters/trl/seams.py"),
    },
    "peft": {Path("sync/sources/lora.py")},
}
"""Which files may need what may not be installed."""
TYPING_ONLY = {
    Path("rollout/requests/tracker.py"),
    Path("rollout/requests/outputs.py"),
    Path("rollout/requests/upstream_api.py"),
    Path("rollout/requests/seams.py"),
}
"""They name the type of the results that they are handed."""
UPSTREAM_PRIVATE = {
    "batch_processor",
    "_wake_up_loop",
    "background_thread_status",
    "cache_allocators",
    "_true_initial_tokens",
    "hash_to_block",
    "block_to_hash",
    "position_offset",
    "output_router",
    "input_queue",
    "SCHEDULER_MAPPING",
    "_generation_thread",
    "_status",
    "_requests_to_cancel",
    "_attn_implementation",
    "_supports_sdpa",
    "_device_mesh",
    "_get_logits_processor",
}
PUBLIC_MODULES = {"rollout.worker", "rollout.worker_config"}
"""They are imported by name, since what is in them needs Ray."""
LOOKS_INSIDE = {Path("benchmarks/throughput.py"): {"rollout.model.kernels.kernels"}}
"""To say beside its figures whether the kernels are compiled."""
MANAGER = Path("rollout/manager")


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """The dotted names that a file imports, wherever in it."""
    yield from imports_of(ast.walk(ast.parse(path.read_text())), path)


def imports_at_once(path: Path) -> Iterator[str]:
    """Those that it imports when it is imported itself: not in its functions, nor for type checkers alone."""
    yield from imports_of(ast.parse(path.read_text()).body, path)


def imports_of(nodes: Iterable[ast.AST], path: Path) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)} imports relatively: say where from"
            yield str(node.module)


def imported_names(path: Path) -> Iterator[tuple[str, str | None]]:
    """Each name that a file imports from a module of ours, after that module; None for the module as a whole."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)


def inner_imports(path: Path) -> list[str]:
    """What a file imports of `rollout` and `sync` that they do not export."""
    return [
        module if name is None else f"{module}.{name}"
        for module, name in imported_names(path)
        if module.split(".")[0] in ("rollout", "sync") and module not in PUBLIC_MODULES
        if (not exported(module) if name is None else name not in exported(module))
    ]


def exported(package: str) -> set[str]:
    """What a package's `__all__` lists; nothing for a module, or a package without."""
    init = ROOT / package.replace(".", "/") / "__init__.py"
    lists = [
        node.value
        for node in (ast.parse(init.read_text()).body if init.exists() else [])
        if isinstance(node, ast.Assign) and [getattr(target, "id", None) for target in node.targets] == ["__all__"]
    ]
    return set(ast.literal_eval(lists[0])) if lists else set()


def names(path: Path) -> Iterator[str]:
    """The names and attributes that a file touches."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


def test_there_is_something_to_read() -> None:
    assert [path.name for path in sources("rollout")].count("engine.py") == 1


@pytest.mark.parametrize("package", PACKAGES)
def test_a_layer_never_imports_the_ones_above_it(package: str) -> None:
    for path in sources(package):
        tops = {name.split(".")[0] for name in imports(path)}
        assert not tops & NEVER_IMPORTED[package], path.relative_to(ROOT)


@pytest.mark.parametrize("package", ["trainer_adapters", "examples", "benchmarks"])
def test_what_stands_above_uses_only_what_the_packages_export(package: str) -> None:
    for path in sources(package):
        inner = set(inner_imports(path)) - LOOKS_INSIDE.get(path.relative_to(ROOT), set())
        assert not inner, f"{path.relative_to(ROOT)} imports {sorted(inner)}"


@pytest.mark.parametrize(
    ("line", "inner"),
    [
        ("import sync", []),
        ("import sync.receiver", ["sync.receiver"]),
        ("import rollout.fleet.run as run", ["rollout.fleet.run"]),
        ("from sync.receiver import hello", ["sync.receiver.hello"]),
        ("from rollout import fleet", ["rollout.fleet"]),
        ("from rollout.worker import Worker", []),
        ("from sync.sources import held_tensors", []),
    ],
)
def test_every_way_to_import_what_is_not_exported_is_seen(line: str, inner: list[str], tmp_path: Path) -> None:
    path = tmp_path / "above.py"
    path.write_text(line)
    assert inner_imports(path) == inner


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_rollout_never_imports_the_ones_above_it(part: str) -> None:
    for path in sources(f"rollout/{part}"):
        used = {".".join(name.split(".")[:2]) for name in imports(path)}
        assert not used & ABOVE[part], path.relative_to(ROOT)


@pytest.mark.parametrize("optional", MAY_IMPORT)
def test_what_may_not_be_installed_is_imported_only_where_it_is_needed(optional: str) -> None:
    users = {
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in sources(package)
        if optional in {name.split(".")[0] for name in imports(path)}
    }
    assert users <= MAY_IMPORT[optional]


@pytest.mark.parametrize("optional", ["ray", "trl"])
def test_importing_the_packages_needs_nothing_that_may_not_be_installed(optional: str) -> None:
    reached, left = set(), [ROOT / package / "__init__.py" for package in PACKAGES]
    while left:
        path = left.pop()
        if path not in reached:
            reached.add(path)
            stems = [ROOT / name.replace(".", "/") for name in imports_at_once(path)]
            files = [*(stem.with_suffix(".py") for stem in stems), *(stem / "__init__.py" for stem in stems)]
            left += [file for file in files if file.exists()]
    assert ROOT / "rollout/engine.py" in reached
    assert not {str(path.relative_to(ROOT)) for path in reached} & {str(path) for path in MAY_IMPORT[optional]}


def test_only_the_manager_touches_upstreams_private_parts() -> None:
    for package in PACKAGES:
        for path in sources(package):
            if path.relative_to(ROOT).parent != MANAGER:
                touched = UPSTREAM_PRIVATE & set(names(path))
                assert not touched, f"{path.relative_to(ROOT)} touches {sorted(touched)}"


def test_only_the_manager_imports_from_inside_continuous_batching() -> None:
    for package in PACKAGES:
        for path in sources(package):
            deep = [n for n in imports(path) if n.startswith("transformers.generation.continuous_batching")]
            typing_only = path.relative_to(ROOT) in TYPING_ONLY
            ours = path.relative_to(ROOT).parent == MANAGER
            assert not deep or typing_only or ours, f"{path.relative_to(ROOT)} imports {deep}"
