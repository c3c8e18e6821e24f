"""Programs of the worker's child processes: fork server, runner, helper process."""
