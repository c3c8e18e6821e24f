"""What runs in child processes: the fork server, runners, replayers."""
