"""Engines that start and supervise a coordinator and workers: on this machine, or on Ray."""
