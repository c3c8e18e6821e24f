"""What starts and supervises coordinator and workers: on this machine, on Ray, under Slurm, in Kubernetes."""
