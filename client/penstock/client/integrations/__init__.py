"""Integrations with other libraries: callbacks for frameworks that own the training loop, and conversions. Most modules
import their framework. They are imported only on demand, so no framework is a dependency of Penstock."""

__all__: list[str] = []
