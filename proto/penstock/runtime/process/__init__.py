"""Child processes, forks, the sandbox, memory, liveness files."""
