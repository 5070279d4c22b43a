"""Looking at masks and attention."""
