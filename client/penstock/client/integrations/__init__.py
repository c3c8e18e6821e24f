"""Callbacks for frameworks that own the training loop, and what other libraries need. Each module is imported on demand
and imports its framework: none of them is a dependency of Penstock."""

__all__: list[str] = []
