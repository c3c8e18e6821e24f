"""Calls to the coordinator: channels, TLS, authentication, and errors on the wire."""
