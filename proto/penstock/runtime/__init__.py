"""What every process needs and no peer sees: settings, telemetry, processes, files."""
