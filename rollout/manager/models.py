"""What transformers' models say of themselves in private."""

from transformers import PreTrainedModel


def attention_of(model: PreTrainedModel) -> str:
    """The name of the attention that it runs with."""
    name: str = model.config._attn_implementation
    return name


def supports_sdpa(model: PreTrainedModel) -> bool:
    """Whether its attention is what torch's scaled dot products compute, or can be."""
    return bool(model._supports_sdpa)


def is_tensor_parallel(model: PreTrainedModel) -> bool:
    """Whether transformers has spread it over several devices."""
    return getattr(model, "_device_mesh", None) is not None
