"""Plans of saves and restores: offsets and extents from sizes, reads from wanted ranges. No I/O, no framework."""
