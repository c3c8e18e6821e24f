"""Settings: arguments, variables and the settings file."""
