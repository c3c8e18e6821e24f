"""Protocol between the processes of Penstock: messages, frames, formats and errors on which two processes agree."""
