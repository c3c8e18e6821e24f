"""The gRPC service around the state machine, its server, limits on callers, and web pages."""
