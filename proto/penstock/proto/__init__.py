"""The contract: whatever two processes of Penstock must agree on."""
