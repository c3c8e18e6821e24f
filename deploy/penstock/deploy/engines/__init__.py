"""Engines that start and supervise coordinator and workers: on this machine, on Ray, under Slurm, in Kubernetes."""
