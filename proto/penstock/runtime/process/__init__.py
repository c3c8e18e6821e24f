"""Child processes, forks, the sandbox, free memory, liveness files."""
