"""Integrations with other libraries, most of which import their framework: imported only on demand, so that no
framework is a dependency."""

__all__: list[str] = []
