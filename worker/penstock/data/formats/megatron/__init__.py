"""Token files of Megatron-core: PREFIX.bin with the tokens of all documents, PREFIX.idx with their boundaries."""
