"""When to save: what snapshots cost, at which steps one is due, and the last one after SIGTERM."""
