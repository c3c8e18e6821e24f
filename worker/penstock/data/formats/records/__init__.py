"""Files of records one after another: where each begins, and readers of lines, rows and tar archives."""
