"""Mixtures from the files with which jobs of other libraries describe theirs."""
