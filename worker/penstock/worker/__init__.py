"""The input node: runs user code and streams its batches."""
