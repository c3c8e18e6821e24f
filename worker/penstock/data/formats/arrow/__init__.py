"""Arrow IPC files, and folders of such files that Hugging Face datasets saved."""
