"""The commands, each with its options and its help. They import what does the work when they are called."""
