"""Callbacks for frameworks that own the training loop, and what other libraries need. Each module imports its
framework. The modules are imported only on demand, so no framework is a dependency of Penstock."""

__all__: list[str] = []
