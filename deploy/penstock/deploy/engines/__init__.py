"""Engines that start and supervise a coordinator and workers: on this machine, on Ray, under Slurm, in Kubernetes."""
