"""The live state: keys, element types, parts of logical tensors, arrays in memory. No file I/O."""
