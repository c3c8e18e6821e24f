"""Version 1 of the wire format. The `_pb2` modules are generated from the .proto files here by `make proto`."""
