"""Parts that every process of Penstock uses, but no part of the protocol: settings, telemetry, processes, files."""
