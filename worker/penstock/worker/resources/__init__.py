"""The processor time and the memory that processes use."""
