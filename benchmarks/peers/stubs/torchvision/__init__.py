"""Stand-in for torchvision: see benchmarks.peers.importing."""
