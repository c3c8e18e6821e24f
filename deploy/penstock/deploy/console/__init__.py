"""What commands have in common: settings, options, exit codes, tables."""
