"""Commands of `penstock`, each with its options and its help. A command imports its implementation only when it is
called."""
