"""What every stage stands on, and that knows none of them: column types, sizes, files, locks, fault points."""
