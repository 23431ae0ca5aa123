"""Engines behind a wire: in a Ray actor, or in this process with the same methods."""
