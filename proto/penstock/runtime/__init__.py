"""Parts that every process needs and peers do not see: settings, telemetry, processes, files."""
