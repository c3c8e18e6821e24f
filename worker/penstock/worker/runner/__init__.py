"""Programs of the child processes: the fork server, runners, replayers."""
