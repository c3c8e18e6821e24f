"""Callbacks for frameworks that own the training loop. Each module imports its framework. None is imported by default,
so no framework is a dependency of Penstock."""

__all__: list[str] = []
