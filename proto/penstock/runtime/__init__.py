"""Parts that every process of Penstock uses: settings, telemetry, processes, files. Nothing here is part of the
protocol between processes."""
