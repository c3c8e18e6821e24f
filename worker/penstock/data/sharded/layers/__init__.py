"""Layers: sources made from other sources, which mix, pack, cut, shuffle, convert, filter or repeat samples."""
