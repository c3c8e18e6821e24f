"""What the commands for people do: status, states, settings, drains."""
