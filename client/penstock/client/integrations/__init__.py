"""Integrations with other libraries: callbacks for frameworks that own the training loop, and conversions. Each module
imports its framework. A module is imported only on demand, so no framework is a dependency of Penstock."""

__all__: list[str] = []
