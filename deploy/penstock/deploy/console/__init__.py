"""Parts that commands share: settings, options, exit codes, tables."""
