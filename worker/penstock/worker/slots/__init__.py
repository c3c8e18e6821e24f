"""The slots of a worker: their runners, restart points, verifications, reports."""
