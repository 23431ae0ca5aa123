"""What `trainer_adapters` raises."""


class AdapterError(ValueError):
    """A model, optimizer, rollout or tensor that the adapter cannot work with; the message names it and the remedy."""
