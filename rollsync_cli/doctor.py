"""`rollsync doctor`: everything that a run needs, looked at before the run."""

import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from rollsync_cli.checks import Check, Status
from rollsync_cli.versions import check_versions

GIB = 2**30
LITTLE_MEMORY = GIB
RAY_LIMIT_S = 60.0


def examine(*, memory_folder: Path = Path("/dev/shm"), start_ray: bool = False) -> Iterator[Check]:
    """All checks, in the order in which one would look. `start_ray`: also a local Ray is started and stopped."""
    yield from check_versions()
    yield from check_devices()
    imports = check_imports()
    yield imports
    if imports.status is Status.FAIL:
        return  # nothing else can be asked
    yield check_shared_memory(memory_folder)
    yield check_kernels()
    yield check_ray(start=start_ray)
    # later, when torch and transformers are known to work
    from rollsync_cli.engine_checks import check_engine

    yield from check_engine()


def check_devices() -> Iterator[Check]:
    """Cores, memory, GPUs."""
    section = "devices"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Check(section=section, name="cpu", status=Status.OK, detail=f"{cores} cores")
    memory = psutil.virtual_memory()
    size = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    enough = memory.available >= LITTLE_MEMORY
    yield Check(
        section=section,
        name="memory",
        status=Status.OK if enough else Status.OFF,
        detail=size if enough else f"{size}: room for small models only",
    )
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        yield Check(
            section=section,
            name="gpu",
            status=Status.FAIL,
            detail=f"torch cannot be imported: {error}",
            remedy="install the build of torch that fits this machine (pytorch.org has the command)",
        )
        return
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            detail = (
                f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, capability {properties.major}."
                f"{properties.minor}"
            )
            yield Check(section=section, name=f"cuda:{index}", status=Status.OK, detail=detail)
        return
    built = torch.version.cuda or torch.version.hip
    why = f"torch is built for CUDA {built} and finds no device" if built else "this torch is built for CPUs"
    remedy = (
        "for a GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES" if built else "for a GPU: install a CUDA build of torch"
    )
    yield Check(section=section, name="gpu", status=Status.OFF, detail=f"{why}; engines run on the CPU", remedy=remedy)


def check_imports() -> Check:
    """The packages themselves, and what they rely on in transformers."""
    section, name = "features", "packages"
    try:
        for package in ("rollout", "sync", "trainer_adapters"):
            importlib.import_module(package)
        importlib.import_module("rollout.manager.contract").check_upstream()
    except Exception as error:  # whatever a package that does not fit raises as it is imported
        return Check(
            section=section,
            name=name,
            status=Status.FAIL,
            detail=f"{type(error).__name__}: {error}",
            remedy="install the versions above: pip install --upgrade rollsync",
        )
    return Check(
        section=section,
        name=name,
        status=Status.OK,
        detail="import, and find in transformers all that they rely on",
    )


def check_shared_memory(folder: Path) -> Check:
    """Where weights are staged for engines in other processes of this machine."""
    from sync import SyncError
    from sync.transports.run_folder import RunFolder

    section, name = "features", "shared memory"
    if not folder.is_dir():
        return Check(
            section=section,
            name=name,
            status=Status.OFF,
            detail=f"there is no {folder}: weights for other processes are staged in the folder of temporary files, slower",
        )
    try:
        RunFolder(folder).close()
    except (SyncError, OSError) as error:
        return Check(
            section=section,
            name=name,
            status=Status.FAIL,
            detail=f"no private folder in {folder}: {error}",
            remedy=f"make {folder} writable for this user, or name another: SharedMemory(folder=...)",
        )
    free = shutil.disk_usage(folder).free
    detail = f"{folder}, {free / GIB:.1f} GiB free; up to three versions of a model's weights lie there"
    if free < LITTLE_MEMORY:
        return Check(
            section=section,
            name=name,
            status=Status.OFF,
            detail=f"{detail}: room for small models only",
            remedy="in a container: docker run --shm-size=...; or SharedMemory(folder=...)",
        )
    return Check(section=section, name=name, status=Status.OK, detail=detail)


def check_kernels() -> Check:
    """The compiled kernels of engines on a CPU."""
    from rollout.model.kernels import COMPILERS, kernels

    section, name = "features", "CPU kernels"
    if kernels() is not None:
        return Check(
            section=section, name=name, status=Status.OK, detail="compiled: attention, norms, sampling, small products"
        )
    if os.environ.get("ROLLSYNC_NO_KERNEL") == "1":
        why, remedy = "ROLLSYNC_NO_KERNEL=1", "unset it"
    elif not any(shutil.which(compiler) for compiler in COMPILERS):
        why, remedy = f"no C compiler: none of {', '.join(COMPILERS)} is installed", "install gcc"
    else:
        why, remedy = "the compiler failed; the warning above says how", "mend or replace it"
    return Check(
        section=section,
        name=name,
        status=Status.OFF,
        detail=f"{why}: torch does their work, more slowly",
        remedy=remedy,
    )


def check_ray(*, start: bool) -> Check:
    """Ray, for engines in other processes and on other machines."""
    section, name = "features", "Ray"
    if importlib.util.find_spec("ray") is None:
        return Check(
            section=section,
            name=name,
            status=Status.OFF,
            detail="not installed: engines run in this process (num_workers=0)",
            remedy="pip install 'ray[default]'",
        )
    try:
        ray = importlib.import_module("ray")
    except Exception as error:  # its native parts may raise anything
        return Check(
            section=section,
            name=name,
            status=Status.FAIL,
            detail=f"cannot be imported: {type(error).__name__}: {error}",
            remedy="pip install --force-reinstall 'ray[default]', or uninstall it to run in one process",
        )
    address = os.environ.get("RAY_ADDRESS")
    where = f"RAY_ADDRESS={address}" if address else "no RAY_ADDRESS: ray.init() starts one on this machine"
    if start:
        return _started_ray(ray, where)
    return Check(
        section=section, name=name, status=Status.OK, detail=f"{ray.__version__}, {where}; not started (--ray does)"
    )


def _task() -> int:
    return os.getpid()


def _started_ray(ray: "object", where: str) -> Check:
    section, name = "features", "Ray"
    api: dict[str, Callable[..., object]] = {part: getattr(ray, part) for part in ("init", "get", "remote", "shutdown")}
    try:
        api["init"](num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
        try:
            api["get"](api["remote"](_task).remote(), timeout=RAY_LIMIT_S)  # type: ignore[attr-defined]
        finally:
            api["shutdown"]()
    except Exception as error:  # Ray wraps whatever happened in errors of its own
        return Check(
            section=section,
            name=name,
            status=Status.FAIL,
            detail=f"does not start: {type(error).__name__}: {error}",
            remedy="see the session's logs under /tmp/ray/session_latest/logs; `ray stop` ends what an earlier run left behind",
        )
    return Check(section=section, name=name, status=Status.OK, detail=f"started here and ran a task; {where}")
