"""Whether a script trains the same on unequal workers as in one process."""
