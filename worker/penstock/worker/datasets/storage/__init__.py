"""Where shards lie, and how they come to this machine and stay here."""
