"""Models as people publish them, and the lines that take them out of core."""
