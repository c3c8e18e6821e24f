"""Callbacks for frameworks that own the training loop. Each module imports its framework, and is imported on demand:
none of them is a dependency of Penstock."""

__all__: list[str] = []
