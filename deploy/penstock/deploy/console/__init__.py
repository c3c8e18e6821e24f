"""Common parts of commands: settings, options, exit codes, tables."""
