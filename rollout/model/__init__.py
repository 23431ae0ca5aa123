"""The engine's own module: the trainer's Parameters behind layers that are fast for generation."""
