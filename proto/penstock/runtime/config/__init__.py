"""Settings from arguments, environment variables and the settings file."""
