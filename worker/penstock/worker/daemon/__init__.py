"""The worker daemon: registers at the coordinator, starts and watches the runners of its slots, sends batches to other
hosts. User code never runs in the daemon."""
