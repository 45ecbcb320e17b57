"""What several adapters share: folders of files, stand-ins for functions of frameworks, and the ways to load."""
