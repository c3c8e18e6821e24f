"""Commands of `penstock`, with options and help. Each imports its implementation only when it is called."""
