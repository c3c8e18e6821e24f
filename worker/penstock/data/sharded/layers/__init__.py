"""Layers, which are sources made from other sources: they mix, pack, cut, shuffle, convert, filter or repeat
samples."""
