"""Tools that every stage uses and that know no stage: column types, sizes, files, locks, fault points."""
