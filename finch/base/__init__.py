"""What every room uses, on the standard library and torch alone: errors, files, the names of a run's files, log lines, extras."""
