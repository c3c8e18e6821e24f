"""Calls to the coordinator: channels, TLS, authentication, and how errors are sent."""
