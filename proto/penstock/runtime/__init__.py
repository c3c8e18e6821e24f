"""Parts that every Penstock process uses: settings, telemetry, processes, files. Nothing here is part of the wire
protocol."""
